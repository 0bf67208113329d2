"""What must hold between any two histories, to a millionth."""

import time

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_ndtr

from epsilons import Plan
from epsilons.accounting import epsilons_from_blocks, individual_epsilons, tight_epsilon

SLACK = 1 + 1e-6
METHODS = ("tight", "rdp", "rdp-classic")
# Few levels: the properties do not depend on their number, the time does.
LEVELS = 24

quick = settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
norms = arrays(np.float64, (4, 3), elements=st.floats(0, 1.5))
steps = arrays(np.int64, 4, elements=st.integers(1, 400))
noise = st.floats(0.6, 12)
rates = st.sampled_from([2e-3, 0.03, 0.2, 0.7, 1.0])
deltas = st.sampled_from([1e-3, 1e-5, 1e-8])
rounding = st.sampled_from([None, "up"])


def epsilons(norms, steps, p, sigma, delta, **options):
    return individual_epsilons(
        norms,
        steps,
        sample_rate=p,
        noise_std=sigma,
        max_grad_norm=1.0,
        delta=delta,
        levels=LEVELS,
        **options,
    )


@quick
@given(norms, steps, rates, noise, deltas, rounding)
def test_tight_is_below_rdp_is_below_classic_and_all_below_the_worst_case(z, n, p, sigma, delta, r):
    tight, rdp, classic = (
        epsilons(z, n, p, sigma, delta, method=method, rounding=r) for method in METHODS
    )
    assert (tight.values <= rdp.values * SLACK).all()
    assert (rdp.values <= classic.values * SLACK).all()
    for eps in (tight, rdp, classic):
        assert (eps.values <= eps.worst_case).all()


@quick
@given(norms, steps, rates, noise, deltas, st.sampled_from(METHODS), st.floats(0, 1))
def test_larger_norms_cost_more(z, n, p, sigma, delta, method, share):
    small = epsilons(z * share, n, p, sigma, delta, method=method)
    large = epsilons(z, n, p, sigma, delta, method=method)
    assert (small.values <= large.values * SLACK).all()


@quick
@given(norms, steps, rates, noise, deltas, st.sampled_from(METHODS), rounding)
def test_rounding_up_never_lowers(z, n, p, sigma, delta, method, r):
    up = epsilons(z, n, p, sigma, delta, method=method, rounding="up")
    soft = epsilons(z, n, p, sigma, delta, method=method)
    assert (soft.values <= up.values * SLACK).all()


@quick
@given(
    st.lists(st.floats(0.6, 30), min_size=1, max_size=4),
    st.integers(1, 500),
    rates,
    deltas,
    st.floats(1, 3),
    st.integers(0, 300),
)
def test_more_steps_more_sampling_and_less_noise_cost_more(sigma, n, p, delta, factor, more):
    sigma = np.array(sigma)
    eps = tight_epsilon(sigma, p, n, delta)
    assert eps <= tight_epsilon(sigma, p, n + more, delta) * SLACK
    assert eps <= tight_epsilon(sigma, min(1.0, p * factor), n, delta) * SLACK
    assert eps <= tight_epsilon(sigma / factor, p, n, delta) * SLACK
    assert eps >= tight_epsilon(sigma, p, n, min(0.5, delta * factor)) / SLACK


@quick
@given(norms, steps, rates, noise, deltas, st.sampled_from(METHODS), st.integers(0, 3))
def test_splitting_a_history_changes_nothing(z, n, p, sigma, delta, method, row):
    part = n[row] // 3
    split_norms = np.vstack([z, z[row]])
    split_steps = np.append(n, part)
    split_steps[row] -= part
    whole = epsilons(z, n, p, sigma, delta, method=method)
    split = epsilons(split_norms, split_steps, p, sigma, delta, method=method)
    assert (whole.values == split.values).all()
    assert whole.worst_case == split.worst_case


@quick
@given(norms, steps, rates, noise, deltas, st.sampled_from(METHODS), st.permutations(range(3)))
def test_the_order_of_examples_and_their_company_are_irrelevant(
    z, n, p, sigma, delta, method, order
):
    order = list(order)
    whole = epsilons(z, n, p, sigma, delta, method=method)
    moved = epsilons(z[:, order], n, p, sigma, delta, method=method)
    np.testing.assert_allclose(moved.values, whole.values[order], rtol=1e-9)
    alone = epsilons_from_blocks(
        [(z[:, [j]], n) for j in range(3)],
        sample_rate=p,
        noise_std=sigma,
        max_grad_norm=1.0,
        delta=delta,
        levels=LEVELS,
        method=method,
    )
    np.testing.assert_allclose(alone.values, whole.values, rtol=1e-9)


@quick
@given(norms, steps, rates, noise, deltas, st.sampled_from(METHODS), st.floats(0.1, 50))
def test_the_unit_of_the_norm_is_irrelevant(z, n, p, sigma, delta, method, unit):
    one = epsilons(z, n, p, sigma, delta, method=method)
    other = individual_epsilons(
        z * unit,
        n,
        sample_rate=p,
        noise_std=sigma * unit,
        max_grad_norm=unit,
        delta=delta,
        levels=LEVELS,
        method=method,
    )
    np.testing.assert_allclose(other.values, one.values, rtol=1e-6, atol=1e-12)


def least_epsilon(s, p, delta):
    """What the test "is the sum beyond s?" alone proves, after one step."""
    power = p / 2 + (1 - p) * np.exp(log_ndtr(-s))
    return max(0.0, np.log(power - delta) - log_ndtr(-s)) if power > delta else 0.0


@settings(quick, max_examples=60)
@given(
    st.floats(-300, 300), st.floats(0, 8), rates, deltas,
    st.sampled_from(METHODS), st.sampled_from([1, 60]),
)  # fmt: skip
def test_any_noise_is_priced_at_once_and_less_noise_costs_more(log_s, more, p, delta, method, n):
    """A noise multiplier of 1e-5 took for ever, 1e-50 was numpy's error and 1e-154 gave ε = 0."""
    begun = time.monotonic()
    eps, worse = (
        Plan(
            n=1000, sample_rate=p, steps=n, noise_multiplier=10.0**-log, max_grad_norm=1.0,
            delta=delta,
        ).worst_case(method)
        for log in (log_s, min(log_s + more, 307))
    )  # fmt: skip
    assert least_epsilon(10.0**log_s, p, delta) / SLACK <= eps <= worse * SLACK
    assert time.monotonic() - begun < 30  # a tenth of a second each, but for the first


@settings(quick, max_examples=40)
@given(
    st.floats(-300, 300), st.floats(-300, 300), rates, deltas,
    st.sampled_from(METHODS), st.sampled_from([None, "up"]),
)  # fmt: skip
def test_whatever_the_bound_and_the_noise_norms_are_charged_in_order(c, sigma, p, delta, method, r):
    bound, noise_std = 10.0**c, 10.0**sigma
    eps = individual_epsilons(
        bound * np.array([[0.0, 2.0**-60, 1e-3, 0.5, 1.0, np.inf]]), [60],
        sample_rate=p, noise_std=noise_std, max_grad_norm=bound, delta=delta, method=method,
        rounding=r, levels=LEVELS,
    ).values  # fmt: skip
    with np.errstate(over="ignore"):
        s = bound / noise_std
    assert eps[0] == 0
    assert (eps[:-1] <= eps[1:] * SLACK).all()
    assert eps[4] == eps[5] >= least_epsilon(s, p, delta) / SLACK
