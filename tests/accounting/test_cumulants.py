import itertools

import numpy as np
import oracles
import pytest

from epsilons.accounting.cumulants import cumulants

RATES = (1e-6, 1e-3, 0.08, 0.5, 0.999)
RATIOS = (1e-6, 1e-3, 0.1, 0.5, 2.0, 10.0, 50.0, 51.0, 1e5)


def relative_error(found, true):
    return abs(float(found / true - 1))


@pytest.mark.parametrize("order", [2, 3, 17, 128, 512])
def test_integer_orders_agree_with_the_binomial_theorem(order):
    for s, p in itertools.product(RATIOS, RATES):
        true = oracles.closed_form(order, s, p)
        assert relative_error(cumulants(float(order), s, p), true) <= 1e-11, (s, p)


@pytest.mark.parametrize("order", [1.01, 1.7, 6.25, 40.5])
def test_fractional_orders_agree_with_50_digit_integrals(order):
    for s, p in itertools.product((1e-6, 0.01, 0.3, 2.0, 12.0), (1e-6, 0.02, 0.5, 0.999)):
        true = oracles.quadrature(order, s, p).real
        assert relative_error(cumulants(order, s, p), true) <= 1e-11, (s, p)


@pytest.mark.parametrize("order", [-0.01, -1.0, -5.3, -60.5, -511.0])
def test_negative_orders_agree_with_50_digit_integrals(order):
    for s, p in itertools.product((1e-6, 0.05, 0.3, 2.0), (1e-6, 0.02, 0.5, 0.999)):
        true = oracles.quadrature(order, s, p).real
        assert relative_error(cumulants(order, s, p), true) <= 1e-11, (s, p)


def test_sampling_everything_is_the_gaussian_mechanism():
    orders = np.array([1.5, 2.0, 64.0, -3.0])
    s = np.array([1e-6, 0.3, 20.0])
    expected = orders * (orders - 1) * s[:, None] ** 2 / 2
    np.testing.assert_allclose(cumulants(orders, s, 1.0), expected, rtol=1e-15)


def test_nearly_sampling_everything_is_nearly_the_gaussian_mechanism():
    orders = np.array([1.5, 2.0, 64.0, 4000.0])
    s = np.array([0.01, 0.3, 5.0])
    np.testing.assert_allclose(
        cumulants(orders, s, 1 - 1e-15), cumulants(orders, s, 1.0), rtol=1e-9
    )


def test_edges_are_as_documented():
    orders = [1.0, 2.0, -1.0, 0.0]
    assert (cumulants(orders, 0.0, 0.3) == 0).all()
    assert (cumulants(orders, 1.0, 0.0) == 0).all()
    assert cumulants(orders, np.inf, 0.5).tolist() == [0.0, np.inf, np.log(2), 0.0]


def test_adding_without_noise_is_the_limit_of_little_noise():
    np.testing.assert_allclose(
        cumulants([-0.3, -90.0], 60.0, 0.3), cumulants([-0.3, -90.0], np.inf, 0.3), rtol=1e-12
    )


def test_positive_above_underflow_and_never_nan():
    s = np.append(np.geomspace(1e-140, 1e2, 30), [1e5, 1e100, 1e154, 1e155, 1e308])
    p = np.array([1e-9, 1e-3, 0.5, 1 - 1e-12])
    k = cumulants([1.0001, 1.2, 77.7, 4001.0, -0.2, -3999.0], s[:, None], p)
    assert (k > 0).all()


def test_cumulants_grow_with_norm_and_sampling_rate():
    s = np.append(np.geomspace(1e-4, 30, 60), np.geomspace(49, 1e8, 40))
    p = np.array([1e-6, 1e-3, 0.1, 0.5, 0.9])
    k = cumulants([1.3, 2.5, 90.0, 3000.0, -0.3, -90.0], s[:, None], p)
    assert (k[1:] >= k[:-1] * (1 - 1e-12)).all()
    assert (np.diff(k[:80], axis=1) > 0).all()


def test_orders_between_zero_and_one_are_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        cumulants(0.5, 1.0, 0.1)
