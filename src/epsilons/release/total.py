"""Several runs on one data set, added up: what they cost together.

Whoever sees the models of all of them has seen one longer training: its steps are theirs, one run
after the other, and its clip bounds and publications are theirs too. So everything composes as
within one run, and as tightly. Runs that were continued from copies of one folder count in full,
each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.composition import (
    NOTHING,
    Releases,
    composed_epsilon,
    composed_epsilons,
)
from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.holding import Hold
from epsilons.accounting.individual import Clipping, Method
from epsilons.accounting.plan import Plan, Rounding
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal.norm_records import Constants
from epsilons.journal.run_entries import opening
from epsilons.randomness import Randomness
from epsilons.release.budget import Spent, releases_of
from epsilons.runs import Run

_WEAKEST_FIRST: tuple[Kind, ...] = ("none", "estimate", "bound", "exact")
# What leaves the curator's hands is rarely too low.
_HOLD: Hold = "cautious"
# Norms in memory at a time (128 MiB), however many examples there are.
_MOST_NORMS = 2**24


@dataclass(frozen=True)
class Part:
    """One of the runs: its own worst case at the common δ, and what was not matched of it.

    `unmatched`: how many of its examples are not added up, by reason. `name`: its folder.
    `examples`: how many it has. `steps`: how many every example has paid for, of `planned_steps`
    (None: unknown length). `worst_case`: its own, with what it released. `kind`, `releases`,
    `randomness` and `sums_covered` as in a `Statement`; `per`: `"record"`, or `"person"` where the
    examples are owners.
    """

    name: str
    examples: int
    steps: int
    planned_steps: int | None
    worst_case: float
    kind: Kind
    releases: int
    randomness: Randomness
    sums_covered: bool
    unmatched: Mapping[str, int]
    per: str = "record"


@dataclass(frozen=True, eq=False, repr=False)
class Total:
    """Several runs together.

    `worst_case`: ε of a record that is in all of them, at the clip bound in every step: with clip
    bounds and publications. `epsilons`: of the examples found in all runs, which `ids` names, in
    the order of the first; private, as are the counts in `parts`. `kind` is the weakest of the
    runs'; estimates are the cautious ones (`Epsilons.cautious`). `common`: names of runs that began
    as copies of one folder.
    """

    parts: tuple[Part, ...]
    worst_case: float
    epsilons: Epsilons
    ids: NDArray[np.str_]
    common: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return f"<Total of {len(self.parts)} runs: {self.epsilons}>"

    @property
    def delta(self) -> float:
        """The δ of the worst case and of all ε's."""
        return self.epsilons.delta

    @property
    def per(self) -> str:
        """Whom each ε is about, `"record"` or `"person"`: the runs' `plan.per`."""
        return self.parts[0].per

    @property
    def kind(self) -> Kind:
        """The weakest kind of the runs, which is that of the sums."""
        return self.epsilons.kind


def total(runs: Sequence[Run], *, delta: float | None = None, method: Method = "tight") -> Total:
    """What the runs cost together, as they stand: worst case, and ε of the examples in all of them.

    Examples are the same if id *and* record digest are; others are counted in `Part.unmatched` and
    not added up. `delta`: the plans', if they agree. Nothing is written.

    Guarantee: an upper bound of the composition if each plan was fixed without looking at the other
    runs' results. Where later plans were chosen after seeing earlier runs, it is an account of what
    was spent, and no promise that was made beforehand. `runs`: one or more, all different.
    `method`: the accountant, `"tight"` (the default), `"rdp"` or `"rdp-classic"`. ValueError if
    their δ's differ and none is given, or some count records and some owners.
    """
    expect_different(runs)
    combined = CombinedRuns(runs, method)
    at = common_delta(runs) if delta is None else float(delta)
    positions, unmatched = matched(runs)
    epsilons = combined.epsilons(positions, at)
    parts = tuple(
        Part(
            name=str(run.path),
            examples=run.plan.n,
            steps=sum(run.journal.charged()),
            planned_steps=None if run.plan.endless else run.plan.steps,
            worst_case=run.journal.worst_case(method, delta=at, releases=releases_of(run)),
            kind=kind,
            releases=Spent.of_run(run.path).questions,
            randomness=run.journal.randomness,
            sums_covered=run.journal.sums_covered,
            unmatched=reasons,
            per=run.plan.per,
        )
        for run, kind, reasons in zip(runs, combined.kinds, unmatched, strict=True)
    )
    return Total(
        parts=parts,
        worst_case=epsilons.worst_case,
        epsilons=epsilons,
        ids=runs[0].examples.ids[positions[0]].astype(str),
        common=_common_folders(runs),
    )


