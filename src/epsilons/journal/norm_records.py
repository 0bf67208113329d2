"""Norm records: gradient norms as entries of a journal, appended to its chain and read back.

An entry "refresh" has norms of all examples; entries "sampled" and "followed" have norms of some
examples at one or more consecutive steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.margins import phases_of_norms
from epsilons.accounting.plan import Plan
from epsilons.journal.chain import Chain, Entry
from epsilons.journal.charges import latest_entry, phase_constants, refresh_in_force, steps_charged
from epsilons.journal.intervals import (
    Intervals,
    SampledNorms,
    chosen_examples,
    most_sampled_norms,
    split_by_sampled_norms,
)
from epsilons.journal.opening import Opening

SomeKind = Literal["sampled", "followed"]
"""Which examples have norms recorded beside refreshes: those of each batch, or the same ones."""


class Constants(NamedTuple):
    """What holds for the steps that each row of norms stands for: arrays (rows,).

    `sample_rate`, `noise_std` (in units of the gradient) and clip `bound`.
    """

    sample_rate: NDArray[np.float64]
    noise_std: NDArray[np.float64]
    bound: NDArray[np.float64]


def append_all(chain: Chain, opening: Opening, step: int, norms: ArrayLike) -> None:
    """Append the norms (n,) of all examples; see `Journal.record`."""
    plan = opening.plan
    row = _charged(opening, step, _validated_norms(norms, plan.n)).tobytes()
    last, charged = latest_entry(chain, "refresh"), steps_charged(chain)
    again = last is not None and last.facts["step"] == step
    if last is not None and again and chain.norms(last.number) == row:
        return
    if again or step != charged:
        raise ValueError(
            f"norms of step {step} can't be recorded with {charged} steps charged: "
            "norms of all examples are recorded once, before their step is charged"
        )
    chain.append("refresh", {"step": step, **phase_constants(plan.phase(step))}, b"", row)


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
    if kind == "sampled" and plan.clipping == "individual":
        raise ValueError(
            "norms of sampled examples depend on the secret sampling; "
            "under individual clipping only norms of all examples are recorded"
        )
    chosen = [np.asarray(i, dtype="<i8") for i in indices]
    rows = [
        _charged(opening, first + k, _validated_norms(z, len(i)))
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


def norms_of_all(chain: Chain, step: int) -> NDArray[np.float64]:
    """Norms (n,) of the refresh at `step`; of the latest if a restart repeated it."""
    found = [e for e in chain.entries("refresh") if e.facts["step"] == step]
    if not found:
        raise ValueError(f"no norms were recorded at step {step}")
    return np.frombuffer(chain.norms(found[-1].number), dtype="<f8")


def norms_of_some(
    chain: Chain, entry: Entry
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Steps, indices and norms (k,) of one entry "sampled" or "followed"."""
    counts = entry.facts["counts"]
    steps = np.repeat(entry.facts["first"] + np.arange(len(counts)), counts)
    indices = np.frombuffer(chain.indices(entry.number), dtype="<i8")
    return steps, indices, np.frombuffer(chain.norms(entry.number), dtype="<f8")


def clip_bounds(chain: Chain, plan: Plan, step: int, indices: ArrayLike) -> NDArray[np.float64]:
    """Clip bounds (k,) of the examples `indices` at a charged step; see `Journal.bounds`."""
    charged = steps_charged(chain)
    if not 0 <= step < charged:
        raise ValueError(f"step {step} is not among the {charged} charged; charge it first")
    chosen = np.asarray(indices, dtype=np.int64)
    bound = np.inf if plan.clipping == "none" else plan.phase(step).max_grad_norm
    refresh = refresh_in_force(chain, step)
    if plan.clipping != "individual" or refresh is None:
        return np.full(len(chosen), bound)
    return clipping_thresholds(norms_of_all(chain, refresh)[chosen], bound, plan.levels)


