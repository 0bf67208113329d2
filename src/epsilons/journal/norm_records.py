"""Norm records: the gradient norms in a journal's entries, appended to the chain and read back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.plan import Plan
from epsilons.journal.chain import Chain, Entry
from epsilons.journal.charges import held_since, latest, phase_constants, steps_charged
from epsilons.journal.intervals import Events, Rows, durations, extra_rows, positions, with_events

SomeKind = Literal["sampled", "followed"]


class Constants(NamedTuple):
    """What holds for each row of norms: (rows,) each."""

    sample_rate: NDArray[np.float64]
    noise_std: NDArray[np.float64]
    bound: NDArray[np.float64]


def append_all(chain: Chain, plan: Plan, step: int, norms: ArrayLike) -> None:
    """Record norms of all examples that hold from `step` on: `Journal.record`."""
    row = _checked_norms(norms, plan.n).tobytes()
    last, charged = latest(chain, "refresh"), steps_charged(chain)
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
    plan: Plan,
    kind: SomeKind,
    first: int,
    indices: Sequence[NDArray[Any]],
    norms: Sequence[NDArray[Any]],
) -> None:
    """Record norms of some examples at steps from `first` on: `Journal.record_some`."""
    if kind not in get_args(SomeKind):
        raise ValueError(f"kind={kind!r}; expected one of {', '.join(get_args(SomeKind))}")
    if kind == "sampled" and plan.clipping == "individual":
        raise ValueError(
            "norms of sampled examples depend on the secret sampling; "
            "under individual clipping only norms of all examples are recorded"
        )
    which = [np.asarray(i, dtype="<i8") for i in indices]
    rows = [_checked_norms(z, len(i)) for i, z in zip(which, norms, strict=True)]
    if any(len(i) and not (i.min() >= 0 and i.max() < plan.n) for i in which):
        raise ValueError(f"an index is outside the {plan.n} examples of the plan")
    facts = {"first": first, "counts": [len(i) for i in which]}
    blobs = np.concatenate(which).tobytes(), np.concatenate(rows).tobytes()
    last = latest(chain, kind)
    if last is not None and last.facts["first"] == first:
        if (last.facts, (chain.indices(last.number), chain.norms(last.number))) == (facts, blobs):
            return
        raise ValueError(f"norms of {kind} examples at step {first} are recorded already")
    if first + len(which) > steps_charged(chain):
        raise ValueError(f"not all steps from {first} on are charged; charge them first")
    chain.append(kind, facts, *blobs)


def norms_of_all(chain: Chain, step: int) -> NDArray[np.float64]:
    """The norms (n,) of all examples recorded at `step`, the latest if there are several."""
    found = [e for e in chain.entries("refresh") if e.facts["step"] == step]
    if not found:
        raise ValueError(f"no norms were recorded at step {step}")
    return np.frombuffer(chain.norms(found[-1].number), dtype="<f8")


def clip_bounds(chain: Chain, plan: Plan, step: int, indices: ArrayLike) -> NDArray[np.float64]:
    """Clip bounds of the examples `indices` at `step`: `Journal.bounds`."""
    charged = steps_charged(chain)
    if not 0 <= step < charged:
        raise ValueError(f"step {step} is not among the {charged} charged; charge it first")
    which = np.asarray(indices, dtype=np.int64)
    bound = np.inf if plan.clipping == "none" else plan.phase(step).max_grad_norm
    since = held_since(chain, step)
    if plan.clipping != "individual" or since is None:
        return np.full(len(which), bound)
    return clipping_thresholds(norms_of_all(chain, since)[which], bound, plan.levels)


def histories(
    chain: Chain, plan: Plan, *, chunk: int, sampled: bool, only: ArrayLike | None
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Blocks of norms and steps, as of `Journal.histories`."""
    rows, chosen = recorded_rows(chain, plan), positions(plan.n, only)
    places = _places(chain, rows, sampled, chosen)
    for first in range(0, len(chosen), chunk):
        some = chosen[first : first + chunk]
        norms = np.empty((len(rows.entry), len(some)))
        for row, number in enumerate(rows.entry):
            norms[row] = _part(chain, number, rows.bound[row], some)
        if places[-1]:
            yield with_events(rows, norms, _events(chain, some), places)
        else:
            yield norms, durations(rows)


def row_constants(chain: Chain, plan: Plan, *, sampled: bool, only: ArrayLike | None) -> Constants:
    """Rate, noise and bound of each row of `histories`."""
    rows, chosen = recorded_rows(chain, plan), positions(plan.n, only)
    numbers = np.arange(len(rows.entry))
    extra = np.diff(_places(chain, rows, sampled, chosen))
    row = np.append(numbers, np.repeat(numbers, extra))
    return Constants(rows.sample_rate[row], rows.noise_std[row], rows.bound[row])


