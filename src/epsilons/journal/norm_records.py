"""Norm records: gradient norms as entries of a journal, appended to its chain and read back.

An entry "refresh" has norms of all examples; entries "sampled" and "followed" have norms of some
examples at one or more consecutive steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting import checks
from epsilons.accounting.holding import HOLDS, NEVER, Hold
from epsilons.accounting.margins import phases_of_norms
from epsilons.accounting.plan import Phase, Plan
from epsilons.journal.chain import Chain, Entry
from epsilons.journal.charges import (
    latest_entry,
    next_step,
    phase_constants,
    refresh_in_force,
    steps_charged,
)
from epsilons.journal.clip_course import bound_at, moves
from epsilons.journal.intervals import (
    Intervals,
    SampledNorms,
    chosen_examples,
    most_sampled_norms,
    row_intervals,
    split_by_refreshes,
    split_by_sampled_norms,
)
from epsilons.journal.opening import Opening
from epsilons.journal.promised import scaled_bounds
from epsilons.journal.refreshes import append_refresh, refresh_norms, same_norms

SomeKind = Literal["sampled", "followed"]
"""Which examples have norms recorded beside refreshes: those of each batch, or the same ones."""


class Constants(NamedTuple):
    """What holds for the steps that each row of norms stands for: arrays (rows,).

    `sample_rate`, `noise_std` (in units of the gradient) and clip `bound`; `beside`: how far an
    example moves what is released beside the gradient, in standard deviations of its noise.
    """

    sample_rate: NDArray[np.float64]
    noise_std: NDArray[np.float64]
    bound: NDArray[np.float64]
    beside: NDArray[np.float64]


def append_all(chain: Chain, opening: Opening, step: int, norms: ArrayLike) -> None:
    """Append the norms (n,) of all examples; see `Journal.record`."""
    plan = opening.plan
    # no threshold holds before its refresh
    phases = phases_of_norms(plan, step, before=plan.clipping == "max")
    row = _charged(opening, _validated_norms(norms, plan.n), phases)
    last, charged = latest_entry(chain, "refresh"), steps_charged(chain)
    again = last is not None and last.facts["step"] == step
    if last is not None and again and same_norms(chain, opening, last.number, row):
        return
    if again or step != next_step(chain, plan):
        raise ValueError(
            f"norms of step {step} can't be recorded with {charged} steps charged: "
            "norms of all examples are recorded once, before their step is charged"
        )
    append_refresh(chain, opening, {"step": step, **phase_constants(plan.phase(step))}, row)


def append_some(
    chain: Chain,
    opening: Opening,
    kind: SomeKind,
    first: int,
    indices: Sequence[NDArray[Any]],
    norms: Sequence[NDArray[Any]],
) -> None:
    """Append norms of some examples, one array per step from `first` on; see `record_some`."""
    plan = opening.plan
    if kind not in get_args(SomeKind):
        raise ValueError(f"kind={kind!r}; expected one of {', '.join(get_args(SomeKind))}")
    if kind == "sampled" and plan.clipping in ("individual", "filtered"):
        raise ValueError(
            "norms of sampled examples depend on the secret sampling; "
            f"under {plan.clipping} clipping only norms of all examples are recorded"
        )
    chosen = [np.asarray(i, dtype="<i8") for i in indices]
    rows = [
        _charged(opening, _validated_norms(z, len(i)), phases_of_norms(plan, first + k))
        for k, (i, z) in enumerate(zip(chosen, norms, strict=True))
    ]
    if any(len(i) and not (i.min() >= 0 and i.max() < plan.n) for i in chosen):
        raise ValueError(f"an index is outside the {plan.n} examples of the plan")
    facts = {"first": first, "counts": [len(i) for i in chosen]}
    blobs = np.concatenate(chosen).tobytes(), np.concatenate(rows).tobytes()
    last = latest_entry(chain, kind)
    if last is not None and last.facts["first"] == first:
        if (last.facts, (chain.indices(last.number), chain.norms(last.number))) == (facts, blobs):
            return
        raise ValueError(f"norms of {kind} examples at step {first} are recorded already")
    if first + len(chosen) > steps_charged(chain):
        raise ValueError(f"not all steps from {first} on are charged; charge them first")
    chain.append(kind, facts, *blobs)


def norms_of_entry(
    chain: Chain, opening: Opening, number: int, examples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Norms (m,) of the (ascending) examples in one entry "refresh"."""
    first, span = int(examples[0]), int(examples[-1] - examples[0]) + 1
    found: NDArray[np.float64] = refresh_norms(chain, opening, number, first, span)[
        examples - first
    ]
    return found


def norms_of_all(chain: Chain, opening: Opening, step: int) -> NDArray[np.float64]:
    """Norms (n,) of the refresh at `step`; of the latest if a restart repeated it."""
    found = [e for e in chain.entries("refresh") if e.facts["step"] == step]
    if not found:
        raise ValueError(f"no norms were recorded at step {step}")
    return refresh_norms(chain, opening, found[-1].number)


