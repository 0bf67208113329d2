"""Journal: the record of a run from which every ε is computed.

It records gradient norms and charges steps; `accounting` prices them afterwards, so that another δ
or another method needs no retraining. It is one append-only, hash-chained SQLite file (see
`chain`), in which `verify` finds any change.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.margins import Margin
from epsilons.accounting.plan import Plan
from epsilons.accounting.promises import Promise
from epsilons.journal import assumptions, charges, clip_course, norm_records
from epsilons.journal.assumptions import Random
from epsilons.journal.chain import Chain
from epsilons.journal.filtered import Filter, filtered_bounds
from epsilons.journal.norm_records import SomeKind
from epsilons.journal.opening import opening_facts, read_opening, validated_ids
from epsilons.journal.priced import PricedRecords
from epsilons.journal.promise_checks import check_promises
from epsilons.journal.promised import assigned_budgets
from epsilons.journal.verification import Verified, undamaged
from epsilons.randomness import Randomness


class Journal(PricedRecords):
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
        everyone, filtered = np.arange(self.plan.n), self.plan.clipping == "filtered"
        self._filter = Filter(chain, self._opening, everyone) if filtered else None

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        plan: Plan,
        ids: ArrayLike | None = None,
        *,
        margin: Margin | None = None,
        columns: bytes = b"",
        budgets: ArrayLike | None = None,
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
        `columns`: owners, groups and digests of the examples (see `examples.packed`). `budgets`
        (n,): which of the plan's each example has; it may be left out where there is one.
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
        assigned = assigned_budgets(plan, budgets)
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
            assigned=assigned,
        )
        named = names.tobytes() + assigned.tobytes()
        return cls(Chain.create(Path(path), anchor, "open", facts, named, columns))

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

        Under individual clipping each example's threshold, as it is priced; else the common bound,
        or a budget's share of it. With a filter 0 is for who is out: leave them out of the batch,
        so that their gradients add exactly nothing. ValueError if the step is not charged.
        """
        if not 0 <= step < self.steps_charged:
            raise ValueError(
                f"step {step} is not among the {self.steps_charged} charged; charge it first"
            )
        if self._filter is None:
            return norm_records.clip_bounds(self._chain, self._opening, step, indices)
        chosen = np.asarray(indices, dtype=np.int64)
        return filtered_bounds(self._chain, self.plan, self._filter, step, chosen)

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
    def next_step(self) -> int:
        """The step to charge next: `steps_charged`, unless a phase has all that was promised.

        With scaled promises repeated steps take the place of the phase's last ones, which are
        passed over then; the run may end before the plan's last step.
        """
        return charges.next_step(self._chain, self.plan)

    @property
    def repeated(self) -> int:
        """How many charged steps restarts undid; those that are taken again are paid for twice."""
        return sum(self.charged()) + charges.skipped(self._chain) - self.steps_charged

    @property
    def promises(self) -> tuple[Promise, ...]:
        """What each of the plan's budgets is promised, as written before the first step; public."""
        return () if self._opening.promised is None else self._opening.promised.promises

    @property
    def budgets(self) -> NDArray[np.float64] | None:
        """The budget (n,) that each example has, if the plan has any; private."""
        return None if self._opening.promised is None else self._opening.promised.budgets

    def check(self) -> tuple[int, bool]:
        """Validate the chain, its anchor and its seal: number of entries, and whether it is sealed.

        Raises ValueError if anything was changed.
        """
        with undamaged(self.path):
            return self._chain.verify()

    def verify(self) -> Verified:
        """Validate the journal as `check` does, with every ε and every promise computed anew.

        ValueError if anything was changed, or a promise was not kept.
        """
        entries, sealed = self.check()
        with undamaged(self.path):
            clip_course.moves(self._chain, self.plan)
            epsilons = self.epsilons()
            check_promises(self._chain, self._opening, epsilons)
            return Verified(entries, self.steps_charged, sealed, epsilons)
