"""Filtered: which level each example is clipped to at each step of a filter, and what it has spent.

Bounds are a function of the opening and of the norms of refreshes: nothing else is recorded of
them. They change at refreshes, where a phase begins, and after a restart; what lies between is a
segment. Level 0: the example is out, and adds exactly nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.filters import affordable_levels, spendable
from epsilons.accounting.histories import level_norms
from epsilons.accounting.plan import Plan
from epsilons.journal.chain import Chain
from epsilons.journal.intervals import chosen_examples
from epsilons.journal.norm_records import Constants, norms_of_entry
from epsilons.journal.opening import Opening


class Segment(NamedTuple):
    """Consecutive steps for which bounds are the same.

    `refresh`: the number of the entry whose norms hold. `first`: the first step. `planned`: how
    many steps there are to the next refresh, phase or end of the run. `charged`: how many of them
    were charged so far; fewer, if a restart came. `phase`: its position in the plan.
    """

    refresh: int
    first: int
    planned: int
    charged: int
    phase: int


def segments(chain: Chain, plan: Plan) -> list[Segment]:
    """The segments of all charged steps, in order."""
    found: list[Segment] = []
    refreshes: list[tuple[int, int]] = []  # entry and step of those in force
    new = True
    for entry in chain.entries("refresh", "charge", "restart"):
        if entry.kind == "refresh":
            refreshes.append((entry.number, entry.facts["step"]))
            new = True
        elif entry.kind == "restart":
            refreshes = [one for one in refreshes if one[1] <= entry.facts["step"]]
            new = True
        else:
            first, last = entry.facts["first"], entry.facts["last"]
            phase = plan.all_phases.index(plan.phase(first))
            if new or phase != found[-1].phase:
                planned = _planned(plan, first)
                found.append(Segment(refreshes[-1][0], first, planned, 0, phase))
            found[-1] = found[-1]._replace(charged=found[-1].charged + last + 1 - first)
            new = False
    return found


def _planned(plan: Plan, first: int) -> int:
    """How many steps bounds that are fixed at step `first` are for."""
    end = plan.phase(first).end
    if plan.refresh_every is not None:
        return min(end, first + plan.refresh_every - first % plan.refresh_every) - first
    return min([end, *(t for t in plan.refresh_steps if t > first)]) - first


class Filter:
    """The filter of one journal for some of its examples, followed from segment to segment.

    `examples` (m,): ascending positions.
    """

    def __init__(self, chain: Chain, opening: Opening, examples: NDArray[np.int64]) -> None:
        self._chain, self._opening, self._examples = chain, opening, examples
        self.spent = np.zeros(len(examples), dtype=np.int64)
        self._closed = 0  # segments that are part of what was spent
        self._levels: tuple[tuple[int, Segment], NDArray[np.int64]] | None = None

    def levels(self, all_segments: list[Segment]) -> NDArray[np.int64]:
        """The levels (m,) in the last of the segments; quick where it follows the one before."""
        if len(all_segments) <= self._closed:  # steps are replayed
            self.spent[:], self._closed = 0, 0
        for k in range(self._closed, len(all_segments) - 1):
            self._close(all_segments[k], self._of(k, all_segments[k]))
        return self._of(len(all_segments) - 1, all_segments[-1])

    def every(self, all_segments: list[Segment]) -> NDArray[np.int64]:
        """The levels (segments, m) in all of them, of a filter that followed none yet."""
        found = np.zeros((len(all_segments), len(self._examples)), dtype=np.int64)
        for k, segment in enumerate(all_segments):
            found[k] = self._of(k, segment)
            self._close(segment, found[k])
        return found

    def _of(self, number: int, segment: Segment) -> NDArray[np.int64]:
        key = number, segment._replace(charged=0)
        if self._levels is None or self._levels[0] != key:
            norms = norms_of_entry(self._chain, self._opening, segment.refresh, self._examples)
            self._levels = key, self._chosen(segment, norms)
        return self._levels[1]

    def _close(self, segment: Segment, levels: NDArray[np.int64]) -> None:
        prices, assigned = self._prices(segment)
        for k, of_budget in enumerate(prices):
            mine = assigned == k
            self.spent[mine] += segment.charged * of_budget[levels[mine]]
        self._closed += 1

    def _chosen(self, segment: Segment, norms: NDArray[np.float64]) -> NDArray[np.int64]:
        plan, margin = self._opening.plan, self._opening.margin
        assert margin is not None
        phase = plan.all_phases[segment.phase]
        grid = level_norms(phase.max_grad_norm, plan.levels)
        # a threshold leaves room for the rounding of the released sum
        least = int(np.searchsorted(grid, margin.room(phase), side="right"))
        limit = spendable(plan.pace, segment.first + segment.planned, plan.steps)
        prices, assigned = self._prices(segment)
        found = np.zeros(len(norms), dtype=np.int64)
        for k, of_budget in enumerate(prices):
            mine = assigned == k
            found[mine] = affordable_levels(
                norms[mine],
                self.spent[mine],
                of_budget,
                grid,
                steps=segment.planned,
                limit=limit,
                least=least,
                slack=plan.slack,
            )
        return found

    def _prices(self, segment: Segment) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.uint8]]:
        promised = self._opening.promised
        assert promised is not None
        assert promised.prices is not None
        return promised.prices[segment.phase], promised.assigned[self._examples]


def filtered_bounds(
    chain: Chain, plan: Plan, of_all: Filter, step: int, indices: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Clip bounds (k,) of `indices` at a charged step, the last time it was; 0 for who is out."""
    every = segments(chain, plan)
    while not every[-1].first <= step < every[-1].first + every[-1].charged:
        every.pop()
    phase = plan.all_phases[every[-1].phase]
    grid = level_norms(phase.max_grad_norm, plan.levels)
    found: NDArray[np.float64] = grid[of_all.levels(every)[indices]]
    return found


def filtered_histories(
    chain: Chain, opening: Opening, *, chunk: int, only: ArrayLike | None
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Blocks (bounds (segments, m), charged steps (segments,)): what was used, 0 for who is out."""
    plan, chosen = opening.plan, chosen_examples(opening.plan.n, only)
    every = segments(chain, plan)
    grids = [level_norms(phase.max_grad_norm, plan.levels) for phase in plan.all_phases]
    steps = np.array([segment.charged for segment in every], dtype=np.int64)
    for first in range(0, len(chosen), chunk):
        some = chosen[first : first + chunk]
        if not every:
            yield np.zeros((1, len(some))), np.zeros(1, dtype=np.int64)
            continue
        levels = Filter(chain, opening, some).every(every)
        rows = [grids[s.phase][row] for s, row in zip(every, levels, strict=True)]
        yield np.array(rows).reshape(levels.shape), steps


def filtered_constants(chain: Chain, plan: Plan) -> Constants:
    """Sample rate, noise, clip bound, `beside` (segments,) of the rows of `filtered_histories`."""
    found = segments(chain, plan)
    phases = [plan.all_phases[s.phase] for s in found] or [plan.phase(0)]
    return Constants(
        np.array([phase.sample_rate for phase in phases]),
        np.array([phase.noise_std for phase in phases]),
        np.array([phase.max_grad_norm for phase in phases]),
        np.array([phase.beside for phase in phases]),
    )
