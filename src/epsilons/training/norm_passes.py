"""Norm passes: every example's gradient norm at the present weights, with the checks of a refresh.

Every loop that is accounted for, ours or not, measures norms here and nowhere else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from epsilons.gradients.batch_invariance import compiled_batch_invariant
from epsilons.gradients.clip_factors import widest_dtype
from epsilons.gradients.compile import Compile, is_compiled, is_current, repays, say_once
from epsilons.gradients.model_checks import MixedExamples
from epsilons.gradients.norms import (
    LossFn,
    example_count,
    examples,
    gradient_norms,
    one_pass,
    trainable,
)
from epsilons.release.ledger import renew_ledger
from epsilons.runs import Run
from epsilons.training.inspection import (
    COMPARED,
    QUICKLY,
    bits_agree,
    inspect_refresh,
    some_examples,
)
from epsilons.training.memory import halved
from epsilons.training.sampling import Collate
from epsilons.training.step import most_examples, pass_examples, pass_sizes, refresh_examples

Found = TypeVar("Found")

PASS_BATCH = 256  # examples at a time in passes over all of them


class NormPasses:
    """Passes over the examples of one run, by its model and loss.

    `batch_size`: examples at a time. `micro_batch`: the same for the steps, if they are
    `private_step`'s (`own_steps`); it halves when memory runs out. `without_hooks` is entered
    around every pass, and takes another library's hooks off the model there.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        loss_fn: LossFn,
        train: Dataset[Any],
        *,
        batch_size: int = PASS_BATCH,
        micro_batch: int | None = None,
        own_steps: bool = True,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
        without_hooks: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.run, self.micro_batch = run, micro_batch
        self._model, self._loss_fn, self._train = model, loss_fn, train
        self._batch_size, self._own_steps = batch_size, own_steps
        self._collate_fn, self._num_workers = collate_fn, num_workers
        self._without_hooks = without_hooks
        self.compiled = False  # those of refreshes and, if `own_steps`, of the steps

    def of_all(self, step: int, seed: int) -> NDArray[np.float64]:
        """Norms (n,) of all examples before `step`, as computed: a refresh.

        What the checks of a refresh find is in the journal before; a loss that mixes examples ends
        the run. `seed`: of what losses and data draw.
        """
        with self._without_hooks():
            self.within_memory(lambda: self._inspect(step), step)
            self._expect_current(step)
            found = self.within_memory(lambda: self._norms(self._train, step, seed), step)
        self.note_non_finite(step, np.flatnonzero(~np.isfinite(found)))
        return found

    def of_some(self, indices: NDArray[np.int64], step: int, seed: int) -> NDArray[np.float64]:
        """Norms (k,) of the examples `indices` before `step`, as computed."""
        some = Subset(self._train, indices.tolist())
        return self.within_memory(lambda: self._norms(some, step, seed), step)

    def compile_if(self, wanted: Compile) -> None:
        """Compile passes if that is `wanted` and can be; if not, one line says why.

        The graphs of steps are made now, from some of the examples: when to compile must not
        depend on who is drawn.
        """
        plan = self.run.plan
        size, one = self._step_examples(0), self._batch(1)
        if not repays(wanted, self._model, self._loss_fn, one, size, plan.steps):
            return
        if plan.clipping == "max" and plan.kind != "estimate":
            say_once("passes stay eager: norms are charged for just the model they are taken from")
            return
        self.compiled = all(map(self._compiles, self._compiled_sizes()))

    def test_bits_again(self, step: int) -> None:
        """Test batch invariance as before training: machine, threads or passes may be others."""
        sizes = self._covered_sizes()
        if sizes and not (
            bits_agree(self._model, self._loss_fn, self._train, sizes, collate_fn=self._collate_fn)
            and self._compiled_agree(sizes)
        ):
            self._not_covered(step)

    def within_memory(
        self, work: Callable[[], Found], step: int, *, begun: Callable[[], bool] = lambda: False
    ) -> Found:
        """What `work` returns; with a smaller micro-batch each time that memory runs out.

        Not once it has `begun` what can't be done twice.
        """
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                if begun():
                    raise
                self.micro_batch = halved(error, self._step_examples(step), f"at step {step}")
            if self._own_steps:
                self.within_memory(lambda: self.test_bits_again(step), step)

    def note_non_finite(self, step: int, indices: NDArray[np.int64]) -> None:
        """Name the examples without a finite gradient, in private."""
        if len(indices):
            ids = self.run.examples.ids[indices].tolist()
            _append_line(
                self.run.private / "non_finite.jsonl", json.dumps({"step": step, "ids": ids})
            )

    def _norms(self, data: Dataset[Any], step: int, seed: int) -> NDArray[np.float64]:
        size = self._examples_at_once()
        if self._own_steps:
            size = refresh_examples(self.run.plan, step, self.micro_batch, size)
        source: Any = data
        if self._num_workers:
            source = DataLoader(
                data,
                batch_size=size,
                num_workers=self._num_workers,
                collate_fn=self._collate_fn,
                generator=torch.Generator().manual_seed(seed),
            )
        return gradient_norms(
            self._model,
            self._loss_fn,
            source,
            batch_size=size,
            collate_fn=self._collate_fn,
            seed=seed,
            compile=self.compiled,
        )

    def _compiles(self, size: int) -> bool:
        """Whether passes of this size are compiled, and as batch invariant as eager ones."""
        if not is_compiled(one_pass, *self._some_pass(size)):
            return False
        if size not in self._covered_sizes() or self._same_bits(size):
            return True
        say_once("passes stay eager: compiled, a row's bits depend on the rest of its batch")
        return False

    def _compiled_sizes(self) -> set[int]:
        phases = self.run.plan.all_phases
        sizes = {pass_examples(phase, self.micro_batch, fixed=True) for phase in phases}
        return {size for size in sizes if size is not None}

    def _some_pass(self, size: int) -> tuple[Any, ...]:
        """What a step's pass over some of the examples takes."""
        parameters, few = trainable(self._model), self._batch(size)
        batch = examples(few, torch.arange(size) % example_count(few))
        device = next(iter(parameters.values())).device
        limits = torch.ones(size, dtype=widest_dtype(device), device=device)
        return self.run.plan.sums, parameters, self._model, self._loss_fn, batch, limits

    def _expect_current(self, step: int) -> None:
        """A graph can't see everything that it takes for constant: a class attribute, say."""
        if self.compiled and not all(
            is_current(one_pass, *self._some_pass(size)) for size in self._compiled_sizes()
        ):
            raise ValueError(
                f"at step {step} compiled passes no longer do what model and loss_fn do: something "
                "that they took for constant has changed, a class attribute say. Go on with "
                "compile=False, or make it an attribute of the model"
            )

    def _compiled_agree(self, sizes: Collection[int], **extent: int) -> bool:
        """Whether compiled passes of these sizes, if there are any, are batch invariant."""
        return not self.compiled or all(self._same_bits(size, **extent) for size in sizes)

    def _same_bits(self, size: int, **extent: int) -> bool:
        few = self._batch(COMPARED)
        return compiled_batch_invariant(self._model, self._loss_fn, few, size, **extent)

    def _batch(self, most: int) -> Any:
        return some_examples(self._model, self._train, most, collate_fn=self._collate_fn)

    def _examples_at_once(self) -> int:
        return min(self._batch_size, self.micro_batch or self._batch_size)

    def _step_examples(self, step: int) -> int:
        """How many examples the largest pass takes."""
        if not self._own_steps:
            return self._examples_at_once()
        return most_examples(self.run.plan.phase(step), self.micro_batch)

    def _covered_sizes(self) -> Collection[int]:
        """Sizes of the steps' passes, if the rounding of what they sum is covered so far."""
        if not (self._own_steps and self.run.journal.sums_covered):
            return ()
        return pass_sizes(self.run.plan, self.micro_batch)

    def _inspect(self, step: int) -> None:
        """Note what is random or no longer covered."""
        journal, sizes = self.run.journal, self._covered_sizes()
        try:
            found = inspect_refresh(
                self._model,
                self._loss_fn,
                self._train,
                step,
                most=self._examples_at_once(),
                sizes=sizes,
                collate_fn=self._collate_fn,
            )
        except MixedExamples:
            if journal.steps_charged:
                journal.record_mixing(step)
            raise
        if found.random_loss:
            journal.record_random("loss", step)
        if found.random_data:
            journal.record_random("data", step)
        if sizes and not (found.batch_invariant and self._compiled_agree(sizes, **QUICKLY)):
            self._not_covered(step)

    def _not_covered(self, step: int) -> None:
        self.run.journal.record_batch_dependence(step)
        renew_ledger(self.run)


def _append_line(file: Path, line: str) -> None:
    """One more line in a private file."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as lines:
        lines.write(line + "\n")