def norms_of_some(
    chain: Chain, entry: Entry
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Steps, indices and norms (k,) of one entry "sampled" or "followed"."""
    counts = entry.facts["counts"]
    steps = np.repeat(entry.facts["first"] + np.arange(len(counts)), counts)
    indices = np.frombuffer(chain.indices(entry.number), dtype="<i8")
    return steps, indices, np.frombuffer(chain.norms(entry.number), dtype="<f8")


def clip_bounds(
    chain: Chain, opening: Opening, step: int, indices: ArrayLike
) -> NDArray[np.float64]:
    """Clip bounds (k,) of the examples `indices` at a charged step; see `Journal.bounds`.

    Of a filter they are in `filtered`.
    """
    plan = opening.plan
    chosen = np.asarray(indices, dtype=np.int64)
    unit = np.inf if plan.clipping == "none" else plan.phase(step).max_grad_norm
    refresh = refresh_in_force(chain, step) if plan.clipping == "individual" else None
    norms = None if refresh is None else norms_of_all(chain, opening, refresh)[chosen]
    found = scaled_bounds(opening.promised, chosen, norms, unit, plan.levels)
    if plan.adaptive is None:
        return found
    bound = bound_at(plan, moves(chain, plan), step)
    return np.minimum(found * (bound / unit), bound)


def refresh_intervals(chain: Chain, plan: Plan) -> Intervals:
    """The intervals of charged steps; without any charge one, empty, at the clip bound."""
    found: list[_Interval] = []
    refreshes: list[Entry] = []
    charged_step, starts, open_from = 0, True, 0  # intervals from `open_from` on lack a next one
    for entry in chain.entries("refresh", "charge", "restart"):
        if entry.kind == "charge":
            constants = {k: entry.facts[k] for k in ("sample_rate", "noise_std", "bound")}
            constants["beside"] = entry.facts.get("beside", 0.0)
            if starts or constants != found[-1].constants:
                number, at = None, NEVER
                if refreshes:
                    ago = entry.facts["first"] - refreshes[-1].facts["step"]
                    number, at = refreshes[-1].number, charged_step - ago
                found.append(_Interval(number, at, charged_step, constants))
            charged_step += entry.facts["last"] + 1 - entry.facts["first"]
            starts = False
        elif entry.kind == "refresh":
            refreshes.append(entry)
            starts = True
            for before in found[open_from:]:
                before.next_entry, before.next_at = entry.number, charged_step
            open_from = len(found)
        else:
            refreshes = [e for e in refreshes if e.facts["step"] <= entry.facts["step"]]
            starts = True
            open_from = len(found)
    if not found:
        constants = {"beside": 0.0, **phase_constants(plan.phase(0))}
        found.append(_Interval(None, NEVER, 0, constants))
    return Intervals(
        entry=tuple(one.entry for one in found),
        at=np.array([one.at for one in found], dtype=np.int64),
        next_entry=tuple(one.next_entry for one in found),
        next_at=np.array([one.next_at for one in found], dtype=np.int64),
        start=np.array([one.start for one in found], dtype=np.int64),
        sample_rate=np.array([one.constants["sample_rate"] for one in found]),
        noise_std=np.array([one.constants["noise_std"] for one in found]),
        bound=np.array([one.constants["bound"] for one in found]),
        beside=np.array([one.constants["beside"] for one in found]),
        steps=charged_step,
    )


@dataclass
class _Interval:
    """One of the `Intervals`, while the entries are read."""

    entry: int | None
    at: int
    start: int
    constants: dict[str, float]
    next_entry: int | None = None
    next_at: int = NEVER


def histories(
    chain: Chain, opening: Opening, *, chunk: int, sampled: bool, only: ArrayLike | None, hold: Hold
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Blocks of norms and of the numbers of steps they hold for; see `Journal.histories`."""
    plan = opening.plan
    intervals, chosen = refresh_intervals(chain, plan), chosen_examples(plan.n, only)
    most, way = _most_sampled(chain, intervals, sampled, chosen), _as_clipped(plan, hold)
    for first in range(0, len(chosen), chunk):
        examples = chosen[first : first + chunk]
        norms, following = _around(chain, opening, intervals, examples)
        if most.any():
            of_sampled = _sampled_norms(chain, examples)
            yield split_by_sampled_norms(intervals, norms, following, of_sampled, most, way)
        else:
            yield split_by_refreshes(intervals, norms, following, way)


def row_constants(
    chain: Chain, plan: Plan, *, sampled: bool, only: ArrayLike | None, hold: Hold
) -> Constants:
    """Sample rate, noise and clip bound of each row of `histories` for the same arguments."""
    intervals, chosen = refresh_intervals(chain, plan), chosen_examples(plan.n, only)
    most = _most_sampled(chain, intervals, sampled, chosen)
    row = row_intervals(intervals, most, _as_clipped(plan, hold))
    return Constants(
        intervals.sample_rate[row],
        intervals.noise_std[row],
        intervals.bound[row],
        intervals.beside[row],
    )


def _as_clipped(plan: Plan, hold: Hold) -> Hold:
    """Thresholds hold from their refresh on, as they were used, whatever is asked for."""
    checks.one_of("hold", hold, HOLDS)
    return "previous" if plan.clipping == "individual" else hold


def followed(chain: Chain, plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Indices (m,) and norms (charged steps, m) of followed examples; see `Journal.followed`."""
    intervals = refresh_intervals(chain, plan)
    parts = [(norms_of_some(chain, e), offset) for e, offset in _charged_entries(chain, "followed")]
    if not parts:
        raise ValueError("no examples were followed in this run")
    chosen = np.unique(np.concatenate([indices for (_, indices, _), _ in parts]))
    table = np.repeat(np.repeat(intervals.bound, intervals.lengths)[:, None], len(chosen), axis=1)
    for (steps, indices, norms), offset in parts:
        table[steps + offset, np.searchsorted(chosen, indices)] = norms
    return chosen, table


def _around(
    chain: Chain, opening: Opening, intervals: Intervals, examples: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Norms (intervals, m) of the (ascending) examples in the refresh before and in that after.

    Before the first refresh there is the clip bound; after the last, the same as before.
    """
    shape = len(intervals.entry), len(examples)
    norms, following = np.empty(shape), np.empty(shape)
    last: tuple[int, NDArray[np.float64]] | None = None
    for row, (number, after) in enumerate(zip(intervals.entry, intervals.next_entry, strict=True)):
        for target, entry in ((norms, number), (following, after)):
            if entry is None:
                target[row] = intervals.bound[row] if target is norms else norms[row]
                continue
            if last is None or last[0] != entry:  # mostly the refresh after the row above
                last = entry, norms_of_entry(chain, opening, entry, examples)
            target[row] = last[1]
    return norms, following


def _sampled_norms(chain: Chain, examples: NDArray[np.int64]) -> SampledNorms:
    """All sampled norms of the (ascending) examples, which are numbered from 0 in the result."""
    example, charged_step, norm = [], [], []
    first = int(examples[0])
    number = np.full(int(examples[-1]) - first + 1, -1)  # −1: not among the examples
    number[examples - first] = np.arange(len(examples))
    for entry, offset in _charged_entries(chain, "sampled"):
        steps, indices, norms = norms_of_some(chain, entry)
        near = np.flatnonzero((indices >= first) & (indices <= examples[-1]))
        here = near[number[indices[near] - first] >= 0]
        example.append(number[indices[here] - first])
        charged_step.append(steps[here] + offset)
        norm.append(norms[here])
    if not example:
        return SampledNorms(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return SampledNorms.sorted(
        np.concatenate(example), np.concatenate(charged_step), np.concatenate(norm)
    )


def _charged_entries(chain: Chain, kind: str) -> Iterator[tuple[Entry, int]]:
    """Entries of a kind, each with the offset from its steps of the plan to charged steps.

    They stand after the charge of their steps, so the latest charge before them tells it.
    """
    charged_step, offset = 0, 0
    for entry in chain.entries("charge", kind):
        if entry.kind == "charge":
            offset = charged_step - entry.facts["first"]
            charged_step += entry.facts["last"] + 1 - entry.facts["first"]
        else:
            yield entry, offset


def _most_sampled(
    chain: Chain,
    intervals: Intervals,
    sampled: bool,
    chosen: NDArray[np.int64],
    chunk: int = 65_536,
) -> NDArray[np.int64]:
    """(intervals,): the most sampled norms that one example has in each interval."""
    most = np.zeros(len(intervals.entry), dtype=np.int64)
    if sampled and chain.last("sampled") is not None:
        for first in range(0, len(chosen), chunk):
            of_sampled = _sampled_norms(chain, chosen[first : first + chunk])
            most = np.maximum(most, most_sampled_norms(intervals, of_sampled))
    return most


def _charged(
    opening: Opening, norms: NDArray[np.float64], phases: list[Phase]
) -> NDArray[np.float64]:
    if opening.margin is None:
        raise ValueError(
            "an earlier version began this journal, and its loop added the margin to the norms; "
            "go on with that version"
        )
    return opening.margin.charged(norms, phases)


def _validated_norms(norms: ArrayLike, n: int) -> NDArray[np.float64]:
    row = np.ascontiguousarray(norms, dtype="<f8")
    if row.shape != (n,):
        raise ValueError(f"norms have shape {row.shape}; expected ({n},)")
    if (row < 0).any():
        raise ValueError("a norm is negative; expected norms ≥ 0")
    return row