def followed(chain: Chain, plan: Plan) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Indices (m,) and norms (charged steps, m) of the followed examples."""
    rows = recorded_rows(chain, plan)
    parts = [(norms_of_some(chain, entry), shift) for entry, shift in _on_clock(chain, "followed")]
    if not parts:
        raise ValueError("no examples were followed in this run")
    chosen = np.unique(np.concatenate([indices for (_, indices, _), _ in parts]))
    table = np.repeat(np.repeat(rows.bound, durations(rows))[:, None], len(chosen), axis=1)
    for (steps, indices, norms), shift in parts:
        table[steps + shift, np.searchsorted(chosen, indices)] = norms
    return chosen, table


def recorded_rows(chain: Chain, plan: Plan) -> Rows:
    """The records of all examples on the clock of charges, restarts taken into account."""
    found: list[tuple[int | None, int, dict[str, float]]] = []
    held: list[Entry] = []
    tick, fresh = 0, True
    for entry in chain.entries("refresh", "charge", "restart"):
        if entry.kind == "charge":
            constants = {k: entry.facts[k] for k in ("sample_rate", "noise_std", "bound")}
            if fresh or constants != found[-1][2]:
                found.append((held[-1].number if held else None, tick, constants))
            tick += entry.facts["last"] + 1 - entry.facts["first"]
            fresh = False
        elif entry.kind == "refresh":
            held.append(entry)
            fresh = True
        else:
            held = [e for e in held if e.facts["step"] <= entry.facts["step"]]
            fresh = True
    if not found:
        found.append((None, 0, phase_constants(plan.phase(0))))
    return Rows(
        entry=tuple(number for number, _, _ in found),
        start=np.array([start for _, start, _ in found], dtype=np.int64),
        sample_rate=np.array([c["sample_rate"] for _, _, c in found]),
        noise_std=np.array([c["noise_std"] for _, _, c in found]),
        bound=np.array([c["bound"] for _, _, c in found]),
        ticks=tick,
    )


def norms_of_some(
    chain: Chain, entry: Entry
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """Steps, indices and norms of one entry of single examples."""
    counts = entry.facts["counts"]
    steps = np.repeat(entry.facts["first"] + np.arange(len(counts)), counts)
    indices = np.frombuffer(chain.indices(entry.number), dtype="<i8")
    return steps, indices, np.frombuffer(chain.norms(entry.number), dtype="<f8")


def _part(
    chain: Chain, number: int | None, bound: float, some: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Norms of some examples in one record."""
    if number is None:
        return np.full(len(some), bound)
    first, span = int(some[0]), int(some[-1] - some[0]) + 1
    read = np.frombuffer(chain.part_of_norms(number, 8 * first, 8 * span), dtype="<f8")
    found: NDArray[np.float64] = read[some - first]
    return found


def _events(chain: Chain, some: NDArray[np.int64]) -> Events:
    """Norms of sampled examples among some, each by its place among them."""
    index, tick, norm = [], [], []
    first = int(some[0])
    place = np.full(int(some[-1]) - first + 1, -1)
    place[some - first] = np.arange(len(some))
    for entry, shift in _on_clock(chain, "sampled"):
        steps, indices, norms = norms_of_some(chain, entry)
        near = np.flatnonzero((indices >= first) & (indices <= some[-1]))
        here = near[place[indices[near] - first] >= 0]
        index.append(place[indices[here] - first])
        tick.append(steps[here] + shift)
        norm.append(norms[here])
    if not index:
        return Events(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    return Events.sorted(np.concatenate(index), np.concatenate(tick), np.concatenate(norm))


def _on_clock(chain: Chain, kind: str) -> Iterator[tuple[Entry, int]]:
    """Entries of single examples, each with what to add to a step to get its tick."""
    tick, shift = 0, 0
    for entry in chain.entries("charge", kind):
        if entry.kind == "charge":
            shift = tick - entry.facts["first"]
            tick += entry.facts["last"] + 1 - entry.facts["first"]
        else:
            yield entry, shift


def _places(
    chain: Chain, rows: Rows, sampled: bool, chosen: NDArray[np.int64], chunk: int = 65_536
) -> NDArray[np.int64]:
    """(rows + 1,): where the extra rows of sampled norms begin for each record."""
    most = np.zeros(len(rows.entry), dtype=np.int64)
    if sampled and chain.last("sampled") is not None:
        for first in range(0, len(chosen), chunk):
            events = _events(chain, chosen[first : first + chunk])
            most = np.maximum(most, extra_rows(rows, events))
    return np.append(0, np.cumsum(most))


def _checked_norms(norms: ArrayLike, n: int) -> NDArray[np.float64]:
    row = np.ascontiguousarray(norms, dtype="<f8")
    if row.shape != (n,):
        raise ValueError(f"norms have shape {row.shape}; expected ({n},)")
    if (row < 0).any():
        raise ValueError("a norm is negative; expected norms ≥ 0")
    return row
