import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons import Plan
from epsilons.accounting import NOTHING, Releases, composed_epsilon, individual_epsilons
from epsilons.accounting.composition import (
    composed_epsilons,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
)

DELTA = 1e-5
DISTANCE = 1e-19


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
@given(training=st.floats(0.05, 3), mu=st.floats(0.01, 0.5), log_d=st.floats(-22, -8))
def test_a_gaussian_training_composes_to_the_root_of_squares(training, mu, log_d):
    distance = 10**log_d
    found = composed_epsilon(1 / training, 1.0, 1, DELTA, releases=Releases(mu, distance))
    together = math.hypot(training, mu)
    if math.isfinite(found):
        excess = (1 + math.exp(found)) * distance
        assert float(gaussian_delta(found, together)) + excess <= DELTA * (1 + 1e-9)
    if distance < 1e-15:
        assert found <= 1.001 * gaussian_epsilon(together, DELTA, distance)


@pytest.mark.parametrize("noise", [0.7, 1.2])
def test_one_sampled_step_and_a_release_cost_their_integral(noise):
    """δ of both by quadrature over their two-dimensional density ratio, in 30 digits' room."""
    p, mu = 0.1, 0.4
    found = composed_epsilon(noise, p, 1, DELTA, releases=Releases(mu))
    assert delta_of(found, noise, p, mu) <= DELTA < delta_of(0.999 * found, noise, p, mu)


def delta_of(epsilon, noise, p, mu):
    """The larger δ(ε) of removing and adding, of a sampled step and a release, on a fine grid."""
    s = 1 / noise
    x = np.linspace(-9, 9 + s, 200_001)
    base = np.exp(-x * x / 2) / math.sqrt(2 * math.pi) * (x[1] - x[0])
    ratio = 1 - p + p * np.exp(s * x - s * s / 2)
    # given x, the release has a privacy loss N(±μ²/2, μ²)
    removed = ratio * base * gaussian_tail(epsilon - np.log(ratio), mu)
    added = base * gaussian_tail(epsilon + np.log(ratio), mu)
    return max(removed.sum(), added.sum())


def gaussian_tail(epsilon, mu):
    """δ at any ε, negative ones too, of a μ-GDP release."""
    from scipy.special import ndtr

    return ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)


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
    found = plan.worst_case(releases=Releases(mu))
    assert accountant.get_epsilon(DELTA) * 0.99 < found < plan.worst_case() + 0.1
    assert found <= accountant.get_epsilon(DELTA) * 1.001


@pytest.mark.parametrize("method", ["tight", "rdp", "rdp-classic"])
def test_every_examples_epsilon_has_the_release_as_one_more_step(method):
    norms, steps = np.array([[0.2, 0.6, 1.0], [0.3, 0.1, 1.0]]), np.array([30, 20])
    constants = {"sample_rate": 0.05, "noise_std": 1.5, "max_grad_norm": 1.0}
    how = {"method": method, "levels": 40}
    rows = {name: np.full(2, value) for name, value in constants.items()}
    releases = Releases(0.3, DISTANCE)

    def most(delta):
        return composed_epsilon(1.5, 0.05, 50, delta, method=method, releases=releases.gaussian)

    found = composed_epsilons(
        [(norms, steps)], **rows, delta=DELTA, releases=releases, most=most, **how
    )
    alone = individual_epsilons(norms, steps, **constants, delta=DELTA, **how)
    expected = [
        composed_epsilon(
            [1.5 / z for z in column], 0.05, [30, 20], DELTA, method=method, releases=releases
        )
        for column in norms.T
    ]
    assert (found.values > alone.values).all()
    np.testing.assert_allclose(found.values, expected, rtol=2e-4)
    assert found.values[2] == pytest.approx(found.worst_case, rel=1e-9)
    assert (found.delta, found.kind) == (alone.delta, alone.kind)


def test_where_epsilon_is_large_no_more_of_delta_is_set_aside_than_needed():
    """At ε ≈ 29.6 the distance needs 2 % of δ; half of it set aside would say 30.4."""
    releases = Releases(0.171, 3.6e-20)
    found = composed_epsilon(1.52, 0.4942, 180, 1.8e-5, releases=releases)
    exactly = composed_epsilon(1.52, 0.4942, 180, 1.8e-5, releases=releases.gaussian)
    assert exactly < found < exactly + 0.03


def test_nothing_let_out_adds_nothing():
    assert composed_epsilon(1.5, 0.05, 50, DELTA, releases=NOTHING) == (
        composed_epsilon(1.5, 0.05, 50, DELTA)
    )
    assert composed_epsilon([], [], [], DELTA) == 0
    assert NOTHING.epsilon(DELTA) == 0


def test_a_training_without_a_bound_has_no_total():
    assert math.isinf(composed_epsilon(0.0, 0.5, 1, DELTA, releases=Releases(0.1, DISTANCE)))


def test_noise_too_far_from_gaussian_has_no_bound():
    assert math.isinf(composed_epsilon(1.5, 0.05, 50, DELTA, releases=Releases(0.1, 1e-5)))
    found = composed_epsilons(
        [([[1.0, 0.1]], [50])], sample_rate=np.array([0.05]), noise_std=np.array([1.5]),
        max_grad_norm=np.ones(1), delta=DELTA, releases=Releases(0.1, 1e-5),
        most=lambda delta: 2.0,
    )  # fmt: skip
    assert np.isinf(found.values).all()


def test_releases_add_in_squares_and_never_fall_below_what_is_known():
    assert Releases(0.3, 1e-20) + Releases(0.4, 1e-20) == Releases(0.5, 2e-20)
    assert NOTHING.at_least(Releases(0.3, 1e-20)) == Releases(0.3, 1e-20)
    with pytest.raises(ValueError, match="mu=-1"):
        Releases(-1.0)
