"""exp for compiled loops."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from epsilons.training.compiled import reordered
from epsilons.training.rules import exponential
from epsilons.training.rules.tiles import LANES


@reordered(cache=False)  # which would keep an older exponential
def run(x, less):
    return exponential.exponentials(x, 0, x.size, less)


@reordered(cache=False)
def largest(x):
    return exponential.largest(x, 0, x.size)


def exponentials(x, less=0.0):
    """In place, as loops call it; their sum."""
    padded = np.zeros(x.size + -x.size % LANES, np.float32)
    padded[: x.size] = x
    total = run(padded, np.float32(less))
    x[:] = padded[: x.size]
    return total - (padded.size - x.size) * math.exp(-less)


def test_it_is_as_precise_as_its_numbers():
    x = np.linspace(-87, 88, 200_001).astype(np.float32)
    found = x.copy()
    exponentials(found)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 2e-7


def test_below_the_least_normal_number_it_is_nothing():
    found = np.array([-1e30, -88.0, -math.inf, math.nan], np.float32)
    exponentials(found)
    assert found[:3].tolist() == [0, 0, 0]
    assert math.isnan(found[3])


def test_a_number_is_taken_off_and_the_sum_comes_back():
    x = np.random.default_rng(0).normal(0, 3, 10 * LANES).astype(np.float32)
    found, exact = x.copy(), np.exp(x.astype(np.float64) - 1.5)
    assert np.isclose(exponentials(found, 1.5), exact.sum(), rtol=1e-6)
    assert np.allclose(found, exact, rtol=1e-6)


@settings(deadline=None)
@given(arrays(np.float32, 3 * LANES, elements=st.floats(-100, 100, width=32)))
def test_the_largest_is_found(x):
    assert largest(x) == x.max()


def test_above_the_largest_number_it_is_infinite():
    found = np.array([88.5, 1e30, math.inf], np.float32)
    exponentials(found)
    assert np.isposinf(found).all()


def test_nan_stays_nan_whatever_its_bits():
    """Its last bits were taken for an exponent, and gave a number."""
    found = (np.uint32(0x7FC00000) + np.arange(512, dtype=np.uint32)).view(np.float32)
    exponentials(found)
    assert np.isnan(found).all()
