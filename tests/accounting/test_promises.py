"""Promises: shares of the clip bound, allowances of a filter, and attacks on what they promise.

Reference values: mpmath integrals; shares by dp-accounting's PLD (0.6), ± 2e-7.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from epsilons import Plan, sampled_gaussian_rdp
from epsilons.accounting import NOTHING, Releases, least_noise, tight_epsilon
from epsilons.accounting.filters import (
    ALL,
    Allowance,
    Steps,
    affordable_levels,
    choose_order,
    epsilon_of,
    gaussian_allowance,
    rdp_allowance,
    spendable,
)
from epsilons.accounting.histories import level_norms
from epsilons.accounting.promises import composed, largest_share, scaled_promise
from epsilons.accounting.rdp import DEFAULT_ORDERS, rdp_epsilon

DELTA = 1e-5
BUDGETS = (1.0, 2.0, 4.0)
# sample rate, steps, the noise of ε = 1, 2, 4, and their shares of the bound
SCALE = [
    (1024 / 60000, 1170, (2.3343416, 1.3939672, 0.9431659), (0.4040394, 0.6766055)),
    (0.05, 500, (4.2999481, 2.4029463, 1.4458586), (0.3362502, 0.6017024)),
    (0.064, 625, (6.0723444, 3.3259060, 1.9156045), (0.3154637, 0.5759647)),
]
# sample rate, s, steps, order, ε, δ; B, ρ, whole steps at s, the last one's share, pace
FILTER = [
    (1024 / 60000, 1 / 2, 1170, 10, 2, 1e-5,
     1.081989363, 4.31872354e-4, 2505, 0.62024606, 0.67364110),
    (1024 / 60000, 1, 1170, 16, 1, 1e-5, 0.481849405, 3.658015559, 0, 0.77589659, 0.39539786),
    (0.05, 1 / 2, 500, 8, 2, 1e-5, 0.785890832, 3.121526642e-3, 251, 0.89615077, 0.37395101),
    (0.1, 1 / 3, 1000, 12, 1, 1e-6, 0.056956476, 7.942731517e-3, 7, 0.44422775, 0.03078992),
    (0.01, 1.25, 2000, 6, 4, 1e-5, 2.238088358, 5.518149337e-3, 405, 0.98113279, 1.13785065),
    (0.2, 1 / 4, None, 7.5, 3, 1e-5, 1.681866621, 1.025668402e-2, 163, None, None),
    (1, 1 / 20, 200, 9, 2, 1e-5, 0.953320425, 1.125e-2, 84, 0.85999611, 0.03254604),
]  # fmt: skip


def steps_of(count, sample_rate, noise_multiplier):
    return Steps(count=count, sample_rate=sample_rate, noise_multiplier=noise_multiplier)


@pytest.mark.parametrize(("p", "steps", "noises", "shares"), SCALE)
def test_shares_are_those_of_the_reference(p, steps, noises, shares):
    plan = Plan.for_budgets(
        BUDGETS, delta=DELTA, n=60_000, sample_rate=p, steps=steps, max_grad_norm=2.0
    )
    assert plan.noise_multiplier == pytest.approx(noises[-1], rel=3e-7)
    for promise, noise, share in zip(plan.promises, noises, (*shares, 1.0), strict=True):
        assert plan.noise_multiplier / promise.share == pytest.approx(noise, rel=3e-7)
        assert promise.share == pytest.approx(share, abs=2e-7)
        assert promise.basis == "scaled"
        assert promise.budget * (1 - 1e-6) < promise.epsilon <= promise.budget
        assert promise.at(DELTA) == pytest.approx(promise.epsilon, rel=1e-12)
    assert plan.worst_case() == plan.promises[-1].at(DELTA)


def test_without_phases_a_share_is_a_ratio_of_least_noises():
    steps = (steps_of(300, 0.03, 1.1),)
    own = least_noise(0.7, sample_rate=0.03, steps=300, delta=DELTA)
    assert largest_share(0.7, DELTA, steps) == pytest.approx(1.1 / own, rel=1e-6)


@pytest.mark.parametrize("row", FILTER)
def test_allowances_prices_and_paces_are_those_of_the_reference(row):
    p, s, steps, order, epsilon, delta, amount, rho, whole, last, pace = row
    allowance = rdp_allowance(epsilon, delta, order)
    run = steps_of(steps, p, 1 / s)
    assert allowance.amount == pytest.approx(amount, rel=1e-9, abs=5e-10)
    assert float(allowance.cost(run, 1.0)) == pytest.approx(rho, rel=1e-9)
    price = int(allowance.prices(run, 256)[-1])
    assert ALL // price == whole
    if last is not None:
        spent = whole * float(allowance.cost(run, 1.0))
        left = Allowance(amount=allowance.amount - spent, order=order)
        assert left.share([steps_of(1, p, 1 / s)]) == pytest.approx(last, abs=6e-9)
        assert allowance.share([run]) * s == pytest.approx(pace, abs=6e-9)
    assert epsilon * (1 - 1e-9) < epsilon_of(allowance, delta) <= epsilon


@pytest.mark.parametrize(("epsilon", "mu"), [(1, 0.268051123), (2, 0.501551689), (4, 0.924930898)])
def test_the_gaussian_filter_has_the_mu_of_its_promise(epsilon, mu):
    allowance = gaussian_allowance(epsilon, DELTA)
    assert math.sqrt(allowance.amount) == pytest.approx(mu, abs=1e-9)
    # at one order less is left
    steps = (steps_of(1, 1.0, 1.0),)
    order = choose_order(epsilon, DELTA, steps)
    assert rdp_allowance(epsilon, DELTA, order).share(steps) < math.sqrt(allowance.amount)
    if epsilon == 1:
        best = rdp_allowance(1, DELTA, order).share(steps)
        assert best == pytest.approx(0.2472, abs=1e-4)


def test_the_price_of_renyi_divergence_is_as_stated():
    """The bound that lasts T steps is 0.92 to 0.94 of the tight one at ε = 1 and 2."""
    steps = (steps_of(1170, 1024 / 60000, 1.0),)
    for epsilon, low, high in ((1, 0.92, 0.93), (2, 0.935, 0.945)):
        order = choose_order(epsilon, DELTA, steps)
        paced = rdp_allowance(epsilon, DELTA, order).share(steps)
        tight = 1 / least_noise(epsilon, sample_rate=1024 / 60000, steps=1170, delta=DELTA)
        assert low < paced / tight < high


@settings(max_examples=4, deadline=None)
@given(
    p=st.sampled_from([0.01, 0.1, 0.6, 1.0]),
    noise=st.floats(0.8, 6),
    epsilons=st.lists(st.floats(0.3, 8), min_size=2, max_size=3, unique=True),
    mu=st.sampled_from([0.0, 0.03]),
)
def test_shares_rise_with_the_budget_and_are_one_s_own(p, noise, epsilons, mu):
    steps = (steps_of(120, p, noise), steps_of(40, p, 2 * noise))
    releases = Releases(mu, 1e-15 if mu else 0.0)
    shares = [largest_share(e, DELTA, steps, releases) for e in sorted(epsilons)]
    assert shares == sorted(shares)
    assert all(a < b or b == 1 for a, b in itertools.pairwise(shares))
    for epsilon, share in zip(sorted(epsilons), shares, strict=True):
        assert composed(steps, share, DELTA, "tight", releases) <= epsilon
        if share < 1:
            assert composed(steps, share * (1 + 1e-5), DELTA, "tight", releases) > epsilon


def test_a_bound_does_not_change_when_another_budget_joins():
    constants = {
        "n": 500, "sample_rate": 0.1, "steps": 60, "noise_multiplier": 1.5, "max_grad_norm": 1.0,
        "delta": DELTA, "refresh_every": 10,
    }  # fmt: skip
    for more in ({}, {"clipping": "filtered"}):
        alone = Plan(**constants, budgets=(1.5,), **more).promises[0]
        (among,) = (
            promise
            for promise in Plan(**constants, budgets=(0.9, 1.5, 3), **more).promises
            if promise.budget == 1.5
        )
        assert among == alone


def test_what_is_paid_beside_is_composed_before_shares_are_solved():
    constants = {
        "n": 500, "sample_rate": 0.1, "steps": 60, "max_grad_norm": 1.0, "delta": DELTA,
        "noise_multiplier": 1.5,
    }  # fmt: skip
    for more in ({}, {"clipping": "filtered", "refresh_every": 10}):
        (plain,) = Plan(**constants, budgets=(1.5,), **more).promises
        plan = Plan(
            **constants, budgets=(1.5,), clip_bound_mu=0.03, clip_bound_distance=1e-16,
            reserve_mu=0.04, reserve_distance=1e-16, **more,
        )  # fmt: skip
        (promise,) = plan.promises
        assert plan.releases == Releases(0.05, 2e-16)
        assert 1.499 < promise.epsilon <= 1.5
        assert promise.at(DELTA, releases=NOTHING) < promise.epsilon
        if promise.share is not None:
            assert promise.share < plain.share
            steps = plan.promised_steps
            assert composed(steps, promise.share, DELTA, "tight", plan.releases) <= 1.5
        else:
            order = promise.order
            assert promise.allowance.amount < plain.allowance.amount
            cost = promise.epsilon - promise.allowance.amount - order * 0.05**2 / 2
            bare = float(rdp_epsilon([order], [0.1], DELTA)) - 0.1
            assert cost == pytest.approx(bare, rel=1e-9)


@pytest.mark.parametrize("clipping", ["max", "filtered"])
def test_releases_that_cost_a_whole_budget_are_refused(clipping):
    plan = Plan(
        n=500, sample_rate=0.1, steps=60, noise_multiplier=1.5, max_grad_norm=1.0, delta=DELTA,
        refresh_every=10, budgets=(0.1, 1), reserve_mu=0.1, clipping=clipping,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"budget of ε = 0.1"):
        _ = plan.promises


def test_a_tight_promise_of_a_filter_is_refused_with_the_reason():
    constants = {
        "n": 500, "sample_rate": 0.1, "steps": 60, "max_grad_norm": 1.0, "delta": DELTA,
        "refresh_every": 10, "clipping": "filtered",
    }  # fmt: skip
    plan = Plan.for_budgets((1, 2), **constants)
    with pytest.raises(ValueError, match="adaptive choice between two continuations"):
        plan.promises[0].at(1e-6, "tight")
    with pytest.raises(ValueError, match="adaptive choice between two continuations"):
        Plan.for_budgets((1, 2), method="tight", **constants)
    with pytest.raises(ValueError, match="adaptive choice between two continuations"):
        plan.dp_event()


def losses(s, p, count, width=2**19, spacing=2e-4):
    """The privacy loss of `count` steps under the example, on a grid around 0; by FFT."""
    x = np.linspace(-12, 13, 400_001)
    mass = np.exp(-(x**2) / 2) * (1 - p) + p * np.exp(-((x - s) ** 2) / 2)
    at = np.log1p(p * np.expm1(s * x - s * s / 2)) / spacing
    low = np.floor(at).astype(int)
    pmf = np.zeros(width)
    np.add.at(pmf, low % width, mass * (low + 1 - at))  # both neighbours: the mean stays
    np.add.at(pmf, (low + 1) % width, mass * (at - low))
    together = np.fft.irfft(np.fft.rfft(pmf / mass.sum()) ** count, width).clip(0)
    return np.fft.fftshift(together), spacing * (np.arange(width) - width // 2)


def left_over(pmf, grid, epsilon):
    """δ(ε − l) of these losses for every l of the grid."""
    above = np.cumsum(pmf[::-1])[::-1]
    tilted = np.cumsum((pmf * np.exp(-grid))[::-1])[::-1]
    at = np.clip(np.searchsorted(grid, epsilon - grid), 0, len(grid) - 1)
    return above[at] - np.exp(np.minimum(epsilon - grid, 60)) * tilted[at]


def test_an_adaptive_choice_exceeds_the_tight_delta_of_both_continuations():
    """Why there is no tight promise of a filter: p = 0.1, ε = 4.4, choosing by the loss so far."""
    (so_far, grid), (burst, _) = losses(0.3, 0.1, 500), losses(1.0, 0.1, 14)
    on, other = left_over(so_far, grid, 4.4), left_over(burst, grid, 4.4)
    found = [float(so_far @ h) for h in (on, other, np.maximum(on, other))]
    assert found == pytest.approx([6.22e-6, 5.59e-6, 7.97e-6], rel=2e-3)
    exact = tight_epsilon([1 / 0.3], [0.1], [1000], 6.22e-6)
    assert exact == pytest.approx(4.4, abs=2e-3)


@settings(max_examples=30, deadline=None)
@given(
    p=st.floats(1e-3, 1),
    noise=st.floats(0.3, 30),
    order=st.sampled_from([1.5, 4.0, 9.8, 64.0]),
    epsilon=st.floats(0.2, 8),
    levels=st.integers(2, 300),
)
def test_prices_rise_strictly_and_cover_what_a_step_costs(p, noise, order, epsilon, levels):
    allowance = rdp_allowance(epsilon, DELTA, order)
    if allowance.amount <= 0:
        return
    steps = steps_of(10, p, noise)
    prices = allowance.prices(steps, levels)
    shares = level_norms(1.0, levels)
    assert prices[0] == 0
    assert (np.diff(prices) > 0).all()
    remove = sampled_gaussian_rdp(noise / shares[1:], p, [order])[:, 0]
    add = sampled_gaussian_rdp(noise / shares[1:], p, [order], direction="add")[:, 0]
    assert (add <= remove * (1 + 1e-9)).all()
    affordable = prices[1:] <= ALL
    assert (prices[1:] / ALL * allowance.amount >= remove)[affordable].all()
    assert (prices[1:][~affordable] > ALL).all()


def test_a_zero_norm_pays_level_one_and_nan_the_highest():
    allowance = rdp_allowance(2, DELTA, 8)
    prices = allowance.prices(steps_of(500, 0.05, 4.0), 8)
    found = affordable_levels(
        np.array([0.0, 0.125, 0.1251, np.nan, np.inf]), np.zeros(5, dtype=np.int64), prices,
        level_norms(1.0, 8), steps=1, limit=ALL,
    )  # fmt: skip
    assert found.tolist() == [1, 1, 2, 8, 8]


def test_levels_that_the_grid_can_t_carry_are_no_thresholds():
    allowance = rdp_allowance(2, DELTA, 8)
    prices = allowance.prices(steps_of(500, 0.05, 4.0), 8)
    spent = np.array([0, ALL - int(prices[2])], dtype=np.int64)
    found = affordable_levels(
        np.array([0.01, 1.0]), spent, prices, level_norms(1.0, 8), steps=1, limit=ALL, least=3
    )
    assert found.tolist() == [3, 0]


def test_slack_covers_more_than_the_norm():
    prices = rdp_allowance(2, DELTA, 8).prices(steps_of(500, 0.05, 4.0), 8)
    of = {
        slack: affordable_levels(
            np.array([0.3]), np.zeros(1, dtype=np.int64), prices, level_norms(1.0, 8),
            steps=1, limit=ALL, slack=slack,
        ).item()
        for slack in (0.4, 1.0, 1.5)
    }  # fmt: skip
    assert of == {0.4: 1, 1.0: 3, 1.5: 4}


def test_a_paced_example_at_the_pace_is_never_out_and_spends_all():
    steps, order = 400, choose_order(1, DELTA, (steps_of(400, 0.05, 1.0),))
    allowance = rdp_allowance(1, DELTA, order)
    noise = 1 / allowance.share((steps_of(steps, 0.05, 1.0),))
    prices = allowance.prices(steps_of(steps, 0.05, noise), 4096)
    grid, spent = level_norms(1.0, 4096), np.zeros(1, dtype=np.int64)
    for step in range(0, steps, 10):
        level = affordable_levels(
            np.array([5.0]), spent, prices, grid, steps=10, limit=spendable(0.0, step + 10, steps)
        )
        assert level[0] >= 4095
        spent += 10 * prices[level]
    assert ALL - steps * prices[1] * 4096 < spent[0] <= ALL


# --- attacks on the theorem --------------------------------------------------------------------


def attacked(histories, seed):
    """Histories (m,) that try to overspend; what each has really spent of B, in both directions.

    Random phases, refreshes, restarts and paces; norms are random, always too large, just under
    what is affordable, or saved up for a burst.
    """
    rng = np.random.default_rng(seed)
    order = float(rng.choice([2.0, 5.5, 12.0, 33.0]))
    allowance = rdp_allowance(float(rng.uniform(1.0, 6)), DELTA, order)
    if allowance.amount <= 0:
        return None
    phases = [
        steps_of(int(rng.integers(3, 60)), float(rng.choice([0.01, 0.1, 0.5])),
                 float(rng.uniform(0.5, 8)))
        for _ in range(int(rng.integers(1, 4)))
    ]  # fmt: skip
    total, levels = sum(one.count for one in phases), int(rng.integers(2, 65))
    grid, pace = level_norms(1.0, levels), float(rng.choice([0.0, 0.3, 1.0]))
    tables = [allowance.prices(one, levels) for one in phases]
    real = [allowance.cost(one, grid) for one in phases]
    added = [
        sampled_gaussian_rdp(one.noise(grid), one.sample_rate, [order], direction="add")[:, 0]
        for one in phases
    ]
    spent = np.zeros(histories, dtype=np.int64)
    truly = np.zeros((2, histories))
    way = rng.integers(0, 4, histories)
    ends = np.cumsum([one.count for one in phases])
    step, restarts = 0, 0
    while step < total:
        phase = int(np.searchsorted(ends, step, side="right"))
        ahead = int(min(rng.integers(1, 20), ends[phase] - step))
        left = np.searchsorted(tables[phase], np.maximum(ALL - spent, 0) // ahead, side="right") - 1
        norms = np.choose(
            way,
            [rng.uniform(0, 1.5, histories), np.full(histories, np.nan),
             np.minimum(left + rng.integers(0, 2, histories), levels) / levels,
             np.where(step < total * 0.8, 0.0, np.inf)],
        )  # fmt: skip
        chosen = affordable_levels(
            norms, spent, tables[phase], grid, steps=ahead,
            limit=spendable(pace, step + ahead, total),
        )  # fmt: skip
        taken = int(rng.integers(1, ahead + 1)) if restarts < 5 and rng.random() < 0.2 else ahead
        spent += taken * tables[phase][chosen]
        truly += taken * np.stack([real[phase][chosen], added[phase][chosen]])
        step += taken
        if taken < ahead:  # a crash: earlier steps are taken again, what was spent stays spent
            restarts += 1
            step = int(rng.integers(0, step + 1))
    return spent, truly / allowance.amount


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_history_overspends(seed):
    found = attacked(64, seed)
    if found is not None:
        spent, truly = found
        assert (spent <= ALL).all()
        assert (truly <= 1).all()


@pytest.mark.slow
def test_a_hundred_thousand_histories_don_t_overspend():
    tried = 0
    for seed in range(400):
        found = attacked(400, seed)
        if found is not None:
            spent, truly = found
            assert (spent <= ALL).all()
            assert (truly <= 1).all()
            tried += len(spent)
    assert tried >= 100_000


def test_some_histories_spend_nearly_all():
    """Else the attack would show nothing."""
    most = max(
        float(found[1][0].max()) for seed in range(12) if (found := attacked(64, seed)) is not None
    )
    assert 0.99 < most <= 1


@settings(max_examples=15, deadline=None)
@given(
    p=st.sampled_from([0.05, 0.3, 0.8]),
    first=st.floats(0.2, 0.9),
    order=st.sampled_from([2.0, 3.5, 8.0]),
    threshold=st.floats(-1, 4),
    upward=st.booleans(),
)
def test_an_adaptive_second_step_stays_within_the_allowance(p, first, order, threshold, upward):
    """The theorem itself, by quadrature: two steps, of which the second is chosen by the first.

    Whoever has seen more of the example than a threshold spends all that is left, else nothing.
    """
    noise = 1.0
    one = steps_of(1, p, noise)
    allowance = rdp_allowance(3.0, 1e-3, order)
    if allowance.amount <= 0:
        return
    most = min(first, 1.0) * allowance.share([one])
    spent = float(one.rdp(most, order))
    rest = Allowance(amount=allowance.amount - spent, order=order).share([one])
    x = np.linspace(-14, 16 + 2 * most, 40_001)
    without = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    with_it = (1 - p) * without + p * np.exp(-((x - most) ** 2) / 2) / math.sqrt(2 * math.pi)
    chosen = (x > threshold) == upward

    def second(direction):
        rho = sampled_gaussian_rdp(one.noise(rest), p, [order], direction=direction)[0]
        return np.where(chosen, math.exp((order - 1) * rho), 1.0)

    for above, below, direction in ((with_it, without, "remove"), (without, with_it, "add")):
        moments = below * (above / below) ** order * second(direction)
        found = math.log(np.trapezoid(moments, x)) / (order - 1)
        assert found <= allowance.amount * (1 + 1e-9)


def test_exhausted_histories_have_nearly_the_promised_epsilon_at_their_best_order():
    """One order costs little: by the best one they are within 0.2 % of what was promised."""
    rng = np.random.default_rng(3)
    steps, p = 400, 0.05
    unit = steps_of(steps, p, 1.0)
    order = choose_order(1.0, DELTA, (unit,))
    allowance = rdp_allowance(1.0, DELTA, order)
    pace = allowance.share((unit,))
    norms = pace * rng.uniform(0.5, 1.5, steps)

    def total(scale, orders):
        return sampled_gaussian_rdp(1 / (scale * norms), p, orders).sum(axis=0)

    scale = brentq(lambda f: float(total(f, [order])[0]) - allowance.amount, 0.1, 3)
    best = float(rdp_epsilon(DEFAULT_ORDERS, total(scale, DEFAULT_ORDERS), DELTA))
    assert 0.998 < best <= 1.0 + 1e-9


def test_promises_fall_with_delta_and_name_no_one():
    plan = Plan.for_budgets(
        (1, 4), n=400, sample_rate=0.1, steps=40, delta=DELTA, max_grad_norm=1.0
    )
    promise = plan.promises[0]
    assert promise.at(1e-7) > promise.at(1e-5) > promise.at(1e-3)
    assert promise.at(1e-5, "rdp") > promise.epsilon
    assert "share=" in repr(promise)


def test_a_scaled_promise_at_another_delta_is_that_of_plain_dp_sgd():
    """Whatever budgets others have: the whole profile is one's own."""
    steps = (steps_of(400, 0.05, 1.3),)
    promise = scaled_promise(1.0, DELTA, steps)
    noise = least_noise(1.0, sample_rate=0.05, steps=400, delta=DELTA)
    plain = Plan(
        n=1000, sample_rate=0.05, steps=400, noise_multiplier=noise, max_grad_norm=1, delta=DELTA
    )
    for delta in (1e-8, 1e-6, 1e-3):
        assert promise.at(delta) == pytest.approx(plain.worst_case(delta=delta), rel=1e-5)
