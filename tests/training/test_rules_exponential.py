"""exp for compiled loops."""

import math

import numpy as np

from epsilons.training.compiled import reordered
from epsilons.training.rules.exponential import exponential


@reordered(cache=False)  # which would keep an older exponential
def exponentials(x):
    """As other loops call it: what they allow must not reach into it."""
    for j in range(len(x)):
        x[j] = exponential(x[j])


def test_it_is_as_precise_as_its_numbers():
    x = np.linspace(-87, 88, 200_001).astype(np.float32)
    found = x.copy()
    exponentials(found)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 2e-7


def test_below_the_least_normal_number_it_stays_there():
    found = np.array([-1e30, -88.0, -math.inf, math.nan], np.float32)
    exponentials(found)
    assert np.allclose(found[:3], math.exp(-87), rtol=1e-6)
    assert math.isnan(found[3])


def test_above_the_largest_number_it_is_infinite():
    found = np.array([88.5, 1e30, math.inf], np.float32)
    exponentials(found)
    assert np.isposinf(found).all()


def test_nan_stays_nan_whatever_its_bits():
    """Its last bits were taken for an exponent, and gave a number."""
    found = (np.uint32(0x7FC00000) + np.arange(512, dtype=np.uint32)).view(np.float32)
    exponentials(found)
    assert np.isnan(found).all()
