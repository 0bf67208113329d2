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
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from epsilons.accounting.plan import Plan
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
from epsilons.training.distributed import ALONE, Ranks
from epsilons.training.inspection import (
    COMPARED,
    QUICKLY,
    Inspection,
    bits_agree,
    inspect_refresh,
    some_examples,
)
from epsilons.training.memory import halved
from epsilons.training.sampling import Collate
from epsilons.training.shards import Shards, shard_edges
from epsilons.training.step import most_examples, pass_examples, pass_sizes, refresh_examples

Found = TypeVar("Found")

PASS_BATCH = 256  # examples at a time in passes over all of them


class NormPasses:
    """Passes over the examples of one run, by its model and loss.

    `batch_size`: examples at a time. `micro_batch`: the same for the steps, if they are
    `private_step`'s (`own_steps`); it halves when memory runs out. `without_hooks` is entered
    around every pass, and takes another library's hooks off the model there. `shards`, `ranks`:
    which examples are this process's; what it finds is rank 0's to write down.
    """

    def __init__(
        self,
        run: Run,
        model: nn.Module,
        loss_fn: LossFn,
        train: Dataset[Any],
        *,
        plan: Plan | None = None,
        batch_size: int = PASS_BATCH,
        micro_batch: int | None = None,
        own_steps: bool = True,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
        without_hooks: Callable[[], AbstractContextManager[None]] = nullcontext,
        shards: Shards | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.run, self.micro_batch = run, micro_batch
        self.plan = run.plan if plan is None else plan
        self._shards = Shards(shard_edges(self.plan.n, 1)) if shards is None else shards
        self._ranks = ranks
        self._model, self._loss_fn, self._train = model, loss_fn, train
        self._batch_size, self._own_steps = batch_size, own_steps
        self._collate_fn, self._num_workers = collate_fn, num_workers
        self._without_hooks = without_hooks
        self.compiled = False  # those of refreshes and, if `own_steps`, of the steps
        self.covered = ranks.first(lambda: run.journal.sums_covered)  # rounding, so far
        self.random = False  # whether a refresh found random draws
        self.non_finite: list[tuple[int, NDArray[np.int64]]] = []  # that rank 0 does not know yet

    def of_all(self, step: int, seed: Callable[[int], int]) -> NDArray[np.float64]:
        """Norms, as computed, of all examples of this process before `step`: a refresh.

        What the checks of a refresh find is in the journal before; a loss that mixes examples ends
        the run. `seed`: of what losses and data draw in a shard.
        """
        found = np.empty(0)

        def refreshed() -> tuple[Inspection | str, int]:
            nonlocal found
            inspected = self.within_memory(lambda: self._inspect(step), step)
            if isinstance(inspected, Inspection):
                self._expect_current(step)
                parts = [
                    self.within_memory(
                        lambda s=shard, a=first, b=last: self._norms(  # type: ignore[misc]
                            _part(self._train, a, b),
                            step,
                            seed(s),
                            lambda done, total: self._ranks.beat(),
                        ),
                        step,
                    )
                    for shard, first, last in self._shards.parts()
                ]
                found = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return inspected, self.micro_batch or 0

        with self._without_hooks():
            every = self._ranks.together(refreshed)
            self._note(step, [inspected for inspected, _ in every])
            if len({size for _, size in every}) > 1:  # memory ran out: passes have one shape
                self.settle()
                return self.of_all(step, seed)
        self.note_non_finite(step, np.flatnonzero(~np.isfinite(found)) + self._shards.first)
        return found

    def of_some(self, indices: NDArray[np.int64], step: int, seed: int) -> NDArray[np.float64]:
        """Norms (k,) of the examples `indices` before `step`, as computed."""
        some = Subset(self._train, indices.tolist())
        return self.within_memory(lambda: self._norms(some, step, seed), step)

    def settle(self) -> None:
        """Let all processes have passes of one size, and compiled ones only if all of them do."""
        words = self._ranks.all_words(self.micro_batch or 0, int(self.compiled))
        self.micro_batch = min((int(size) for size in words[:, 0] if size), default=None)
        self.compiled = bool(words[:, 1].all())

    def compile_if(self, wanted: Compile) -> None:
        """Compile passes if that is `wanted` and can be; if not, one line says why.

        The graphs of steps are made now, from some of the examples: when to compile must not
        depend on who is drawn.
        """
        plan = self.plan
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
            self.not_covered(step)

    def within_memory(self, work: Callable[[], Found], step: int) -> Found:
        """What `work` returns; with a smaller micro-batch each time that memory runs out."""
        while True:
            try:
                return work()
            except (RuntimeError, MemoryError) as error:
                self.micro_batch = halved(error, self._step_examples(step), f"at step {step}")
            if self._own_steps:
                self.within_memory(lambda: self.test_bits_again(step), step)

    def note_non_finite(self, step: int, indices: NDArray[np.int64]) -> None:
        """Name the examples without a finite gradient, in private; or keep them for rank 0."""
        if len(indices) and self._ranks.main:
            ids = self.run.examples.ids[indices].tolist()
            _append_line(
                self.run.private / "non_finite.jsonl", json.dumps({"step": step, "ids": ids})
            )
        elif len(indices):
            self.non_finite.append((step, indices))

    def not_covered(self, step: int) -> None:
        """Note that floating-point effects of the sum are no longer covered."""
        self.covered = False
        if self._ranks.main:
            self.run.journal.record_batch_dependence(step)
            renew_ledger(self.run)

    def _norms(
        self,
        data: Dataset[Any],
        step: int,
        seed: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float64]:
        size = self._examples_at_once()
        if self._own_steps:
            size = refresh_examples(self.plan, step, self.micro_batch, size, self._shards.count)
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
            progress=progress,
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
        shards, phases = self._shards.count, self.plan.all_phases
        sizes = {pass_examples(phase, self.micro_batch, shards, fixed=True) for phase in phases}
        return {size for size in sizes if size is not None}

    def _some_pass(self, size: int) -> tuple[Any, ...]:
        """What a step's pass over some of the examples takes."""
        parameters, few = trainable(self._model), self._batch(size)
        batch = examples(few, torch.arange(size) % example_count(few))
        device = next(iter(parameters.values())).device
        limits = torch.ones(size, dtype=widest_dtype(device), device=device)
        return self.plan.sums, parameters, self._model, self._loss_fn, batch, limits

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
        return most_examples(self.plan.phase(step), self.micro_batch, self._shards.count)

    def _covered_sizes(self) -> Collection[int]:
        """Sizes of the steps' passes, if the rounding of what they sum is covered so far."""
        if not (self._own_steps and self.covered):
            return ()
        return pass_sizes(self.plan, self.micro_batch, self._shards.count)

    def _inspect(self, step: int) -> Inspection | str:
        """What the checks of a refresh find here; if examples are mixed, the sentence about it."""
        sizes = self._covered_sizes()
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
        except MixedExamples as error:
            return str(error)
        covered = not sizes or (found.batch_invariant and self._compiled_agree(sizes, **QUICKLY))
        return found._replace(batch_invariant=covered)

    def _note(self, step: int, found: list[Inspection | str]) -> None:
        """Write down what the checks of all processes found: rank 0 does."""
        journal = self.run.journal if self._ranks.main else None
        inspected = [each for each in found if isinstance(each, Inspection)]
        for each in found:
            if isinstance(each, str):
                if journal is not None and journal.steps_charged:
                    journal.record_mixing(step)
                raise MixedExamples(each)
        self.random |= any(each.random_loss or each.random_data for each in inspected)
        if journal is not None:
            if any(each.random_loss for each in inspected):
                journal.record_random("loss", step)
            if any(each.random_data for each in inspected):
                journal.record_random("data", step)
        if not all(each.batch_invariant for each in inspected):
            self.not_covered(step)


def _part(data: Dataset[Any], first: int, last: int) -> Dataset[Any]:
    """Some examples of a data set, in order."""
    if (first, last) == (0, len(data)):  # type: ignore[arg-type]
        return data
    if isinstance(data, TensorDataset):
        return TensorDataset(*(tensor[first:last] for tensor in data.tensors))
    return Subset(data, range(first, last))


def _append_line(file: Path, line: str) -> None:
    """One more line in a private file."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as lines:
        lines.write(line + "\n")
