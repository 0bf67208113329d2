"""Journal: the facts of a run that privacy is priced from.

It records norms and charges steps; what they cost is computed afterwards by `accounting`, so that
another δ, another method or another conversion needs no retraining. One SQLite file, append-only,
hash-chained (see `chain`): `verify` finds any change.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.composition import Releases
from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal import assumptions, charges, norm_records, recorded_epsilons
from epsilons.journal.assumptions import Random
from epsilons.journal.chain import Chain
from epsilons.journal.norm_records import Constants, SomeKind
from epsilons.journal.opening import checked_ids, opening_facts, read_opening
from epsilons.journal.verification import Verified, undamaged
from epsilons.randomness import Randomness


class Journal:
    """The append-only record of one run.

    Algorithm 2 in facts: `record` says which norms hold from a step on, `charge` says which steps
    are taken. Steps charged before the first record are priced at the clip bound.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._opening = read_opening(chain)
        self.format: int = self._opening.format
        self.plan: Plan = self._opening.plan
        self.opening: Mapping[str, Any] = self._opening.facts
        self.ids: NDArray[Any] = self._opening.ids

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
        names = checked_ids(ids, plan.n)
        facts = opening_facts(
            plan,
            names,
            random_loss=random_loss,
            random_data=random_data,
            salt=salt,
            seed=seed,
            randomness=randomness,
        )
        return cls(Chain.create(Path(path), anchor, "open", facts, names.tobytes(), columns))

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
        norm_records.append_all(self._chain, self.plan, step, norms)

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
        norm_records.append_some(self._chain, self.plan, kind, first, indices, norms)

    def record_random(self, what: Random, step: int) -> None:
        """From `step` on, at the latest, norms of a refresh are not quite those of a step.

        `"loss"`: the loss draws. `"data"`: an example came out differently when it was fetched
        again. `"norms"`: an example had a larger gradient in a step than was charged for it.
        Recording it again changes nothing.
        """
        assumptions.append_random(self._chain, self._opening, what, step)

    def record_mixing(self, step: int) -> None:
        """By `step` the loss of an example was found to depend on others of its batch.

        Clipping then bounds nobody's part, and no figure of the run holds: they are refused.
        """
        assumptions.append_mixing(self._chain, step)

    @property
    def random(self) -> tuple[Random, ...]:
        """What makes norms of a refresh differ from those of a step, as far as is on record."""
        return assumptions.random_draws(self._chain, self._opening)

    def charge(self, first: int, last: int | None = None, *, anchored: bool = True) -> None:
        """Steps `first` to `last`, both included: every example pays for each of them.

        To be called before anyone can see what the steps release. Charging the latest range again
        changes nothing; no step can be skipped, nor paid twice except after `restart`. Where the
        plan has a refresh, older norms don't go on holding: its norms are recorded first.
        Publishing the anchor costs more than the entry: with `anchored=False` the next entry, or
        `seal`, does.
        """
        last = first if last is None else last
        charges.append_charge(self._chain, self.plan, first, last, anchored=anchored)

    def bounds(self, step: int, indices: ArrayLike) -> NDArray[np.float64]:
        """Clip bounds of the examples `indices` at `step`, which is charged: for `private_step`.

        Under individual clipping each example's threshold, as it is priced; else the common bound.
        """
        return norm_records.clip_bounds(self._chain, self.plan, step, indices)

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
        charges.append_restart(self._chain, step)

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
        return charges.steps_charged(self._chain)

    def charged(self, until: int | None = None, *, at: int | None = None) -> tuple[int, ...]:
        """How many steps every example has paid for in each of the plan's `stretches`.

        Those charged again after a restart count again. `until`: as it will be before that step,
        going on from where the run is, or from step `at`.
        """
        return charges.charged_counts(self._chain, self.plan, until, at)

    @property
    def turns(self) -> tuple[int, ...]:
        """How far the run had come at its last charge, and then after each restart since."""
        return charges.turns(self._chain)

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
        return recorded_epsilons.worst_case(
            self._chain, self.plan, method, until=until, delta=delta, releases=releases
        )

    @property
    def kind(self) -> Kind:
        """What an individual ε is worth by what was recorded: `exact`, `bound` or `estimate`.

        `plan.kind` is what is planned; this is what holds.
        """
        return recorded_epsilons.kind(self._chain, self._opening, sampled=True)

    @property
    def refreshes(self) -> tuple[int, ...]:
        """The steps at which the norms of all examples were recorded."""
        return tuple(entry.facts["step"] for entry in self._chain.entries("refresh"))

    def refreshes_now(self) -> tuple[int, ...]:
        """The same for the course that the run is on: without what restarts went back before."""
        return tuple(entry.facts["step"] for entry in charges.current_refreshes(self._chain))

    @property
    def restarts(self) -> int:
        """How often the run went back."""
        return sum(1 for _ in self._chain.entries("restart"))

    def recorded_now(self, kind: SomeKind, first: int) -> bool:
        """Whether norms of some examples from `first` on are recorded since the last restart."""
        latest = charges.latest(self._chain, kind)
        return latest is not None and latest.facts["first"] >= first

    def norms(self, step: int) -> NDArray[np.float64]:
        """The norms (n,) of all examples recorded at `step`, the latest if there are several."""
        return norm_records.norms_of_all(self._chain, step)

    def histories(
        self, chunk: int = 4096, *, sampled: bool = True, only: ArrayLike | None = None
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Blocks (norms (rows, m), steps (rows,) or (rows, m)) of `chunk` examples, in order.

        A row's norms held for its number of steps. Memory is bounded by the chunk. Without
        `sampled`, norms of sampled examples are left out. `only`: the examples at these
        ascending positions of the data set; by default all.
        """
        return norm_records.histories(
            self._chain, self.plan, chunk=chunk, sampled=sampled, only=only
        )

    def constants(self, *, sampled: bool = True, only: ArrayLike | None = None) -> Constants:
        """Rate, noise and bound of each row of `histories`, asked for the same examples."""
        return norm_records.row_constants(self._chain, self.plan, sampled=sampled, only=only)

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
        return recorded_epsilons.epsilons(
            self._chain, self._opening, delta, method, sampled=sampled, only=only, releases=releases
        )

    def followed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices (m,) and norms (charged steps, m) of the followed examples.

        A step that was charged but has no norms is at the clip bound.
        """
        return norm_records.followed(self._chain, self.plan)

    def followed_epsilons(self, delta: float | None = None, method: Method = "tight") -> Epsilons:
        """ε of the followed examples from their norms at every step, in `followed`'s order."""
        return recorded_epsilons.followed_epsilons(self._chain, self._opening, delta, method)

    def check(self) -> tuple[int, bool]:
        """Check the chain, its anchor and its seal: number of entries, and whether it is sealed.

        ValueError if anything was changed.
        """
        with undamaged(self.path):
            return self._chain.verify()

    def verify(self) -> Verified:
        """The same, and price the rows anew."""
        entries, sealed = self.check()
        with undamaged(self.path):
            return Verified(entries, self.steps_charged, sealed, self.epsilons())
