import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from epsilons import Plan
from epsilons.release.composition import (
    Profile,
    composed_epsilon,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
)

DELTA = 1e-5


@pytest.mark.parametrize(
    ("epsilon", "mu"), [(0.1, 0.03), (1, 0.27), (0, 0.5), (5, 1), (0.01, 1e-3)]
)
def test_gaussian_delta_is_the_hockey_stick_of_two_normals(epsilon, mu):
    with mpmath.workdps(40):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        exact = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
    assert float(gaussian_delta(epsilon, mu)) == pytest.approx(float(exact), rel=1e-9)


@given(epsilon=st.floats(1e-3, 20), log_delta=st.floats(-12, -1))
def test_mu_keeps_its_promise_and_epsilon_undoes_it(epsilon, log_delta):
    delta = 10**log_delta
    mu = gaussian_mu(epsilon, delta)
    assert float(gaussian_delta(epsilon, mu)) <= delta
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-6)


def test_distance_from_a_gaussian_costs_delta():
    assert gaussian_mu(1.0, DELTA, distance=1e-6) < gaussian_mu(1.0, DELTA)
    assert gaussian_epsilon(0.2, DELTA, distance=1e-6) > gaussian_epsilon(0.2, DELTA)
    with pytest.raises(ValueError, match="too small"):
        gaussian_mu(1.0, DELTA, distance=1e-5)


@settings(max_examples=25, deadline=None)
@given(training=st.floats(0.05, 3), releases=st.floats(0.01, 0.5))
def test_a_gaussian_training_composes_to_the_root_of_squares(training, releases):
    profile = Profile.around(lambda d: gaussian_epsilon(training, d), DELTA, releases)
    found = composed_epsilon(profile, releases, DELTA)
    exact = gaussian_epsilon(math.hypot(training, releases), DELTA)
    assert exact <= found <= 1.06 * exact


def coin(epsilon):
    """δ of randomised response at ε = 1: (e − e^ε)/(1 + e) from −1 to 1."""
    return max(0.0, (math.e - math.exp(epsilon)) / (1 + math.e), 1 - math.exp(epsilon))


def coin_and_release(epsilon, mu):
    """δ of the coin together with a Gaussian release, by quadrature."""
    loss = norm(mu**2 / 2, mu)
    found, _ = quad(lambda x: coin(epsilon - x) * loss.pdf(x), -1, 4, epsabs=1e-13, limit=500)
    return found


def test_a_training_of_one_coin_composes_to_its_integral():
    at = np.linspace(0.0, 0.999, 60)
    profile = Profile.of(np.r_[at, 1.0], [*map(coin, at), 1e-12])
    found = composed_epsilon(profile, 0.3, DELTA)
    assert coin_and_release(found, 0.3) <= DELTA < coin_and_release(0.995 * found, 0.3)


def test_a_training_known_at_one_point_only_adds_its_epsilon():
    found = composed_epsilon(Profile.of([1.0], [1e-12]), 0.3, DELTA)
    assert coin_and_release(found, 0.3) <= DELTA
    assert found == pytest.approx(1 + gaussian_epsilon(0.3, DELTA), rel=1e-6)


def test_the_total_of_a_run_is_no_less_than_the_exact_one_and_less_than_the_sum():
    """Against dp-accounting's privacy loss distributions, which are exact up to their grid."""
    accounting = pytest.importorskip("dp_accounting")
    pld = pytest.importorskip("dp_accounting.pld")
    plan = Plan(
        n=60_000, batch_size=1024, steps=60, noise_multiplier=1.2, max_grad_norm=1.0, delta=DELTA
    )
    mu = gaussian_mu(0.3, DELTA)
    step = accounting.PoissonSampledDpEvent(plan.sample_rate, accounting.GaussianDpEvent(1.2))
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    accountant.compose(accounting.SelfComposedDpEvent(step, 60))
    accountant.compose(accounting.GaussianDpEvent(1 / mu))
    profile = Profile.around(lambda d: plan.worst_case(delta=d), DELTA, mu)
    found = composed_epsilon(profile, mu, DELTA)
    assert accountant.get_epsilon(DELTA) * 0.99 < found < plan.worst_case(delta=DELTA) + 0.1


@given(st.lists(st.floats(1e-6, 1e-4), min_size=2, max_size=6, unique=True), st.floats(1e-6, 1e-4))
def test_a_profile_between_its_points_is_never_below_the_truth(deltas, delta):
    profile = Profile.of([gaussian_epsilon(0.5, d) for d in deltas], deltas)
    found = profile.epsilon(delta)
    assert found >= gaussian_epsilon(0.5, delta) * (1 - 1e-9)
    assert math.isinf(found) == (delta < min(deltas))


def test_nothing_let_out_adds_nothing():
    profile = Profile.of([2.0, 3.0], [DELTA, DELTA / 10])
    assert composed_epsilon(profile, 0.0, DELTA) == 2.0


def test_a_training_without_a_bound_has_no_total():
    assert math.isinf(composed_epsilon(Profile.of([np.inf], [DELTA]), 0.1, DELTA))