class CombinedRuns:
    """Runs whose steps and releases are priced as those of one, estimates cautiously."""

    def __init__(
        self, runs: Sequence[Run], method: Method = "tight", *, releases: Releases | None = None
    ) -> None:
        """`releases`: everything let out beside the trainings, unless given."""
        units = {run.plan.unit for run in runs}
        if len(units) > 1:
            raise ValueError(
                "some of the runs count records and some owners (unit); what they cost per record "
                "and per person doesn't add up. Add up those of one unit"
            )
        self.runs = tuple(runs)
        self.method = method
        self.releases = (
            reduce(Releases.__add__, map(releases_of, runs), NOTHING)
            if releases is None
            else releases
        )
        self.kinds: tuple[Kind, ...] = tuple(run.journal.kind for run in runs)
        self.kind: Kind = min(self.kinds, key=_WEAKEST_FIRST.index)

    @cached_property
    def training(self) -> CombinedRuns:
        """The trainings alone, without what was let out beside them."""
        return CombinedRuns(self.runs, self.method, releases=NOTHING)

    def worst_case(self, delta: float, *, releases: Releases | None = None) -> float:
        """ε at δ of a record at the clip bound in every step of every run."""
        if self.kind == "none":
            return math.inf
        beside = self.releases if releases is None else releases
        if len(self.runs) == 1:
            return self.runs[0].journal.worst_case(self.method, delta=delta, releases=beside)
        phases = [
            (phase, count, phase.step_multiplier / run.plan.largest_share)
            for run in self.runs
            for phase, count in zip(run.plan.all_phases, run.journal.charged(), strict=True)
            if count
        ]
        return composed_epsilon(
            np.array([noise for _, _, noise in phases]),
            np.array([phase.sample_rate for phase, _, _ in phases]),
            np.array([count for _, count, _ in phases], dtype=np.int64),
            delta,
            method=self.method,
            releases=beside,
        )

    def epsilons(self, positions: Sequence[NDArray[np.int64]], delta: float) -> Epsilons:
        """ε of m examples, at `positions` (m,) of each of the runs.

        Their rows of norms in all runs are one history.
        """
        count, worst = len(positions[0]), self.worst_case(delta)
        values = np.full(count, worst)
        if self.kind != "none":
            rows = sum(len(run.journal.constants(hold=_HOLD).bound) for run in self.runs)
            chunk = max(1, _MOST_NORMS // rows)
            for first in range(0, count, chunk):
                some = slice(first, first + chunk)
                here = [at[some] for at in positions]
                for where, shares in _by_shares(self.runs, here):
                    part = self._priced([at[where] for at in here], shares, delta)
                    values[first + where] = part
        return Epsilons(
            values=np.minimum(values, worst),
            delta=delta,
            method=self.method,
            kind=self.kind,
            worst_case=worst,
        )

    def _priced(
        self, positions: Sequence[NDArray[np.int64]], shares: Sequence[float], delta: float
    ) -> NDArray[np.float64]:
        """`shares`: of each run, how much of its clip bound these examples are clipped to."""
        blocks = [_history(run, at) for run, at in zip(self.runs, positions, strict=True)]
        constants = [
            _at_share(run.journal.constants(only=np.sort(at), hold=_HOLD), share)
            for run, at, share in zip(self.runs, positions, shares, strict=True)
        ]
        plans = [run.plan for run in self.runs]
        ways = {_way(plan) for plan in plans}
        if len(ways) > 1:
            for (norms, _), of_run, plan in zip(blocks, constants, plans, strict=True):
                _round_up(norms, of_run.bound, plan)
            ways = {(max(plan.levels for plan in plans), None, "max")}
        ((levels, rounding, clipping),) = ways
        return composed_epsilons(
            [(np.concatenate([z for z, _ in blocks]), np.concatenate([t for _, t in blocks]))],
            sample_rate=np.concatenate([of_run.sample_rate for of_run in constants]),
            noise_std=np.concatenate([of_run.noise_std for of_run in constants]),
            max_grad_norm=np.concatenate([of_run.bound for of_run in constants]),
            beside=np.concatenate([of_run.beside for of_run in constants]),
            delta=delta,
            method=self.method,
            levels=levels,
            rounding=rounding,
            clipping=clipping,
            releases=self.releases,
            most=lambda d: self.worst_case(d, releases=self.releases.gaussian),
        ).values

    def epsilon_at(self, positions: Sequence[int]) -> Callable[[float], float]:
        """ε of one example as a function of δ."""
        rows = [np.array([position]) for position in positions]
        return lambda delta: float(self.epsilons(rows, delta).values[0])


def _by_shares(
    runs: Sequence[Run], positions: Sequence[NDArray[np.int64]]
) -> list[tuple[NDArray[np.int64], list[float]]]:
    """Which of the examples are clipped to the same share of the bound in each run, and to which.

    They are priced on levels of their own bounds.
    """
    shares = np.stack(
        [run.journal.shares(at) for run, at in zip(runs, positions, strict=True)], axis=1
    )
    distinct, of = np.unique(shares, axis=0, return_inverse=True)
    return [(np.flatnonzero(of.reshape(-1) == k), row.tolist()) for k, row in enumerate(distinct)]


def _at_share(constants: Constants, share: float) -> Constants:
    return constants._replace(bound=constants.bound * share)


def _way(plan: Plan) -> tuple[int, Rounding | None, Clipping]:
    """Levels, rounding and clipping of the rows of a run; a filter's are bounds, on levels."""
    if plan.clipping == "filtered":
        return plan.levels, "up", "max"
    return plan.levels, plan.rounding, plan.clipping


def matched(
    runs: Sequence[Run],
) -> tuple[list[NDArray[np.int64]], list[dict[str, int]]]:
    """Positions (m,) of the same examples in each run, and how many others each has, by reason.

    The same: id and record digest are. They are in the order of the first run.
    """
    names = [run.examples.ids.astype(str) for run in runs]
    unknown = [str(run.path) for run in runs if run.examples.digests is None]
    if unknown:
        reason = f"no record digests in {', '.join(unknown)}"
        return [np.empty(0, np.int64)] * len(runs), [{reason: len(ids)} for ids in names]
    digests = [np.asarray(run.examples.digests).astype(str) for run in runs]
    at = [{name: k for k, name in enumerate(ids.tolist())} for ids in names]
    everywhere = set.intersection(*(set(ids.tolist()) for ids in names))
    same, other = [], 0
    for name in names[0].tolist():
        if name in everywhere:
            known = {str(digest[where[name]]) for digest, where in zip(digests, at, strict=True)}
            if len(known) == 1:
                same.append(name)
            else:
                other += 1
    positions = [np.array([where[name] for name in same], dtype=np.int64) for where in at]
    unmatched = [
        {
            reason: count
            for reason, count in (
                ("id not in all runs", len(ids) - len(everywhere)),
                ("id of another record elsewhere", other),
            )
            if count
        }
        for ids in names
    ]
    return positions, unmatched


def _history(
    run: Run, positions: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Norms and steps (rows, m) of the examples at `positions`, in their order."""
    order = np.argsort(positions)
    back = np.argsort(order)
    ((norms, steps),) = run.journal.histories(len(positions), only=positions[order], hold=_HOLD)
    each = steps if steps.ndim == 2 else np.repeat(steps[:, None], len(positions), axis=1)
    return norms[:, back].copy(), each[:, back]


def _round_up(norms: NDArray[np.float64], bounds: NDArray[np.float64], plan: Plan) -> None:
    """Norms as they were charged, or above: thresholds, and what a plan rounds, rounded up."""
    if plan.clipping == "filtered" or (plan.clipping == "max" and plan.rounding is None):
        return
    for row, bound in zip(norms, bounds, strict=True):
        row[:] = clipping_thresholds(row, float(bound), plan.levels)


def expect_different(runs: Sequence[Run]) -> None:
    if not runs:
        raise ValueError("no run was given; expected one or more")
    where = [run.path.resolve() for run in runs]
    for k, path in enumerate(where):
        if path in where[:k]:
            raise ValueError(f"{path} was given twice; a run counts once")


def common_delta(runs: Sequence[Run]) -> float:
    deltas = sorted({run.plan.delta for run in runs})
    if len(deltas) > 1:
        raise ValueError(
            f"the plans have different δ's ({', '.join(f'{d:g}' for d in deltas)}); say at which "
            "δ the runs are to be added up: delta"
        )
    return deltas[0]


def _common_folders(runs: Sequence[Run]) -> tuple[tuple[str, ...], ...]:
    """Runs that began as copies of one folder: the salt of a journal is random, and copied with it.

    Of seeded runs nothing can be said: their salt comes from the seed.
    """
    groups: dict[str, list[str]] = {}
    for run in runs:
        if run.seed is None:
            groups.setdefault(str(opening(run.journal).facts["salt"]), []).append(str(run.path))
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)
