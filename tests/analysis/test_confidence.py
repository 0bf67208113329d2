import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from epsilons.analysis.confidence import percentiles, resampled_means, share_interval


@given(n=st.integers(1, 5000), part=st.floats(0, 1))
def test_share_interval_is_wilsons(n, part):
    count = round(part * n)
    expected = binomtest(count, n).proportion_ci(method="wilson")
    assert share_interval(count, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_nothing_seen_says_nothing():
    assert share_interval(0, 0) == (0.0, 1.0)


def test_resampled_means_spread_like_the_standard_error():
    values = np.random.default_rng(1).gamma(2.0, size=2000)
    means = resampled_means(values, np.random.default_rng(2), 2000)
    assert means.mean() == pytest.approx(values.mean(), abs=4 * means.std() / 2000**0.5)
    assert means.std() == pytest.approx(values.std() / 2000**0.5, rel=0.08)


def test_resampling_in_parts_is_resampling_at_once(monkeypatch):
    values = np.random.default_rng(1).random(50)
    whole = resampled_means(values, np.random.default_rng(2), 40)
    monkeypatch.setattr("epsilons.analysis.confidence._MOST_POSITIONS", 300)
    assert np.allclose(resampled_means(values, np.random.default_rng(2), 40), whole)


def test_percentiles_of_infinite_means_are_infinite():
    assert percentiles(np.full(100, np.inf)) == (np.inf, np.inf)
