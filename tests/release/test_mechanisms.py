import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chi2

from audit import noise_drawn_by
from epsilons.release import mechanisms
from epsilons.release.mechanisms import NOISE, noisy_ranks, noisy_size, noisy_sum, rank_noise

VALUES = arrays(float, st.integers(1, 40), elements=st.floats(0, 1))
GRID = arrays(float, st.integers(1, 30), elements=st.floats(0, 1)).map(np.sort)


def exact(mechanism):
    """What the noise would go onto, and the result without noise."""
    seen = []

    def nothing(numbers):
        seen.append([int(number) for number in numbers])
        return numbers.astype(float)

    with noise_drawn_by(nothing):
        return mechanism(), np.array(seen[0], dtype=object)


@given(VALUES, GRID)
def test_ranks_without_noise_are_counts(values, thresholds):
    found, _ = exact(lambda: noisy_ranks(values, thresholds, len(values), 0.5))
    counts = (values[:, None] <= thresholds).sum(axis=0)
    np.testing.assert_allclose(found.values, counts, atol=1e-6)


@given(VALUES, GRID, st.floats(0, 1), st.floats(1e-4, 5))
def test_one_record_moves_ranks_by_mu_and_no_more(values, thresholds, more, mu):
    _, here = exact(lambda: noisy_ranks(values, thresholds, len(values), mu))
    _, there = exact(lambda: noisy_ranks(np.r_[values, more], thresholds, len(values), mu))
    moved = sum(int(step) ** 2 for step in there - here)
    assert (mu * NOISE) ** 2 * (1 - 1e-3) < moved <= (mu * NOISE) ** 2


@given(VALUES, st.floats(-1, 2), st.floats(1e-4, 5))
def test_one_record_moves_sums_and_sizes_by_mu_and_no_more(values, more, mu):
    for mechanism in (
        lambda x: noisy_sum(x, 1.0, mu),
        lambda x: noisy_size(np.ones(len(x), dtype=bool), mu),
    ):
        _, here = exact(lambda: mechanism(values))  # noqa: B023
        _, there = exact(lambda: mechanism(np.r_[values, more]))  # noqa: B023
        assert abs(int((there - here)[0])) <= mu * NOISE


def test_opendp_prices_the_grid_as_we_do():
    """Zero-concentrated DP of ρ = μ²/2, by its own map."""
    unit = int(0.03 * NOISE)
    assert mechanisms._sampler().map(unit) == pytest.approx(0.03**2 / 2, rel=1e-9)


def test_the_noise_has_the_spread_it_says():
    """4,000 draws of ranks and sums; a correct program fails in one case of 10,000."""
    size, draws = 5, 800
    thresholds = np.linspace(0.1, 0.9, size)
    found = [noisy_ranks(np.zeros(0), thresholds, 0, 0.5) for _ in range(draws)]
    scaled = np.array([f.values for f in found]) / rank_noise(size, 0.5)
    for column in scaled.T:
        assert chi2.ppf(1e-5, draws) < (column**2).sum() < chi2.ppf(1 - 1e-5, draws)
    sums = np.array([noisy_sum(np.array([0.5]), 1.0, 0.5).values[0] for _ in range(draws)])
    assert chi2.ppf(1e-5, draws) < (sums**2).sum() < chi2.ppf(1 - 1e-5, draws)


@pytest.mark.parametrize("k", [1, 2, 5, 20, 300])
def test_rank_noise_is_that_of_the_factorisation_and_less_than_that_of_plain_counts(k):
    signs = np.where(np.tri(k, dtype=bool), 0.5, -0.5)
    u, singular, v = np.linalg.svd(signs)
    left, right = u * np.sqrt(singular), np.sqrt(singular)[:, None] * v
    sensitivity = np.linalg.norm(right, axis=0).max()
    assert rank_noise(k, 1.0) == pytest.approx(sensitivity * np.linalg.norm(left, axis=1).max())
    assert rank_noise(k, 1.0) <= np.sqrt(k) / 2 + 1e-12


def test_what_is_no_number_counts_as_large():
    found, _ = exact(lambda: noisy_ranks(np.array([np.nan, 0.1]), np.array([0.5]), 2, 1.0))
    assert found.values[0] == pytest.approx(1)
    total, _ = exact(lambda: noisy_sum(np.array([np.nan]), 2.0, 1.0))
    assert total.values[0] == pytest.approx(1)


@pytest.mark.parametrize("mu", [0.0, 1e-12, 1e9])
def test_costs_beyond_the_grid_are_refused(mu):
    with pytest.raises(ValueError, match="mu="):
        noisy_sum(np.zeros(3), 1.0, mu)


@settings(max_examples=5, deadline=None)
@given(st.floats(0, 1))
def test_two_draws_differ(value):
    first, second = (noisy_sum(np.array([value]), 1.0, 0.5).values[0] for _ in range(2))
    assert first != second
