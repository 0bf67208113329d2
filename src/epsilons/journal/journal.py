"""Journal: the record of a run from which every ε is computed.

It records gradient norms and charges steps; `accounting` prices them afterwards, so that another δ
or another method needs no retraining. It is one append-only, hash-chained SQLite file (see
`chain`), in which `verify` finds any change.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.composition import Releases
from epsilons.accounting.holding import Hold
from epsilons.accounting.individual import Method
from epsilons.accounting.margins import Margin
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal import assumptions, charges, clip_course, norm_records, recorded_epsilons
from epsilons.journal.assumptions import Random
from epsilons.journal.chain import Chain
from epsilons.journal.norm_records import Constants, SomeKind
from epsilons.journal.opening import opening_facts, read_opening, validated_ids
from epsilons.journal.verification import Verified, undamaged
from epsilons.randomness import Randomness


class Journal:
    """The append-only record of one run.

    Algorithm 2 of the paper: `record` appends norms of a step; `charge` appends steps that are
    taken. Which norm holds at the steps between two records is decided when they are priced (see
    `accounting.holding`). Steps charged before the first record are priced at the clip bound.

    Made by `create` or `open`, which find the `chain` of entries; a context manager, which closes
    it. `.plan`; `.ids` (n,) of the examples in data set order; `.margin`, what is added to recorded
    norms (None in a journal of an earlier version, whose loop did it).
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._opening = read_opening(chain)
        self.plan: Plan = self._opening.plan
        self.margin: Margin | None = self._opening.margin
        self.ids: NDArray[Any] = self._opening.ids

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        plan: Plan,
        ids: ArrayLike | None = None,
        *,
        margin: Margin | None = None,
        columns: bytes = b"",
        random_loss: bool = False,
        random_data: bool = False,
        batch_invariant: bool = False,
        anchor: Path | None = None,
        salt: bytes | None = None,
        seed: int | None = None,
        randomness: Randomness | None = None,
    ) -> Self:
        """A new journal at `path`, mode 0600, for a run of `plan`; ValueError if a file is there.

        `ids` (n,) name the examples in data set order, by default 0 to n − 1. `margin`: what
        `record` adds to norms, by default enough for any model; TypeError unless a `Margin`.
        `columns`: owners, groups and digests of the examples (see `examples.packed`).
        `random_loss`: the loss is random (dropout); `random_data`: the data set returns an example
        differently each time (augmentation). Either makes norms of a refresh differ from those of
        the step; if it is found out later, `record_random` appends it. `batch_invariant`: what an
        example adds to a sum was tested not to depend on its batch, to the last bit
        (`training.steps_are_batch_invariant`); else floating-point effects of the sum are not
        covered. `anchor`: the file in which the head of the chain is published. `salt`: 32 bytes,
        random by default; given, with the `seed` that is recorded, for reproducible runs.
        `randomness`: the source of noise and coins.
        """
        if margin is not None and not isinstance(margin, Margin):
            raise TypeError(f"margin={margin!r}; expected a Margin, as Margin(parameters=1000)")
        names = validated_ids(ids, plan.n)
        facts = opening_facts(
            plan,
            names,
            margin=Margin() if margin is None else margin,
            random_loss=random_loss,
            random_data=random_data,
            batch_invariant=batch_invariant,
            salt=salt,
            seed=seed,
            randomness=randomness,
        )
        return cls(Chain.create(Path(path), anchor, "open", facts, names.tobytes(), columns))

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, anchor: Path | None = None, writable: bool = False
    ) -> Self:
        """The journal at `path`; for reading, a snapshot that later entries don't change.

        `writable`: to append entries, which a sealed journal does not allow. `anchor`: the public
        file in which the head of the chain is published, with which `check` compares it. ValueError
        if there is no journal.
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
        """The SQLite file."""
        return self._chain.path

    @property
    def randomness(self) -> Randomness:
        """Where the run's noise and coins come from."""
        return Randomness.recorded(self._opening.facts)

    def close(self) -> None:
        """Close the file; nothing can be read or appended any more."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, step: int, norms: ArrayLike, indices: ArrayLike | None = None) -> None:
        """Record gradient norms of the models before `step`.

        `norms` as they were computed: the journal adds its `margin`, and what it then holds is what
        is priced. Without `indices`: norms (n,) of all examples, a refresh, before the step is
        charged. With `indices`: norms of examples sampled at `step`, after it is charged (see
        `record_some`). NaN is priced at the clip bound. Recording the same again changes nothing.
        ValueError for another shape, a negative norm or a step at which they can't be recorded.
        """
        if indices is not None:
            self.record_some("sampled", step, [np.asarray(indices)], [np.asarray(norms)])
            return
        norm_records.append_all(self._chain, self._opening, step, norms)

    def record_some(
        self,
        kind: SomeKind,
        first: int,
        indices: Sequence[NDArray[Any]],
        norms: Sequence[NDArray[Any]],
    ) -> None:
        """Record norms of some examples at the charged steps `first`, `first` + 1, and so on.

        `indices` and `norms`: an array (k,) of each per step. `kind` is `"sampled"` or
        `"followed"`. `"sampled"`: of the examples in each step's batch, records beside those of
        refreshes. Under individual clipping they raise: a threshold must not depend on who was
        sampled. `"followed"`: of the same examples at every step; they change no ε of `epsilons`.
        """
        norm_records.append_some(self._chain, self._opening, kind, first, indices, norms)

    def record_random(self, what: Random, step: int) -> None:
        """Record that norms of a refresh differ from those of a step, from `step` on or earlier.

        `what` it is: `"loss"`: the loss is random. `"data"`: an example differed when it was
        fetched again. `"norms"`: an example had a larger gradient in a step than was charged for
        it. Individual ε's are estimates then. Recording it again changes nothing.
        """
        assumptions.append_random(self._chain, self._opening, what, step)

    def record_mixing(self, step: int) -> None:
        """Record that by `step` an example's loss was found to depend on others of its batch.

        Clipping then bounds nobody's contribution: every ε of this journal raises from now on.
        """
        assumptions.append_mixing(self._chain, step)

    @property
    def random(self) -> tuple[Random, ...]:
        """What makes norms of a refresh differ from those of a step; see `record_random`."""
        return assumptions.random_draws(self._chain, self._opening)

    def record_batch_dependence(self, step: int) -> None:
        """Record that at `step` the last bits of an example's gradient depended on its batch."""
        assumptions.append_batch_dependence(self._chain, step)

    @property
    def sums_covered(self) -> bool:
        """Whether floating-point effects of the sums are within what is charged (`docs/sums.md`).

        They are if sums are float64 and examples were found to be independent of their batch, to
        the last bit, whenever that was tested.
        """
        return assumptions.sums_covered(self._chain, self._opening)

    def charge(self, first: int, last: int | None = None, *, anchored: bool = True) -> None:
        """Charge every example for steps `first` to `last`, both included.

        To be called before anyone can see what the steps release. Charging the latest range again
        changes nothing; no step can be skipped, nor be charged twice except after `restart`. Where
        the plan has a refresh, its norms must be recorded first. Publishing the anchor takes longer
        than the entry itself: with `anchored=False` it is left to the next entry or to `seal`.
        """
        last = first if last is None else last
        charges.append_charge(self._chain, self.plan, first, last, anchored=anchored)

    def bounds(self, step: int, indices: ArrayLike) -> NDArray[np.float64]:
        """Clip bounds (k,) of the examples `indices` at the charged `step`, for `private_step`.

        Under individual clipping each example's threshold, as it is priced; else the common bound.
        ValueError if the step is not charged.
        """
        return norm_records.clip_bounds(self._chain, self._opening, step, indices)

    def restart(self, step: int) -> None:
        """Go back to `step`: steps from there on are charged again, and everyone pays again.

        ValueError for a step that is not charged yet.
        """
        charges.append_restart(self._chain, step)

    def seal(self) -> None:
        """End the journal: no entry can be appended, and `check` finds any changed byte."""
        self._chain.seal()

    @property
    def sealed(self) -> bool:
        """Whether the journal was ended, by whichever process."""
        return self._chain.sealed

    @property
    def steps_charged(self) -> int:
        """The first step that is not charged; after a restart, the step it went back to."""
        return charges.steps_charged(self._chain)

    def charged(self, until: int | None = None, *, at: int | None = None) -> tuple[int, ...]:
        """How many steps every example has paid for in each of the plan's `all_phases`.

        Steps charged again after a restart count again. `until`: including the steps still to be
        charged before step `until`, from `steps_charged` or from step `at`.
        """
        return charges.charged_counts(self._chain, self.plan, until, at)

    @property
    def repeated(self) -> int:
        """How many charged steps restarts undid; those that are taken again are paid for twice."""
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

        `until`: as it will be before step `until`, by default as it is now. Of a whole run it is
        the plan's worst case, unless steps were charged again. `method`, `delta` (by default the
        plan's) and `releases` as for `Plan.worst_case`.
        """
        return recorded_epsilons.worst_case(
            self._chain, self.plan, method, until=until, delta=delta, releases=releases
        )

    @property
    def kind(self) -> Kind:
        """Whether individual ε's are `exact`, a `bound` or an `estimate`, by what was recorded.

        `plan.kind` is what the plan leads to expect.
        """
        return recorded_epsilons.kind(self._chain, self._opening, sampled=True)

    @property
    def refreshes(self) -> tuple[int, ...]:
        """The steps at which the norms of all examples were recorded."""
        return tuple(entry.facts["step"] for entry in self._chain.entries("refresh"))

    def refreshes_now(self) -> tuple[int, ...]:
        """The steps of `refreshes`, without those that a restart went back before."""
        return tuple(entry.facts["step"] for entry in charges.current_refreshes(self._chain))

    @property
    def restarts(self) -> int:
        """How often the run went back to an earlier step."""
        return sum(1 for _ in self._chain.entries("restart"))

    def norms(self, step: int) -> NDArray[np.float64]:
        """The norms (n,) of all examples recorded at `step`, the latest of several, with margin.

        ValueError if none were.
        """
        return norm_records.norms_of_all(self._chain, self._opening, step)

    def histories(
        self,
        chunk: int = 4096,
        *,
        sampled: bool = True,
        only: ArrayLike | None = None,
        hold: Hold = "nearest",
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Blocks (norms (rows, m), steps (rows,) or (rows, m)) of `chunk` examples, in order.

        `steps`: for how many charged steps a row's norms hold. Memory is bounded by the chunk.
        `sampled=False` leaves out norms of sampled examples. `only`: ascending indices of examples
        in the data set; by default all. `hold`: which record a step without one is charged; under
        individual clipping always `"previous"`, as the thresholds were used.
        """
        return norm_records.histories(
            self._chain, self._opening, chunk=chunk, sampled=sampled, only=only, hold=hold
        )

    def constants(
        self, *, sampled: bool = True, only: ArrayLike | None = None, hold: Hold = "nearest"
    ) -> Constants:
        """Sample rate, noise, clip bound and `beside` (rows,) of the rows of `histories`.

        With the same `sampled`, `only` and `hold`. The noise is `noise_std`, in units of the
        gradient.
        """
        return norm_records.row_constants(
            self._chain, self.plan, sampled=sampled, only=only, hold=hold
        )

    def epsilons(
        self,
        delta: float | None = None,
        method: Method = "tight",
        *,
        sampled: bool = True,
        only: ArrayLike | None = None,
        releases: Releases | None = None,
        hold: Hold = "nearest",
        progress: Callable[[int], None] | None = None,
        processes: int = 1,
    ) -> Epsilons:
        """ε of every example for the steps charged so far, in data set order.

        `delta`: by default the plan's. `method`: the accountant, `"tight"` (the default), `"rdp"`
        or `"rdp-classic"`. `sampled=False` leaves out norms of sampled examples. `only`: ascending
        indices of examples; their values are those among all, to the last bit, and nothing is
        computed for the others: machines may share a data set (`Epsilons.joined`). `releases`:
        everything released beside the training; by default the plan's clip bound.

        `hold`: which record a step without one of its own is charged: the nearest in time, the
        larger of its two neighbours (`"cautious"`) or the one before it (`"previous"`, the
        paper's). By default `values` are by the nearest, and those of an estimate have a second
        reading, `cautious`. What is no estimate is the same for all.

        `progress` is called with the number of examples done. `processes`: how many price them, by
        default this one alone. More are started afresh and import the caller's script, as always in
        Python (`if __name__ == "__main__":`).
        """
        return recorded_epsilons.epsilons(
            self._chain, self._opening, delta, method, sampled=sampled, only=only,
            releases=releases, hold=hold, progress=progress, processes=processes,
        )  # fmt: skip

    def followed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices (m,) and norms (charged steps, m) of the followed examples.

        A charged step without their norms has the clip bound. ValueError if none were followed.
        """
        return norm_records.followed(self._chain, self.plan)

    def followed_epsilons(self, delta: float | None = None, method: Method = "tight") -> Epsilons:
        """ε of the followed examples from their norms at every step, in `followed`'s order.

        `delta` and `method` as for `epsilons`. ValueError if none were followed.
        """
        return recorded_epsilons.followed_epsilons(self._chain, self._opening, delta, method)

    def check(self) -> tuple[int, bool]:
        """Validate the chain, its anchor and its seal: number of entries, and whether it is sealed.

        Raises ValueError if anything was changed.
        """
        with undamaged(self.path):
            return self._chain.verify()

    def verify(self) -> Verified:
        """Validate the journal as `check` does, with every ε computed anew.

        ValueError if anything was changed.
        """
        entries, sealed = self.check()
        with undamaged(self.path):
            clip_course.moves(self._chain, self.plan)
            return Verified(entries, self.steps_charged, sealed, self.epsilons())
