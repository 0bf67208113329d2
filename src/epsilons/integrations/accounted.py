"""Accounted: a training loop that is not ours, with every step journaled before it is taken."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.files import private_file
from epsilons.gradients import gradient_norms
from epsilons.gradients.clip_factors import NORM_ERROR
from epsilons.gradients.model_checks import MixedExamples
from epsilons.gradients.norms import LossFn, check_loss_fn
from epsilons.randomness import Randomness
from epsilons.release.ledger import renew_ledger
from epsilons.runs import Run
from epsilons.training.identity import with_digests
from epsilons.training.inspection import inspect_refresh, inspect_start
from epsilons.training.step import charged_norms, pass_sizes, refresh_examples

Collate = Callable[[list[Any]], Any]
OnNorms = Callable[[NDArray[np.float64]], None]


class Accounted:
    """A run that another loop carries out: `.run`, `.epsilons()`, and `.close()` at the end.

    `without_hooks` is entered around every pass over the data, and takes the loop's own hooks off
    the model there.
    `on_grid`: the steps are `private_step`'s, with that `micro_batch`, and norms have room for the
    rounding to its noise's grid.
    `randomness`: where the loop takes noise and coins from, if that is known.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        dataset: Dataset[Any],
        plan: Plan,
        *,
        out: str | os.PathLike[str],
        examples: Examples | None = None,
        batch_size: int = 256,
        collate_fn: Collate = default_collate,
        without_hooks: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_grid: bool = False,
        micro_batch: int | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        check_loss_fn(loss_fn)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}; expected a number of examples ≥ 1")
        n = len(dataset)  # type: ignore[arg-type]
        self._pass_sizes = pass_sizes(plan, micro_batch) if on_grid else set()
        with without_hooks():
            found = inspect_start(
                model, loss_fn, dataset, sizes=self._pass_sizes, collate_fn=collate_fn
            )
        names = Examples.numbered(n) if examples is None else examples
        self.run = Run.create(
            out,
            plan,
            with_digests(names, dataset),
            **found._asdict(),
            randomness=randomness,
        )
        renew_ledger(self.run)
        self._model, self._loss_fn, self._dataset = model, loss_fn, dataset
        self._batch_size, self._collate = batch_size, collate_fn
        self._without_hooks = without_hooks
        self._on_grid, self._micro_batch = on_grid, micro_batch
        self._closed = False

    def __repr__(self) -> str:
        return f"<Accounted {self.run}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        try:
            self.close()
        except ValueError:
            if kind is None:  # else what went wrong in the loop says more
                raise

    def before_step(self, on_norms: OnNorms | None = None) -> None:
        """Record the norms if a refresh is due, and charge the next step.

        `on_norms` is called with the norms (n,) of a refresh before they are recorded.
        """
        journal = self.run.journal
        step = journal.steps_charged
        norms = None
        if journal.plan.refresh_due(step):
            with self._without_hooks():
                self._inspect(step)
                norms = gradient_norms(
                    self._model,
                    self._loss_fn,
                    self._dataset,
                    batch_size=self._refresh_examples(step),
                    collate_fn=self._collate,
                    seed=step,
                )
            if on_norms is not None:
                on_norms(norms)
            phase = journal.plan.phase(step)
            room = charged_norms(norms, self._model, phase) if self._on_grid else None
            journal.record(step, norms * (1 + NORM_ERROR) if room is None else room)
        journal.charge(step, anchored=norms is not None)

    def _refresh_examples(self, step: int) -> int:
        if not self._on_grid:
            return self._batch_size
        return refresh_examples(self.run.plan, step, self._micro_batch, self._batch_size)

    def _inspect(self, step: int) -> None:
        journal = self.run.journal
        sizes = self._pass_sizes if journal.sums_covered else ()
        try:
            found = inspect_refresh(
                self._model,
                self._loss_fn,
                self._dataset,
                step,
                most=self._batch_size,
                sizes=sizes,
                collate_fn=self._collate,
            )
        except MixedExamples:
            if step:
                journal.record_mixing(step)
            raise
        if found.random_loss:
            journal.record_random("loss", step)
        if found.random_data:
            journal.record_random("data", step)
        if sizes and not found.batch_invariant:
            journal.record_batch_dependence(step)
            renew_ledger(self.run)

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order."""
        return self.run.epsilons(delta)

    def close(self) -> None:
        """End the run: its weights are saved, its journal is sealed. Again: nothing happens."""
        if not self._closed:
            with private_file(self.run.model_file) as file:
                torch.save(self._model.state_dict(), file)
            self.run.journal.seal()
            renew_ledger(self.run)
            self._closed = True
