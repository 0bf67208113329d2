"""An adaptive clip bound: what gradient and count cost together, and where the bound goes."""

import math

import dp_accounting as dp
import mpmath
import numpy as np
import pytest
from dp_accounting import pld
from hypothesis import given
from hypothesis import strategies as st

from epsilons import Phase, Plan
from epsilons.accounting.adaptive import (
    AdaptiveClipping,
    count_charge,
    gradient_multiplier,
    step_multiplier,
)
from epsilons.accounting.individual import epsilons_from_blocks

MOVES = dict(initial_clipbound=0.5, unclipped_num_std=4.0)
ADAPTIVE = AdaptiveClipping(**MOVES, update_every=3)


def plan(**changes):
    constants = dict(
        n=1000, batch_size=50, steps=100, noise_multiplier=1.2, max_grad_norm="adaptive",
        delta=1e-5, adaptive=ADAPTIVE,
    )  # fmt: skip
    return Plan(**{**constants, **changes})


def pld_epsilon(parts, delta=1e-5):
    """ε of (noise multiplier, rate, steps) by dp-accounting, whose interval makes it a bound."""
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    for noise, rate, steps in parts:
        step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise))
        accountant.compose(dp.SelfComposedDpEvent(step, steps))
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("noise", "deviation"), [(1.0, 5.0), (0.8, 1.0), (2.5, 12.0), (1.999, 1.0)]
)
def test_multipliers_are_those_of_opacus(noise, deviation):
    optimizers = pytest.importorskip("opacus.optimizers")
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD([parameter], lr=1.0), noise_multiplier=noise, max_grad_norm=1.0,
        target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=10.0,
        min_clipbound=0.1, unclipped_num_std=deviation, expected_batch_size=10,
    )  # fmt: skip
    drawn = []
    parameter.grad_sample, parameter.summed_grad = None, torch.zeros(1)
    from opacus.optimizers import adaclipoptimizer

    kept = adaclipoptimizer._generate_noise
    adaclipoptimizer._generate_noise = lambda std, reference, **_: drawn.append(std) or reference
    try:
        optimizer.unclipped_num = torch.tensor(3)
        optimizer.add_noise()
    finally:
        adaclipoptimizer._generate_noise = kept
    ours = gradient_multiplier(noise, deviation)
    assert drawn == [pytest.approx(ours, rel=1e-12), deviation]
    # what such a gradient and a count cost together is the noise that Opacus accounts for
    assert step_multiplier(ours, count_charge(deviation)) == pytest.approx(noise, rel=1e-8)