def refresh_intervals(chain: Chain, plan: Plan) -> Intervals:
    """The intervals of charged steps; without any charge one, empty, at the clip bound."""
    found: list[tuple[int | None, int, dict[str, float]]] = []
    refreshes: list[Entry] = []
    charged_step, starts = 0, True
    for entry in chain.entries("refresh", "charge", "restart"):
        if entry.kind == "charge":
            constants = {k: entry.facts[k] for k in ("sample_rate", "noise_std", "bound")}
            if starts or constants != found[-1][2]:
                latest = refreshes[-1].number if refreshes else None
                found.append((latest, charged_step, constants))
            charged_step += entry.facts["last"] + 1 - entry.facts["first"]
            starts = False
        elif entry.kind == "refresh":
            refreshes.append(entry)
            starts = True
        else:
            refreshes = [e for e in refreshes if e.facts["step"] <= entry.facts["step"]]
            starts = True
    if not found:
        found.append((None, 0, phase_constants(plan.phase(0))))
    return Intervals(
        entry=tuple(number for number, _, _ in found),
        start=np.array([start for _, start, _ in found], dtype=np.int64),
        sample_rate=np.array([c["sample_rate"] for _, _, c in found]),
        noise_std=np.array([c["noise_std"] for _, _, c in found]),
        bound=np.array([c["bound"] for _, _, c in found]),
        steps=charged_step,
    )


def histories(
    chain: Chain, plan: Plan, *, chunk: int, sampled: bool, only: ArrayLike | None
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Blocks of norms and of the numbers of steps they hold for; see `Journal.histories`."""
    intervals, chosen = refresh_intervals(chain, plan), chosen_examples(plan.n, only)
    offsets = _sampled_offsets(chain, intervals, sampled, chosen)
    for first in range(0, len(chosen), chunk):
        examples = chosen[first : first + chunk]
        norms = np.empty((len(intervals.entry), len(examples)))
        for row, number in enumerate(intervals.entry):
            norms[row] = _refreshed_norms(chain, number, intervals.bound[row], examples)
        if offsets[-1]:
            of_sampled = _sampled_norms(chain, examples)
            yield split_by_sampled_norms(intervals, norms, of_sampled, offsets)
        else:
            yield norms, intervals.lengths


def row_constants(chain: Chain, plan: Plan, *, sampled: bool, only: ArrayLike | None) -> Constants:
    """Sample rate, noise and clip bound of each row of `histories` for the same arguments."""
    intervals, chosen = refresh_intervals(chain, plan), chosen_examples(plan.n, only)
    numbers = np.arange(len(intervals.entry))
    extra = np.diff(_sampled_offsets(chain, intervals, sampled, chosen))
    row = np.append(numbers, np.repeat(numbers, extra))
    return Constants(intervals.sample_rate[row], intervals.noise_std[row], intervals.bound[row])


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


def _refreshed_norms(
    chain: Chain, number: int | None, bound: float, examples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Norms of the (ascending) examples in one refresh; the clip bound before the first."""
    if number is None:
        return np.full(len(examples), bound)
    first, span = int(examples[0]), int(examples[-1] - examples[0]) + 1
    read = np.frombuffer(chain.part_of_norms(number, 8 * first, 8 * span), dtype="<f8")
    found: NDArray[np.float64] = read[examples - first]
    return found


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


def _sampled_offsets(
    chain: Chain,
    intervals: Intervals,
    sampled: bool,
    chosen: NDArray[np.int64],
    chunk: int = 65_536,
) -> NDArray[np.int64]:
    """(intervals + 1,): where the rows of each interval's sampled norms begin; see `intervals`."""
    most = np.zeros(len(intervals.entry), dtype=np.int64)
    if sampled and chain.last("sampled") is not None:
        for first in range(0, len(chosen), chunk):
            of_sampled = _sampled_norms(chain, chosen[first : first + chunk])
            most = np.maximum(most, most_sampled_norms(intervals, of_sampled))
    return np.append(0, np.cumsum(most))


def _charged(opening: Opening, step: int, norms: NDArray[np.float64]) -> NDArray[np.float64]:
    if opening.margin is None:
        raise ValueError(
            "an earlier version began this journal, and its loop added the margin to the norms; "
            "go on with that version"
        )
    return opening.margin.charged(norms, phases_of_norms(opening.plan, step))


def _validated_norms(norms: ArrayLike, n: int) -> NDArray[np.float64]:
    row = np.ascontiguousarray(norms, dtype="<f8")
    if row.shape != (n,):
        raise ValueError(f"norms have shape {row.shape}; expected ({n},)")
    if (row < 0).any():
        raise ValueError("a norm is negative; expected norms ≥ 0")
    return row
