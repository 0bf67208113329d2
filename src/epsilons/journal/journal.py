"""Journal: the facts of a run that privacy is priced from.

It records norms and charges steps; what they cost is computed afterwards by `accounting`, so that
another δ, another method or another conversion needs no retraining. One SQLite file, append-only,
hash-chained (see `chain`): `verify` finds any change.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.composition import Releases, composed_epsilons
from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Phase, Plan
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal.chain import SALT_BYTES, Chain, Entry
from epsilons.journal.intervals import Events, Rows, durations, extra_rows, positions, with_events
from epsilons.randomness import Randomness

SomeKind = Literal["sampled", "followed"]
Random = Literal["loss", "data", "norms"]
# 1 (no number in the opening): examples and outcomes stand in files beside the journal.
# 2: they are part of the chain.
FORMAT = 2
_ROUNDED: dict[str | None, Kind] = {None: "exact", "up": "bound", "nearest": "estimate"}


class Verified(NamedTuple):
    """What `verify` found to hold."""

    entries: int
    steps: int
    sealed: bool
    epsilons: Epsilons


class Constants(NamedTuple):
    """What holds for each row of norms: (rows,) each."""

    sample_rate: NDArray[np.float64]
    noise_std: NDArray[np.float64]
    bound: NDArray[np.float64]


class Journal:
    """The append-only record of one run.

    Algorithm 2 in facts: `record` says which norms hold from a step on, `charge` says which steps
    are taken. Steps charged before the first record are priced at the clip bound.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        opening = chain.last("open")
        if opening is None:
            raise ValueError("the first entry is missing")
        self.format: int = opening.facts.get("format", 1)
        if self.format > FORMAT:
            raise ValueError(
                f"its format is {self.format}, and this version of epsilons reads up to {FORMAT}; "
                "a newer version reads it"
            )
        self.plan = Plan.from_dict(opening.facts["plan"])
        self.opening: Mapping[str, Any] = opening.facts
        self.ids: NDArray[Any] = np.frombuffer(
            chain.indices(opening.number), dtype=np.dtype(opening.facts["id_type"])
        )

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        plan: Plan,
        ids: ArrayLike | None = None,
        *,
        columns: bytes = b"",
        random_loss: bool = False,
        random_data: bool = False,
        anchor: Path | None = None,
        salt: bytes | None = None,
        seed: int | None = None,
        randomness: Randomness | None = None,
    ) -> Self:
        """A new journal, mode 0600. `ids` (n,) name the examples in data set order.

        `columns`: what else is known of the examples (see `Examples.packed`), for the opening.
        `random_loss`: the loss draws (dropout); `random_data`: the data set gives an example
        differently each time (augmentation). Then norms of a refresh are not quite those of the
        step; where it shows later, `record_random` says so. `anchor`: where the head of the chain
        is published. `salt`: for reproducible runs, as is the `seed` to be noted; by default it is
        random. `randomness`: where noise and coins come from, if that is known.
        """
        names = np.arange(plan.n) if ids is None else np.asarray(ids)
        if names.shape != (plan.n,) or names.dtype == object:
            raise ValueError(
                f"ids have shape {names.shape} and type {names.dtype}; "
                f"expected {plan.n} numbers or strings, one per example of the plan"
            )
        opening = {
            "format": FORMAT,
            "plan": plan.to_dict(),
            "id_type": names.dtype.str,
            "random_loss": random_loss,
            "random_data": random_data,
            "seed": seed,
            "randomness": (Randomness() if randomness is None else randomness).to_dict(),
            "salt": (os.urandom(SALT_BYTES) if salt is None else salt).hex(),
        }
        return cls(Chain.create(Path(path), anchor, "open", opening, names.tobytes(), columns))

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, anchor: Path | None = None, writable: bool = False
    ) -> Self:
        """The journal at `path` as it is now, whatever is added to it later.

        `writable`: for going on; a sealed one can be read only.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is not there; expected the journal of a run")
        try:
            return cls(Chain(path, anchor, writable=writable))
        except (sqlite3.DatabaseError, TypeError, ValueError, KeyError) as error:
            raise ValueError(f"{path} is not a journal: {error}") from error

    @property
    def path(self) -> Path:
        return self._chain.path

    @property
    def randomness(self) -> Randomness:
        """Where the run's noise and coins come from."""
        return Randomness.recorded(self.opening)

    def close(self) -> None:
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, step: int, norms: ArrayLike, indices: ArrayLike | None = None) -> None:
        """Gradient norms that hold from `step` on.

        They are priced as they are given: they should have room for rounding, as by
        `training.charged_norms`.

        Without `indices`: of all examples (n,), before the step is charged, until the next such
        record. With `indices`: of examples that were drawn at `step`, which is charged, until
        their next record; see `record_sampled`. A norm that is not a number is priced at the clip
        bound. Recording the same again changes nothing.
        """
        if indices is not None:
            self.record_some("sampled", step, [np.asarray(indices)], [np.asarray(norms)])
            return
        row = _checked_norms(norms, self.plan.n).tobytes()
        last = self._latest("refresh")
        again = last is not None and last.facts["step"] == step
        if last is not None and again and self._chain.norms(last.number) == row:
            return
        if again or step != self.steps_charged:
            raise ValueError(
                f"norms of step {step} can't be recorded with {self.steps_charged} steps charged: "
                "norms of all examples are recorded once, before their step is charged"
            )
        facts = {"step": step, **_constants(self.plan.phase(step))}
        self._chain.append("refresh", facts, b"", row)

    def record_some(
        self,
        kind: SomeKind,
        first: int,
        indices: Sequence[NDArray[Any]],
        norms: Sequence[NDArray[Any]],
    ) -> None:
        """Norms of some examples at steps `first`, `first` + 1, … which are charged.

        `"sampled"`: of the examples that each step drew; they hold until the example's next
        record. Under individual clipping they are refused: a threshold must not depend on who
        was drawn. `"followed"`: of a fixed choice of examples at every step; they change no price.
        """
        if kind not in get_args(SomeKind):
            raise ValueError(f"kind={kind!r}; expected one of {', '.join(get_args(SomeKind))}")
        if kind == "sampled" and self.plan.clipping == "individual":
            raise ValueError(
                "norms of sampled examples depend on the secret sampling; "
                "under individual clipping only norms of all examples are recorded"
            )
        which = [np.asarray(i, dtype="<i8") for i in indices]
        rows = [_checked_norms(z, len(i)) for i, z in zip(which, norms, strict=True)]
        if any(len(i) and not (i.min() >= 0 and i.max() < self.plan.n) for i in which):
            raise ValueError(f"an index is outside the {self.plan.n} examples of the plan")
        facts = {"first": first, "counts": [len(i) for i in which]}
        blobs = np.concatenate(which).tobytes(), np.concatenate(rows).tobytes()
        last = self._latest(kind)
        if last is not None and last.facts["first"] == first:
            stored = self._chain.indices(last.number), self._chain.norms(last.number)
            if (last.facts, stored) == (facts, blobs):
                return
            raise ValueError(f"norms of {kind} examples at step {first} are recorded already")
        if first + len(which) > self.steps_charged:
            raise ValueError(f"not all steps from {first} on are charged; charge them first")
        self._chain.append(kind, facts, *blobs)

    def record_random(self, what: Random, step: int) -> None:
        """From `step` on, at the latest, norms of a refresh are not quite those of a step.

        `"loss"`: the loss draws. `"data"`: an example came out differently when it was fetched
        again. `"norms"`: an example had a larger gradient in a step than was charged for it.
        Recording it again changes nothing.
        """
        if what not in get_args(Random):
            raise ValueError(f"what={what!r}; expected one of {', '.join(get_args(Random))}")
        if what not in self.random:
            self._chain.append("random", {"what": what, "step": step}, b"", b"")

    def record_mixing(self, step: int) -> None:
        """By `step` the loss of an example was found to depend on others of its batch.

        Clipping then bounds nobody's part, and no figure of the run holds: they are refused.
        """
        self._chain.append("mixing", {"step": step}, b"", b"")

    def _expect_separate(self) -> None:
        found = self._chain.last("mixing")
        if found is not None:
            raise ValueError(
                f"{self.path}: at step {found.facts['step']} the loss of an example was found to "
                "depend on the others of its batch, so that no figure of this run holds. Mend the "
                "loss and train anew in another folder; what this run released is not accounted for"
            )

    @property
    def random(self) -> tuple[Random, ...]:
        """What makes norms of a refresh differ from those of a step, as far as is on record."""
        opening = [what for what in ("loss", "data") if self.opening.get(f"random_{what}")]
        later = [entry.facts["what"] for entry in self._chain.entries("random")]
        return tuple(dict.fromkeys([*opening, *later]))

    def charge(self, first: int, last: int | None = None, *, anchored: bool = True) -> None:
        """Steps `first` to `last`, both included: every example pays for each of them.

        To be called before anyone can see what the steps release. Charging the latest range again
        changes nothing; no step can be skipped, nor paid twice except after `restart`. Where the
        plan has a refresh, older norms don't go on holding: its norms are recorded first.
        Publishing the anchor costs more than the entry: with `anchored=False` the next entry, or
        `seal`, does.
        """
        self._expect_separate()
        last = first if last is None else last
        latest = self._latest("charge")
        if latest is not None and (latest.facts["first"], latest.facts["last"]) == (first, last):
            return
        if first != self.steps_charged or last < first:
            raise ValueError(
                f"steps {first} to {last} don't follow the {self.steps_charged} charged so far"
            )
        if not self.plan.endless and last >= self.plan.steps:
            raise ValueError(f"step {last} is beyond the plan's {self.plan.steps} steps")
        if self.plan.phase(first) != self.plan.phase(last):
            raise ValueError(f"steps {first} to {last} are of two phases; charge them apart")
        if any(self.plan.refresh_due(step) for step in range(first + 1, last + 1)):
            raise ValueError(f"steps {first} to {last} cross a refresh; charge them apart")
        if self.plan.refresh_due(first) and self._held_since(first) not in (None, first):
            raise ValueError(
                f"the plan has a refresh at step {first}, and the norms that hold are of step "
                f"{self._held_since(first)}; record(step, norms) of all examples first, or plan "
                "fewer refreshes"
            )
        facts = {"first": first, "last": last, **_constants(self.plan.phase(first))}
        self._chain.append("charge", facts, b"", b"", anchored=anchored)

    def bounds(self, step: int, indices: ArrayLike) -> NDArray[np.float64]:
        """Clip bounds of the examples `indices` at `step`, which is charged: for `private_step`.

        Under individual clipping each example's threshold, as it is priced; else the common bound.
        """
        if not 0 <= step < self.steps_charged:
            raise ValueError(
                f"step {step} is not among the {self.steps_charged} charged; charge it first"
            )
        which = np.asarray(indices, dtype=np.int64)
        bound = np.inf if self.plan.clipping == "none" else self.plan.phase(step).max_grad_norm
        since = self._held_since(step)
        if self.plan.clipping != "individual" or since is None:
            return np.full(len(which), bound)
        return clipping_thresholds(self.norms(since)[which], bound, self.plan.levels)

    def identify(self, identity: Mapping[str, str]) -> None:
        """Note of what the run is (data set, model, …), once, before its first step."""
        if self.identity is not None or self.steps_charged:
            raise ValueError("what the run is of is noted once, before its first step")
        self._chain.append("identity", dict(identity), b"", b"")

    @property
    def identity(self) -> dict[str, str] | None:
        """What `identify` noted; None if nothing was."""
        entry = self._chain.last("identity")
        return None if entry is None else dict(entry.facts)

    def restart(self, step: int) -> None:
        """Go back to `step`: what is charged from here on is paid again, by everyone."""
        if not 0 <= step <= self.steps_charged:
            raise ValueError(f"can't go back to step {step} of {self.steps_charged}")
        self._chain.append("restart", {"step": step}, b"", b"")

    def record_outcomes(self, training: bytes, held_out: bytes) -> None:
        """How the examples fared under the final model, as packed columns; the last record counts.

        `held_out`: the held-out examples with their outcomes, empty if there are none.
        """
        self._chain.append("outcomes", {}, training, held_out)

    @property
    def columns(self) -> bytes:
        """What the opening knows of the examples beside their ids."""
        return self._chain.norms(0)

    @property
    def outcomes(self) -> tuple[bytes, bytes] | None:
        """What `record_outcomes` was given, once it was."""
        last = self._chain.last("outcomes")
        if last is None:
            return None
        return self._chain.indices(last.number), self._chain.norms(last.number)

    def seal(self) -> None:
        """End the journal: nothing can be added, and any byte changed from now on is found."""
        self._chain.seal()

    @property
    def steps_charged(self) -> int:
        """How far the run has come: the first step that is not charged."""
        last = self._chain.last("charge", "restart")
        if last is None:
            return 0
        return int(last.facts["step"] if last.kind == "restart" else last.facts["last"] + 1)

    def charged(self, until: int | None = None, *, at: int | None = None) -> tuple[int, ...]:
        """How many steps every example has paid for in each of the plan's `stretches`.

        Those charged again after a restart count again. `until`: as it will be before that step,
        going on from where the run is, or from step `at`.
        """
        stretches, done = self.plan.stretches, self.steps_charged if at is None else at
        counts = [max(0, min(p.end, until or 0) - max(p.first, done)) for p in stretches]
        for entry in self._chain.entries("charge"):
            first, last = entry.facts["first"], entry.facts["last"]
            counts[stretches.index(self.plan.phase(first))] += last + 1 - first
        return tuple(counts)

    @property
    def turns(self) -> tuple[int, ...]:
        """How far the run had come at its last charge, and then after each restart since."""
        found = [0]
        for entry in self._chain.entries("charge", "restart"):
            if entry.kind == "charge":
                found = [entry.facts["last"] + 1]
            else:
                found.append(entry.facts["step"])
        return tuple(found)

    @property
    def repeated(self) -> int:
        """How many steps were charged that restarts went back before: they are paid twice."""
        return sum(self.charged()) - self.steps_charged

    def worst_case(
        self,
        method: Method = "tight",
        *,
        until: int | None = None,
        delta: float | None = None,
        releases: Releases | None = None,
    ) -> float:
        """ε of an example at the clip bound in every step charged: the DP guarantee of the run.

        Of the run as it is, or as it will be before step `until`. It is the plan's, unless steps
        were charged again. `releases` as for `Plan.worst_case`.
        """
        self._expect_separate()
        return self.plan.worst_case(
            method, steps=self.charged(until), delta=delta, releases=releases
        )

    @property
    def kind(self) -> Kind:
        """What an individual ε is worth by what was recorded: `exact`, `bound` or `estimate`.

        `plan.kind` is what is planned; this is what holds.
        """
        return self._kind(sampled=True)

    def _kind(self, sampled: bool) -> Kind:
        self._expect_separate()
        plan, rows = self.plan, self._rows()
        if plan.clipping != "max":
            return plan.kind
        at_bound = [entry is None for entry in rows.entry]
        some = sampled and self._chain.last("sampled") is not None
        if all(at_bound) and not some:
            return "bound"
        # where single norms were recorded, those go on holding too
        older = any(k > 1 for k, c in zip(durations(rows), at_bound, strict=True) if some or not c)
        if older or self.random or "estimate" in (plan.kind, _ROUNDED[plan.rounding]):
            return "estimate"
        return "bound" if any(at_bound) else _ROUNDED[plan.rounding]

    @property
    def refreshes(self) -> tuple[int, ...]:
        """The steps at which the norms of all examples were recorded."""
        return tuple(entry.facts["step"] for entry in self._chain.entries("refresh"))

    def refreshes_now(self) -> tuple[int, ...]:
        """The same for the course that the run is on: without what restarts went back before."""
        return tuple(entry.facts["step"] for entry in self._current_refreshes())

    @property
    def restarts(self) -> int:
        """How often the run went back."""
        return sum(1 for _ in self._chain.entries("restart"))

    def recorded_now(self, kind: SomeKind, first: int) -> bool:
        """Whether norms of some examples from `first` on are recorded since the last restart."""
        latest = self._latest(kind)
        return latest is not None and latest.facts["first"] >= first

    def norms(self, step: int) -> NDArray[np.float64]:
        """The norms (n,) of all examples recorded at `step`, the latest if there are several."""
        found = [e for e in self._chain.entries("refresh") if e.facts["step"] == step]
        if not found:
            raise ValueError(f"no norms were recorded at step {step}")
        return np.frombuffer(self._chain.norms(found[-1].number), dtype="<f8")

    def histories(
        self, chunk: int = 4096, *, sampled: bool = True, only: ArrayLike | None = None
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Blocks (norms (rows, m), steps (rows,) or (rows, m)) of `chunk` examples, in order.

        A row's norms held for its number of steps. Memory is bounded by the chunk. Without
        `sampled`, norms of sampled examples are left out. `only`: the examples at these
        ascending positions of the data set; by default all.
        """
        rows, chosen = self._rows(), positions(self.plan.n, only)
        places = self._places(rows, sampled, chosen)
        for first in range(0, len(chosen), chunk):
            some = chosen[first : first + chunk]
            norms = np.empty((len(rows.entry), len(some)))
            for row, number in enumerate(rows.entry):
                norms[row] = self._part(number, rows.bound[row], some)
            if places[-1]:
                yield with_events(rows, norms, self._events(some), places)
            else:
                yield norms, durations(rows)

    def constants(self, *, sampled: bool = True, only: ArrayLike | None = None) -> Constants:
        """Rate, noise and bound of each row of `histories`, asked for the same examples."""
        rows, chosen = self._rows(), positions(self.plan.n, only)
        numbers = np.arange(len(rows.entry))
        extra = np.diff(self._places(rows, sampled, chosen))
        row = np.append(numbers, np.repeat(numbers, extra))
        return Constants(rows.sample_rate[row], rows.noise_std[row], rows.bound[row])

    def epsilons(
        self,
        delta: float | None = None,
        method: Method = "tight",
        *,
        sampled: bool = True,
        only: ArrayLike | None = None,
        releases: Releases | None = None,
    ) -> Epsilons:
        """ε of every example for the steps charged so far, in data set order.

        `only`: of the examples at these ascending positions, as they are among all; nothing is
        computed for the others. `releases`: everything let out beside the training; by default
        the plan's clip bound, as in `worst_case`.
        """
        chosen = positions(self.plan.n, only)
        held = self.constants(sampled=sampled, only=chosen)
        let_out = self.plan.clip_bound if releases is None else releases
        priced = composed_epsilons(
            self.histories(sampled=sampled, only=chosen),
            sample_rate=held.sample_rate,
            noise_std=held.noise_std,
            max_grad_norm=held.bound,
            delta=self.plan.delta if delta is None else delta,
            method=method,
            levels=self.plan.levels,
            rounding=self.plan.rounding,
            clipping=self.plan.clipping,
            releases=let_out,
            most=lambda d: self.worst_case(method, delta=d, releases=let_out.gaussian),
        )
        return dataclasses.replace(priced, kind=self._kind(sampled))

    def followed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices (m,) and norms (charged steps, m) of the followed examples.

        A step that was charged but has no norms is at the clip bound.
        """
        rows = self._rows()
        parts = [(self._some(entry), shift) for entry, shift in self._on_clock("followed")]
        if not parts:
            raise ValueError("no examples were followed in this run")
        chosen = np.unique(np.concatenate([indices for (_, indices, _), _ in parts]))
        table = np.repeat(np.repeat(rows.bound, durations(rows))[:, None], len(chosen), axis=1)
        for (steps, indices, norms), shift in parts:
            table[steps + shift, np.searchsorted(chosen, indices)] = norms
        return chosen, table

    def followed_epsilons(self, delta: float | None = None, method: Method = "tight") -> Epsilons:
        """ε of the followed examples from their norms at every step, in `followed`'s order."""
        rows = self._rows()
        row = np.repeat(np.arange(len(rows.entry)), durations(rows))
        _, norms = self.followed()
        priced = composed_epsilons(
            [(norms, np.ones(len(norms), dtype=np.int64))],
            sample_rate=rows.sample_rate[row],
            noise_std=rows.noise_std[row],
            max_grad_norm=rows.bound[row],
            delta=self.plan.delta if delta is None else delta,
            method=method,
            levels=self.plan.levels,
            rounding=self.plan.rounding,
            releases=self.plan.clip_bound,
            most=lambda d: self.worst_case(method, delta=d, releases=self.plan.clip_bound.gaussian),
        )
        return dataclasses.replace(priced, kind="estimate") if self.random else priced

    def check(self) -> tuple[int, bool]:
        """Check the chain, its anchor and its seal: number of entries, and whether it is sealed.

        ValueError if anything was changed.
        """
        with self._undamaged():
            return self._chain.verify()

    def verify(self) -> Verified:
        """The same, and price the rows anew."""
        entries, sealed = self.check()
        with self._undamaged():
            return Verified(entries, self.steps_charged, sealed, self.epsilons())

    @contextmanager
    def _undamaged(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.DatabaseError, TypeError, KeyError) as error:
            raise ValueError(f"{self.path} was damaged: {error}") from error

    def _latest(self, kind: str) -> Entry | None:
        """The last entry of a kind, unless the run was restarted since."""
        last, restart = self._chain.last(kind), self._chain.last("restart")
        return last if last and (restart is None or restart.number < last.number) else None

    def _held_since(self, step: int) -> int | None:
        """The step of the norms of all examples that hold at `step`; None before the first."""
        last = self._chain.last("refresh", "restart")
        if last is not None and last.kind == "refresh" and last.facts["step"] <= step:
            return int(last.facts["step"])
        held = [t for t in self.refreshes_now() if t <= step]
        return held[-1] if held else None

    def _current_refreshes(self) -> list[Entry]:
        current: list[Entry] = []
        for entry in self._chain.entries("refresh", "restart"):
            if entry.kind == "refresh":
                current.append(entry)
            else:
                current = [e for e in current if e.facts["step"] <= entry.facts["step"]]
        return current

    def _rows(self) -> Rows:
        """The records of all examples on the clock of charges, restarts taken into account."""
        found: list[tuple[int | None, int, dict[str, float]]] = []
        held: list[Entry] = []
        tick, fresh = 0, True
        for entry in self._chain.entries("refresh", "charge", "restart"):
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
            found.append((None, 0, _constants(self.plan.phase(0))))
        return Rows(
            entry=tuple(number for number, _, _ in found),
            start=np.array([start for _, start, _ in found], dtype=np.int64),
            sample_rate=np.array([c["sample_rate"] for _, _, c in found]),
            noise_std=np.array([c["noise_std"] for _, _, c in found]),
            bound=np.array([c["bound"] for _, _, c in found]),
            ticks=tick,
        )

    def _part(
        self, number: int | None, bound: float, some: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Norms of some examples in one record."""
        if number is None:
            return np.full(len(some), bound)
        first, span = int(some[0]), int(some[-1] - some[0]) + 1
        read = np.frombuffer(self._chain.part_of_norms(number, 8 * first, 8 * span), dtype="<f8")
        found: NDArray[np.float64] = read[some - first]
        return found

    def _some(
        self, entry: Entry
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Steps, indices and norms of one entry of single examples."""
        counts = entry.facts["counts"]
        steps = np.repeat(entry.facts["first"] + np.arange(len(counts)), counts)
        indices = np.frombuffer(self._chain.indices(entry.number), dtype="<i8")
        return steps, indices, np.frombuffer(self._chain.norms(entry.number), dtype="<f8")

    def _events(self, some: NDArray[np.int64]) -> Events:
        """Norms of sampled examples among some, each by its place among them."""
        index, tick, norm = [], [], []
        first = int(some[0])
        place = np.full(int(some[-1]) - first + 1, -1)
        place[some - first] = np.arange(len(some))
        for entry, shift in self._on_clock("sampled"):
            steps, indices, norms = self._some(entry)
            near = np.flatnonzero((indices >= first) & (indices <= some[-1]))
            here = near[place[indices[near] - first] >= 0]
            index.append(place[indices[here] - first])
            tick.append(steps[here] + shift)
            norm.append(norms[here])
        if not index:
            return Events(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        return Events.sorted(np.concatenate(index), np.concatenate(tick), np.concatenate(norm))

    def _on_clock(self, kind: str) -> Iterator[tuple[Entry, int]]:
        """Entries of single examples, each with what to add to a step to get its tick."""
        tick, shift = 0, 0
        for entry in self._chain.entries("charge", kind):
            if entry.kind == "charge":
                shift = tick - entry.facts["first"]
                tick += entry.facts["last"] + 1 - entry.facts["first"]
            else:
                yield entry, shift

    def _places(
        self, rows: Rows, sampled: bool, chosen: NDArray[np.int64], chunk: int = 65_536
    ) -> NDArray[np.int64]:
        """(rows + 1,): where the extra rows of sampled norms begin for each record."""
        most = np.zeros(len(rows.entry), dtype=np.int64)
        if sampled and self._chain.last("sampled") is not None:
            for first in range(0, len(chosen), chunk):
                events = self._events(chosen[first : first + chunk])
                most = np.maximum(most, extra_rows(rows, events))
        return np.append(0, np.cumsum(most))


def _checked_norms(norms: ArrayLike, n: int) -> NDArray[np.float64]:
    row = np.ascontiguousarray(norms, dtype="<f8")
    if row.shape != (n,):
        raise ValueError(f"norms have shape {row.shape}; expected ({n},)")
    if (row < 0).any():
        raise ValueError("a norm is negative; expected norms ≥ 0")
    return row


def _constants(phase: Phase) -> dict[str, float]:
    return {
        "sample_rate": phase.sample_rate,
        "noise_std": phase.noise_std,
        "bound": phase.max_grad_norm,
    }
