"""Whether a journal kept its promises, found anew from its entries alone.

Nothing here is shared with what trains: segments, levels and what was spent are found another,
plainer way, from the entries and norms as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.composition import composed_epsilon
from epsilons.accounting.filters import ALL
from epsilons.accounting.plan import Plan
from epsilons.accounting.promises import Promise
from epsilons.accounting.rdp import sampled_gaussian_rdp
from epsilons.accounting.results import Epsilons
from epsilons.journal.chain import Chain
from epsilons.journal.filtered import filtered_histories
from epsilons.journal.norm_records import norms_of_entry
from epsilons.journal.opening import Opening
from epsilons.journal.promised import Promised, assignment_digest

_ROUNDING = 1 + 1e-9  # between two computations of the same ε
_CHUNK = 1024


def check_promises(chain: Chain, opening: Opening, epsilons: Epsilons) -> None:
    """ValueError unless every promise of the opening holds for every example as recorded.

    That is: promises and assignment are of before step 0; each is within its budget; with Scale no
    phase was charged for more steps than it has; with a filter prices are at least what a step
    costs, bounds are those that could be paid for, and nobody has spent more than the allowance;
    and the `epsilons`, at the plan's δ, are no higher than what was promised.
    """
    promised, plan = opening.promised, opening.plan
    if promised is None:
        return
    salt = str(opening.facts["salt"])
    _expect(
        chain.last("open") == next(chain.entries("open"))
        and len(promised.assigned) == plan.n
        and opening.facts["assignment"] == assignment_digest(promised.assigned, salt),
        "who has which budget was changed after the opening",
    )
    _expect(
        tuple(promise.budget for promise in promised.promises) == plan.budgets
        and bool((promised.assigned < len(plan.budgets)).all()),
        "the promises are not those of the plan's budgets",
    )
    for promise in promised.promises:
        _expect(
            _own_epsilon(plan, promise) <= promise.budget * _ROUNDING
            and promise.epsilon <= promise.budget,
            f"the promise of ε = {promise.budget:g} would cost more",
        )
    if promised.prices is None:
        _check_scaled(chain, plan)
    else:
        _check_prices(plan, promised)
        _check_filtered(chain, opening, promised)
    most = np.array([promise.at(epsilons.delta) for promise in promised.promises])
    _expect(
        bool((epsilons.cautious <= most[promised.assigned] * _ROUNDING).all()),
        "an individual ε is above what was promised",
    )


def _own_epsilon(plan: Plan, promise: Promise) -> float:
    """ε of a promise from its constants: tight with Scale; B + cost + αμ²/2; of μ."""
    delta, mu = plan.delta, plan.releases.mu
    if promise.share is not None:
        return composed_epsilon(
            [phase.noise_multiplier / promise.share for phase in plan.all_phases],
            [phase.sample_rate for phase in plan.all_phases],
            [phase.end - phase.first for phase in plan.all_phases],
            delta,
            releases=plan.releases,
        )
    assert promise.allowance is not None
    amount, order = promise.allowance.amount, promise.order
    if order is None:
        together = float(np.sqrt(amount + mu**2))
        return composed_epsilon(1 / together, 1.0, 1, delta)
    cost = np.log1p(-1 / order) - (np.log(delta) + np.log(order)) / (order - 1)
    return float(amount + order * mu**2 / 2 + cost)


def _check_scaled(chain: Chain, plan: Plan) -> None:
    for phase in plan.all_phases:
        charged = sum(
            entry.facts["last"] - entry.facts["first"] + 1
            for entry in chain.entries("charge")
            if phase.first <= entry.facts["first"] < phase.end
        )
        _expect(
            charged <= phase.end - phase.first,
            f"{charged} steps were charged in the phase from step {phase.first} on, which has "
            f"{phase.end - phase.first}",
        )


def _check_prices(plan: Plan, promised: Promised) -> None:
    """Prices rise strictly from 0, and none is below ρ, or s² of the Gaussian filter."""
    assert promised.prices is not None
    shares = np.arange(1, plan.levels + 1) / plan.levels
    for phase, of_phase in zip(plan.all_phases, promised.prices, strict=True):
        for promise, prices in zip(promised.promises, of_phase, strict=True):
            assert promise.allowance is not None
            noise = phase.noise_multiplier / shares
            if promise.order is None:
                costs = noise**-2.0
                _expect(phase.sample_rate == 1, "the Gaussian filter is for p = 1 alone")
            else:
                costs = sampled_gaussian_rdp(noise, phase.sample_rate, [promise.order])[:, 0]
            charged = prices[1:] * (promise.allowance.amount / ALL)
            _expect(
                len(prices) == plan.levels + 1
                and prices[0] == 0
                and bool((np.diff(prices) > 0).all())
                and bool(((charged >= costs) | (prices[1:] > ALL)).all()),
                f"a price of the budget ε = {promise.budget:g} is below what a step costs",
            )


def _check_filtered(chain: Chain, opening: Opening, promised: Promised) -> None:
    """Bounds found anew, segment by segment, are those that were used; nobody overspent."""
    plan, every = opening.plan, list(_segments(chain, opening.plan))
    for first in range(0, plan.n, _CHUNK):
        examples = np.arange(first, min(plan.n, first + _CHUNK))
        assigned = promised.assigned[examples]
        ((used, charged),) = filtered_histories(chain, opening, chunk=_CHUNK, only=examples)
        spent = np.zeros(len(examples), dtype=np.int64)
        same = not every or charged.tolist() == [len(segment.steps) for segment in every]
        for row, segment in enumerate(every):
            norms = norms_of_entry(chain, opening, segment.refresh, examples)
            for k, prices in enumerate((promised.prices or ())[segment.phase]):
                mine = assigned == k
                levels, bounds = _bounds(opening, segment, norms[mine], spent[mine], prices)
                same = same and np.array_equal(bounds, used[row, mine])
                spent[mine] += len(segment.steps) * prices[levels]
        _expect(same, "the bounds of a filter are not those that follow from norms and prices")
        _expect(bool((spent <= ALL).all()), "an example has spent more than its allowance")


class _Segment(NamedTuple):
    """Steps that were charged under the same bounds, and the refresh whose norms held."""

    refresh: int
    phase: int
    steps: list[int]


def _segments(chain: Chain, plan: Plan) -> Iterator[_Segment]:
    open_one: _Segment | None = None
    in_force: dict[int, int] = {}  # entries of refreshes by their steps
    for entry in chain.entries("refresh", "charge", "restart"):
        if entry.kind != "charge":
            if open_one is not None:
                yield open_one
            open_one = None
        if entry.kind == "refresh":
            in_force[entry.facts["step"]] = entry.number
        elif entry.kind == "restart":
            in_force = {t: at for t, at in in_force.items() if t <= entry.facts["step"]}
        else:
            for step in range(entry.facts["first"], entry.facts["last"] + 1):
                phase = sum(step >= phase.end for phase in plan.all_phases)
                if open_one is not None and open_one.phase != phase:
                    yield open_one
                    open_one = None
                if open_one is None:
                    open_one = _Segment(in_force[max(in_force)], phase, [])
                open_one.steps.append(step)
    if open_one is not None:
        yield open_one


def _bounds(
    opening: Opening,
    segment: _Segment,
    norms: NDArray[np.float64],
    spent: NDArray[np.int64],
    prices: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Levels and bounds (m,): what covers the norm, or the most that can be paid until the end."""
    plan, margin = opening.plan, opening.margin
    assert margin is not None
    phase, first = plan.all_phases[segment.phase], segment.steps[0]
    end = first + 1
    while end < phase.end and not plan.refresh_due(end):
        end += 1
    limit = ALL
    if plan.pace < 1 and plan.steps:
        limit = min(ALL, math.floor(ALL * (plan.pace + (1 - plan.pace) * (end / plan.steps))))
    grid = phase.max_grad_norm * np.arange(plan.levels + 1) / plan.levels
    grid[-1] = phase.max_grad_norm
    too_low = (grid[None] < plan.slack * norms[:, None]).sum(axis=1)
    wanted = np.where(np.isnan(norms), plan.levels, np.minimum(too_low, plan.levels))
    least = max(1, int((grid <= margin.room(phase)).sum()))
    wanted = np.maximum(wanted, least)
    paid = (spent[:, None] + (end - first) * prices[None] <= limit).sum(axis=1) - 1
    levels = np.minimum(wanted, paid)
    levels[levels < least] = 0
    return levels, grid[levels]


def _expect(kept: bool, otherwise: str) -> None:
    if not kept:
        raise ValueError(f"a promise was not kept, or was changed: {otherwise}")
