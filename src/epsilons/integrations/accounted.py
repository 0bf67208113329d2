"""Accounted: a training loop that is not ours, with every step journaled before it is taken."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.files import alone_in
from epsilons.gradients.norms import LossFn, check_loss_fn
from epsilons.journal.run_entries import record_identity, recorded_identity
from epsilons.randomness import Randomness
from epsilons.release.ledger import renew_ledger
from epsilons.runs import Run, publish_plan
from epsilons.training.identity import LOSS, identity, loss_identity
from epsilons.training.movement import MOVED_BY, Movement
from epsilons.training.norm_passes import PASS_BATCH, NormPasses
from epsilons.training.run_folder import begin_run, named, reopened_run, seal_run
from epsilons.training.sampling import Collate

OnNorms = Callable[[NDArray[np.float64]], None]


class Accounted:
    """A run that another loop carries out: `.run`, `.epsilons()`, and `.close()` at the end.

    `taken`: how many steps the loop has taken already; None if it can't say. A run at `out` goes on
    there: steps in the journal beyond `taken` are charged again. `without_hooks` is entered around
    every pass over the data, and takes the loop's own hooks off the model there. `randomness`:
    where the loop takes noise and coins from, if that is known.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        dataset: Dataset[Any],
        plan: Plan,
        *,
        out: str | os.PathLike[str],
        taken: int | None,
        examples: Examples | None = None,
        batch_size: int = PASS_BATCH,
        collate_fn: Collate = default_collate,
        without_hooks: Callable[[], AbstractContextManager[None]] = nullcontext,
        randomness: Randomness | None = None,
    ) -> None:
        check_loss_fn(loss_fn)
        if plan.budgets:
            raise ValueError(
                f"budgets={plan.budgets}: another library's loop clips everyone to one bound, "
                "which keeps no promise of its own to anyone. Use PrivateTraining or fit"
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}; expected a number of examples ≥ 1")
        names = named(examples, plan, dataset)
        me = identity(plan, model, optimizer, dataset, names)
        me[LOSS] = loss_identity(loss_fn)
        run = reopened_run(Path(out), me, seed=None)
        resumed = run is not None
        if run is None:
            _expect_first_step(taken)
            with without_hooks():
                run = begin_run(
                    Path(out),
                    plan,
                    model,
                    loss_fn,
                    dataset,
                    examples=examples,
                    randomness=randomness,
                    own_steps=False,
                    collate_fn=collate_fn,
                )
        self._repeated: int | None = None  # the step that an earlier run went back to
        with ExitStack() as held:
            held.enter_context(alone_in(run.private))
            if resumed:
                _expect_same_source(run, randomness)
                self._repeated = _go_back(run, taken)
            if recorded_identity(run.journal) is None:
                record_identity(run.journal, me)
            self._alone = held.pop_all()
        self.run: Run = run
        renew_ledger(run)
        self._model = model
        early = run.journal.steps_charged < MOVED_BY
        self._movement = Movement(model) if early else None
        self._passes = NormPasses(
            run,
            model,
            loss_fn,
            dataset,
            batch_size=batch_size,
            own_steps=False,
            collate_fn=collate_fn,
            without_hooks=without_hooks,
        )
        self._closed = False

    def __repr__(self) -> str:
        return f"<Accounted {self.run}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()

    def before_step(self, on_norms: OnNorms | None = None) -> None:
        """Record the norms if a refresh is due, and charge the next step.

        `on_norms` is called with the norms (n,) of a refresh before they are recorded.
        """
        journal = self.run.journal
        step = journal.steps_charged
        if self._movement is not None:
            self._movement = self._movement.after(step)
        # restored weights may be others than those that were measured at this step
        known = step != self._repeated and step in journal.refreshes_now()
        refreshed = journal.plan.refresh_due(step) and not known
        if refreshed:
            norms = self._passes.of_all(step, lambda shard: step)
            if on_norms is not None:
                on_norms(norms)
            journal.record(step, norms)
        journal.charge(step, anchored=refreshed)

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order.

        `delta`: by default the plan's.
        """
        return self.run.epsilons(delta)

    def close(self) -> None:
        """End the run: its weights are saved, its journal is sealed. Again: nothing happens."""
        if not self._closed:
            seal_run(self.run, self._model)
            self._closed = True
            self._alone.close()

    def leave(self) -> None:
        """Let the run go as it is, to be gone on with later; after an exception in `with` too."""
        self._alone.close()


def _expect_first_step(taken: int | None) -> None:
    if taken:
        raise ValueError(
            f"the loop has taken {taken} steps already, which would be missing here; attach "
            "before the first step, or give as out the run folder that has them"
        )


def _expect_same_source(run: Run, randomness: Randomness | None) -> None:
    then = run.journal.randomness
    if randomness is not None and randomness != then:
        raise ValueError(
            f"{run.path} was begun with {then}, and the loop now has {randomness}; what is said of "
            "the run's guarantee would be false. Go on as it was begun"
        )


def _go_back(run: Run, taken: int | None) -> int | None:
    """Set an earlier run to the loop's next step, which is returned if steps are charged again."""
    charged = run.journal.steps_charged
    if taken is None:
        raise ValueError(
            f"{run.path} has {charged} steps, and how many the loop has taken can't be known "
            "without Opacus's own accountant; restore it as its step hook"
        )
    if taken > charged:
        raise ValueError(
            f"the loop has taken {taken} steps, and {run.path} knows {charged}: "
            f"{taken - charged} would be missing. Give the run folder that has them"
        )
    if taken == charged:
        publish_plan(run)  # in case a crash came before
        return None
    run.journal.restart(taken)
    publish_plan(run)
    warnings.warn(
        f"{run.path} goes on at step {taken}, where the loop is; it has {charged} steps, of "
        f"which the last {charged - taken} are charged again",
        stacklevel=4,
    )
    return taken
