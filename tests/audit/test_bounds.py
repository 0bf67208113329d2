import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from epsilons.accounting import least_noise
from epsilons.audit.bounds import (
    Counts,
    ScaledClaim,
    counts_bound,
    exact_p_value,
    family_bound,
    fdp_bound,
    fdp_contradicted,
    lower_bounds,
    steinke_bound,
    steinke_p_value,
)
from epsilons.audit.curve import History, trade_off

# m, r, right, δ → (ε by Steinke, ε by f-DP with a Gaussian) of jax-privacy 2.0.0, level 95 %
PEER = {
    (1000, 100, 90, 1e-5): (1.626144, 2.456405),
    (10000, 1000, 800, 1e-5): (1.250792, 1.711909),
    (10000, 156, 156, 1e-5): (3.656816, 5.103689),
    (500, 500, 300, 1e-3): (0.223277, 0.315321),
    (40000, 2500, 2300, 1e-6): (2.318631, 3.369616),
    (200, 50, 25, 1e-5): (0.0, 0.0),
}


@pytest.mark.parametrize("case", PEER, ids=str)
def test_steinke_is_that_of_jax_privacy(case):
    assert steinke_bound(*case) == pytest.approx(PEER[case][0], abs=2e-4)


@pytest.mark.parametrize("case", [case for case in PEER if PEER[case][1]], ids=str)
def test_fdp_is_that_of_jax_privacy(case):
    m, r, right, delta = case
    for shift, expected in ((-2e-4, True), (2e-4, False)):
        sigma = least_noise(PEER[case][1] + shift, sample_rate=1.0, steps=1, delta=delta)

        def blown(y, mu=1 / sigma):
            return float(norm.cdf(norm.ppf(y) - mu))

        assert fdp_contradicted(blown, m, r, right) is expected


def test_fdp_of_the_familys_curves_comes_near_that_of_the_closed_form():
    """From below: near a rate of 1 the curve gives way to what rounding of losses may change."""
    claim = ScaledClaim(History(1.0, 1.0, 1), 1e-5)
    for (m, r, right, delta), (_, expected) in PEER.items():
        if delta == 1e-5:
            found = fdp_bound(m, r, right, claim)
            assert expected * 0.88 - 1e-3 < found <= expected + 1e-3


def test_steinke_without_delta_is_a_binomial_tail():
    assert steinke_p_value(50, 20, 15, 0.7, 0.0) == pytest.approx(
        binom.sf(14, 20, 1 / (1 + np.exp(-0.7)))
    )


def test_the_exact_p_value_is_that_of_simulated_guesses():
    """The least p-value of the optimal attack is uniform: here against 4,000 simulations."""
    rng, m, r, mu = np.random.default_rng(3), 60, 15, 1.0
    curve = trade_off(History(mu, 1.0, 1))
    inside = rng.random((4_000, m)) < 0.5
    scores = mu * (rng.standard_normal((4_000, m)) + mu * inside) - mu * mu / 2
    sure = np.argsort(-np.abs(scores), axis=1)[:, :r]
    wrong = (np.take_along_axis(scores > 0, sure, 1) != np.take_along_axis(inside, sure, 1)).sum(1)
    for u in (0, 1, 2, 4):
        assert exact_p_value(curve, m, r, u) == pytest.approx((wrong <= u).mean(), abs=0.03)


def test_all_guesses_have_the_error_of_the_curve():
    curve = trade_off(History(1.0, 1.0, 1))
    expected = binom.cdf(30, 100, norm.cdf(-0.5))
    assert exact_p_value(curve, 100, 100, 30) == pytest.approx(expected, rel=1e-3)


def test_counts_by_clopper_pearson():
    """Frozen: scipy.stats.binomtest(…).proportion_ci(0.95, 'exact'), two-sided."""
    low, high = Counts(90, 100, 5, 100).rates(0.975)
    assert low == pytest.approx(0.8237774, abs=1e-6)
    assert high == pytest.approx(0.1128349, abs=1e-6)
    assert counts_bound(Counts(90, 100, 5, 100), 1e-5) == pytest.approx(
        np.log((0.8237774 - 1e-5) / 0.1128349), abs=1e-5
    )
    assert Counts(0, 10, 10, 10).rates(0.95) == (0.0, 1.0)


@settings(max_examples=40, deadline=None)
@given(found=st.integers(0, 200), alarms=st.integers(0, 200), more=st.integers(0, 50))
def test_better_attacks_bound_more(found, alarms, more):
    fewer = Counts(found, 250, alarms, 250)
    better = Counts(found + more, 250, alarms, 250)
    assert counts_bound(better, 1e-5) >= counts_bound(fewer, 1e-5)
    assert counts_bound(fewer, 1e-5, level=0.99) <= counts_bound(fewer, 1e-5, level=0.9)


CLAIM = ScaledClaim(History(0.8, 0.2, 30), 1e-5)


@settings(max_examples=20, deadline=None)
@given(found=st.integers(0, 200), alarms=st.integers(0, 100), more=st.integers(0, 50))
def test_better_attacks_bound_more_of_the_family(found, alarms, more):
    bounds = [family_bound(Counts(found + k, 250, alarms, 250), CLAIM) for k in (0, more)]
    assert bounds[0] <= bounds[1]


def scored(history, m, seed, *, noise=1.0):
    """Scores of m canaries under a Gaussian with `noise` times the claimed one."""
    rng = np.random.default_rng(seed)
    inside = rng.random(m) < 0.5
    total = np.zeros(m)
    rows = zip(history.ratios, history.sample_rates, history.steps, strict=True)
    for s, p, steps in rows:
        for _ in range(steps):
            x = noise * rng.standard_normal(m) + s * (inside & (rng.random(m) < p))
            total += np.log1p(p * np.expm1(s * x - s * s / 2))
    return total, inside


def test_bounds_stay_below_the_truth_and_come_near_it():
    history = History(0.9, 0.1, 100)
    claimed = ScaledClaim(history, 1e-5).epsilon(0)
    found = lower_bounds(*scored(history, 20_000, 1), history, 1e-5, level=0.999)
    assert max(found.counts, found.family, found.exact, found.steinke, found.fdp) <= claimed
    assert found.exact > 0.75 * claimed
    assert found.exact > max(found.fdp, found.steinke) > 0
    assert found.family > found.counts > 0
    assert 0.0005 < found.p_value < 0.9995


def test_too_little_noise_is_contradicted():
    history = History(0.9, 0.1, 100)
    claimed = ScaledClaim(history, 1e-5).epsilon(0)
    found = lower_bounds(*scored(history, 20_000, 1, noise=0.7), history, 1e-5, level=0.999)
    assert found.family > claimed


@pytest.mark.parametrize(("scores", "members"), [([1.0], [True, False]), ([np.nan], [True])])
def test_scores_that_mean_nothing_are_refused(scores, members):
    with pytest.raises(ValueError, match="scores"):
        lower_bounds(scores, members, History(1, 1, 1), 1e-5)


def test_no_members_bound_nothing():
    found = lower_bounds(np.zeros(100), np.zeros(100, bool), History(1, 1, 1), 1e-5)
    assert found.best == found.counts == found.steinke == 0