def test_the_bound_moves_as_in_opacus():
    torch = pytest.importorskip("torch")
    optimizers = pytest.importorskip("opacus.optimizers")
    optimizer = optimizers.AdaClipDPOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), noise_multiplier=1.0,
        max_grad_norm=0.5, target_unclipped_quantile=0.7, clipbound_learning_rate=0.3,
        max_clipbound=0.6, min_clipbound=0.4, unclipped_num_std=4.0, expected_batch_size=10,
    )  # fmt: skip
    ours = AdaptiveClipping(
        **MOVES, target_unclipped_quantile=0.7, clipbound_learning_rate=0.3, min_clipbound=0.4,
        max_clipbound=0.6,
    )  # fmt: skip
    bound = 0.5
    for share in (0.2, 0.9, 0.1, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        # Opacus divides by the number drawn, which is secret; here by the expected one, 10
        optimizer.sample_size, optimizer.unclipped_num = 10, torch.tensor(10 * share)
        optimizer.update_max_grad_norm()
        bound = ours.next_bound(bound, released=10 * (share - 0.5), batch_size=10)
        assert bound == pytest.approx(float(optimizer.max_grad_norm), rel=1e-6)
    assert bound == 0.4


def test_every_step_that_releases_a_count_is_priced_with_it():
    ours = plan().worst_case()
    together = 1 / math.hypot(1 / 1.2, 1 / 8)
    theirs = pld_epsilon([(1.2, 0.05, 67), (together, 0.05, 33)])
    assert 0.999 * theirs < ours <= theirs * 1.0001
    assert ours > 1.003 * plan(adaptive=None, max_grad_norm=0.5).worst_case()
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(plan().dp_event())
    assert accountant.get_epsilon(1e-5) == pytest.approx(theirs, rel=1e-9)


def test_one_joint_release_is_a_gaussian_with_the_length_of_both_shifts():
    """Privacy loss of (gradient, count) against that of one number, integrated by mpmath."""
    p, z, beside, order = mpmath.mpf("0.1"), 1 / mpmath.mpf("1.2"), mpmath.mpf(1) / 8, 3

    def ratio(x, y):
        shifted = mpmath.exp(z * x - z**2 / 2 + beside * y - beside**2 / 2)
        return (1 - p + p * shifted) ** order

    def density(x, y):
        return mpmath.exp(-(x * x + y * y) / 2) / (2 * mpmath.pi)

    grid = [-8, 0, 9]
    both = mpmath.quad(lambda x, y: ratio(x, y) * density(x, y), grid, grid)
    from epsilons.accounting.cumulants import cumulants

    (ours,) = cumulants(float(order), np.array([math.hypot(1 / 1.2, 1 / 8)]), np.array([0.1]))
    assert ours == pytest.approx(float(mpmath.log(both)), rel=1e-9)


def test_everyone_pays_for_the_count_with_the_coin_of_the_gradient():
    norms = np.array([[0.0, 0.1, 0.3, 0.5], [0.0, 0.1, 0.3, 0.5]])
    found = epsilons_from_blocks(
        [(norms, [67, 33])], noise_std=0.6, sample_rate=0.05, max_grad_norm=0.5, delta=1e-5,
        beside=np.array([0.0, 1 / 8]), rounding="up", levels=5,
    )  # fmt: skip
    for z, value in zip(norms[0], found.values, strict=True):
        parts = [(1 / math.hypot(z / 0.6, 1 / 8), 0.05, 33)]
        parts += [(0.6 / z, 0.05, 67)] if z else []
        theirs = pld_epsilon(parts)
        assert 0.99 * theirs - 1e-4 < value <= theirs * 1.0002
    assert found.values[0] > 0  # who adds nothing to the gradient is counted all the same
    assert found.worst_case == found.values[-1]


def test_norms_between_levels_are_priced_from_above_with_a_count_too():
    norms = np.array([[0.0, 0.013, 0.211, 0.333, 0.499]])
    exact, between = (
        epsilons_from_blocks(
            [(norms, [40])], noise_std=0.6, sample_rate=0.05, max_grad_norm=0.5, delta=1e-5,
            beside=1 / 8, levels=levels,
        ).values
        for levels in (512, 128)
    )  # fmt: skip
    assert (between >= exact * (1 - 1e-6)).all()
    assert (between <= exact * 1.02).all()
    reference = [pld_epsilon([(1 / math.hypot(z / 0.6, 1 / 8), 0.05, 40)]) for z in norms[0]]
    assert (exact <= np.array(reference) * 1.0002).all()
    assert (exact >= 0.99 * np.array(reference) - 1e-4).all()


@pytest.mark.parametrize("every", [1, 32, 1000])
def test_calibration_includes_the_counts(every):
    adaptive = AdaptiveClipping(**MOVES, update_every=every)
    found = Plan.for_epsilon(
        2.0, n=1000, batch_size=50, steps=100, max_grad_norm="adaptive", delta=1e-5,
        adaptive=adaptive,
    )  # fmt: skip
    assert 1.9999 < found.worst_case() <= 2.0
    plain = Plan.for_epsilon(2.0, n=1000, batch_size=50, steps=100, max_grad_norm=0.5, delta=1e-5)
    if every == 1:  # Opacus's relation, which it has for a count in every step
        expected = gradient_multiplier(plain.noise_multiplier, 4.0)
        assert found.noise_multiplier == pytest.approx(expected, rel=1e-6)
    elif every == 32:
        assert found.noise_multiplier > 1.0003 * plain.noise_multiplier
    else:  # there is no such step
        assert found.noise_multiplier == pytest.approx(plain.noise_multiplier, rel=1e-6)


def test_a_target_that_the_counts_alone_exceed_is_refused():
    adaptive = AdaptiveClipping(initial_clipbound=0.5, unclipped_num_std=0.1, update_every=1)
    with pytest.raises(ValueError, match="the clip bound alone costs"):
        Plan.for_epsilon(
            1.0, n=1000, batch_size=50, steps=100, max_grad_norm="adaptive", delta=1e-5,
            adaptive=adaptive,
        )  # fmt: skip


@given(
    every=st.integers(1, 40),
    steps=st.integers(1, 120),
    first=st.integers(1, 119),
    window=st.tuples(st.integers(0, 130), st.integers(0, 130)),
)
def test_every_step_is_of_one_phase(every, steps, first, window):
    adaptive = AdaptiveClipping(**MOVES, update_every=every)
    phases = ((first, {"noise_multiplier": 2.0}),) if first < steps else ()
    the_plan = plan(steps=steps, adaptive=adaptive, phases=phases, refreshes_per_epoch=0)
    of_step = [the_plan.phase(step) for step in range(steps)]
    low, high = min(window), max(window)
    for phase in the_plan.all_phases:
        own = [step for step in range(low, min(high, steps)) if of_step[step] == phase]
        assert phase.count(low, high) == len(own)
    for step, phase in enumerate(of_step):
        assert (phase.beside > 0) == (step % every == every - 1)
        assert phase.noise_multiplier == (2.0 if phases and step >= first else 1.2)


def test_a_plan_keeps_how_its_bound_adapts():
    the_plan = plan()
    assert (the_plan.max_grad_norm, the_plan.noise_std) == (0.5, 0.6)
    assert Plan.from_dict(the_plan.to_dict()) == the_plan
    assert plan(adaptive=dict(MOVES, update_every=3)) == the_plan
    assert all(isinstance(phase, Phase) for phase in the_plan.all_phases)
    assert "adaptive" in the_plan.to_dict()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(adaptive=None), "beside it adaptive=AdaptiveClipping"),
        (dict(max_grad_norm=0.7), "'adaptive', or the initial_clipbound of adaptive, 0.5"),
        (dict(clipping="none", noise_multiplier=0), "with a bound that adapts"),
        (dict(phases=((5, {"max_grad_norm": 1.0}),)), "none where the bound adapts"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        plan(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(initial_clipbound=0.0), "min_clipbound=0.0001 to max_clipbound=10000.0"),
        (dict(min_clipbound=2.0, max_clipbound=1.0), "more than min_clipbound=2.0"),
        (dict(unclipped_num_std=0), "unclipped_num_std=0.0 must be a finite number > 0"),
        (dict(target_unclipped_quantile=1.0), "strictly between 0 and 1"),
        (dict(clipbound_learning_rate=math.nan), "clipbound_learning_rate=nan"),
        (dict(update_every=0), "update_every"),
    ],
)
def test_constants_out_of_range_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        AdaptiveClipping(**{**MOVES, **changes})


@given(released=st.floats(-1e300, 1e300), bound=st.floats(1e-4, 1e4))
def test_the_bound_stays_within_its_limits(released, bound):
    assert 1e-4 <= ADAPTIVE.next_bound(bound, released, 50.0) <= 1e4
