import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from epsilons.accounting import tight_epsilon
from epsilons.audit.curve import History, epsilon_below, trade_off

SETTINGS = [
    (1 / 3.32622, 4096 / 50_000, 3662, 1e-5),
    (1 / 2.50631, 1024 / 60_000, 5859, 1e-5),
    (0.1 / 2.50631, 1024 / 60_000, 5859, 1e-5),
    (1.0, 0.1, 100, 1e-5),
    (2.0, 1.0, 3, 1e-5),
    (0.5, 0.5, 20, 1e-9),
    (4.0, 0.01, 1, 1e-3),
]


@pytest.mark.parametrize(("s", "p", "steps", "delta"), SETTINGS)
def test_both_sides_of_the_curve_hold_the_tight_epsilon_between_them(s, p, steps, delta):
    history = History(s, p, steps)
    exact = tight_epsilon(1 / s, p, steps, delta, direction="remove")
    below, above = epsilon_below(history, delta), trade_off(history, "up").epsilon(delta)
    assert exact * 0.997 - 1e-3 < below <= exact * (1 + 1e-9)
    assert exact <= above < exact * 1.003 + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(("s", "p", "steps", "delta"), SETTINGS)
def test_a_fine_grid_agrees_with_the_tight_accountant(s, p, steps, delta):
    exact = tight_epsilon(1 / s, p, steps, delta)
    assert epsilon_below(History(s, p, steps), delta, points=2**24) == pytest.approx(
        exact, rel=2e-4
    )


def test_the_curve_of_a_gaussian_is_the_closed_form():
    """f(α) = Φ(Φ⁻¹(1 − α) − μ), μ = s·√T, where everyone is drawn."""
    curve = trade_off(History(0.5, 1.0, 4))
    alpha = np.array([1e-6, 1e-3, 0.05, 0.3, 0.7, 0.99])
    exact = norm.cdf(norm.ppf(1 - alpha) - 1.0)
    found = curve.false_negatives(alpha)
    assert np.all(found <= exact + 1e-12)
    np.testing.assert_allclose(found, exact, atol=3e-4)
    np.testing.assert_allclose(curve.false_positives_at(exact), alpha, atol=3e-4)


def test_the_mean_error_of_all_guesses_is_that_of_the_closed_form():
    curve = trade_off(History(0.5, 1.0, 4))
    assert float(curve.mean_error(1.0)) == pytest.approx(norm.cdf(-0.5), abs=1e-4)
    shares = np.linspace(0.01, 1, 50)
    assert np.all(np.diff(curve.mean_error(shares)) >= -1e-12)


def test_the_curve_is_that_of_simulated_scores():
    """4 standard deviations: a correct program fails once in 16,000 times."""
    rng, s, p, steps, m = np.random.default_rng(5), 0.8, 0.2, 30, 40_000
    scores = {}
    for member in (False, True):
        total = np.zeros(m)
        for _ in range(steps):
            x = rng.standard_normal(m) + s * (member & (rng.random(m) < p))
            total += np.log1p(p * np.expm1(s * x - s * s / 2))
        scores[member] = total
    curve = trade_off(History(s, p, steps))
    for threshold in (-1.0, 0.0, 1.0, 3.0):
        false_positives = (scores[False] >= threshold).mean()
        least = float(curve.false_negatives(false_positives))
        spread = math.sqrt(0.25 / m) * 8
        assert least - spread < 1 - (scores[True] >= threshold).mean() < least + spread


@settings(max_examples=25, deadline=None)
@given(
    s=st.floats(0.05, 2),
    p=st.floats(0.01, 1),
    steps=st.integers(1, 50),
    factor=st.floats(1.05, 2),
)
def test_larger_norms_and_more_steps_are_easier_to_tell(s, p, steps, factor):
    alpha = np.geomspace(1e-4, 0.5, 8)
    one = trade_off(History(s, p, steps), points=2**14).false_negatives(alpha)
    down = trade_off(History(s, p, steps), "down", points=2**14).false_negatives(alpha)
    larger = trade_off(History(s * factor, p, steps), "up", points=2**14).false_negatives(alpha)
    more = trade_off(History(s, p, 2 * steps), "up", points=2**14).false_negatives(alpha)
    assert np.all(one <= down + 1e-9)
    assert np.all(larger <= down + 1e-9)
    assert np.all(more <= down + 1e-9)


def test_a_history_adds_up_equal_steps_and_drops_those_that_cost_nothing():
    history = History([1.0, 0.0, 1.0, 2.0], [0.1, 0.1, 0.1, 0.0], [3, 5, 4, 7])
    assert history.ratios.tolist() == [1.0]
    assert history.steps.tolist() == [7]
    nothing = History(0.0, 0.1, 10)
    assert epsilon_below(nothing, 1e-5) == 0
    assert float(trade_off(nothing).false_negatives(0.25)) == pytest.approx(0.75)


@pytest.mark.parametrize(("s", "p", "steps"), [(-1, 0.1, 1), (1, 1.1, 1), (1, 0.1, 0.5)])
def test_histories_that_mean_nothing_are_refused(s, p, steps):
    with pytest.raises(ValueError, match=r".+"):
        History(s, p, steps)
