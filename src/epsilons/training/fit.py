"""fit: `PrivateTraining` with evaluation, callbacks and a progress bar."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.gradients.compile import Compile
from epsilons.gradients.norms import LossFn
from epsilons.runs import Run, expect_free
from epsilons.training.arguments import check_data_set
from epsilons.training.checkpoint import Stateful
from epsilons.training.distributed import Ranks, joined
from epsilons.training.evaluated import EvaluatedTraining
from epsilons.training.evaluation import CorrectFn
from epsilons.training.interrupt import interruptible
from epsilons.training.progress import Show, training_bar
from epsilons.training.sampling import Collate
from epsilons.training.taken import Step


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    train: Dataset[Any],
    plan: Plan,
    *,
    out: str | os.PathLike[str],
    examples: Examples | None = None,
    test: Dataset[Any] | None = None,
    test_examples: Examples | None = None,
    correct_fn: CorrectFn | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    micro_batch: int | None = None,
    collate_fn: Collate = default_collate,
    num_workers: int = 0,
    follow: int = 0,
    on_step: Callable[[Step], None] | None = None,
    evaluate_every: int | None = None,
    max_epsilon: float | None = None,
    resume: bool = False,
    compile: Compile = "auto",
    shards: int | None = None,
) -> Run:
    """Train `model` as `plan` says and leave a run folder at `out`.

    `PrivateTraining` iterated over to the end; what is not named here is as there.
    `correct_fn(model, batch)`: whether each example is right. `test`: held-out data, and
    `test_examples` their names. `on_step` is called after every step; if it has `state_dict` and
    `load_state_dict`, they are part of the checkpoints. `evaluate_every` so many steps the accuracy
    on `test` is shown. The run has the final loss and correctness of every example.

    A folder at `out` is refused, unless `resume=True`: then the unfinished run there is gone on
    with; if there is none, a new one begins, and that is said. Ctrl-C and SIGTERM stop between two
    steps (`Interrupted`), where the same call with `resume=True` goes on. `optimizer`, `loss_fn`,
    `train`, `examples`, `scheduler`, `seed`, `device`, `micro_batch`, `collate_fn`, `num_workers`,
    `follow`, `max_epsilon`, `compile` and `shards` are those of `PrivateTraining`, as are
    guarantees and errors. The finished `Run` comes back. Under torchrun all ranks make the call
    together; `on_step` is called on rank 0, and the `Run` of the others is for reading.
    """
    out = Path(out).absolute()
    if test is not None:
        check_data_set("test", test)
    ranks = joined()
    ranks.first(lambda: _expect_startable(out, resume))
    training = _Fit(
        model,
        optimizer,
        loss_fn,
        train,
        plan,
        out=out,
        scheduler=scheduler,
        state=[on_step] if isinstance(on_step, Stateful) else [],
        examples=examples,
        seed=seed,
        device=device,
        micro_batch=micro_batch,
        collate_fn=collate_fn,
        num_workers=num_workers,
        follow=follow,
        max_epsilon=max_epsilon,
        compile=compile,
        shards=shards,
    )
    ranks.first(lambda: _expect_unfinished(training.run))
    training.correct_fn, training.test, training.test_examples = correct_fn, test, test_examples
    with (
        interruptible() as training.signal,
        _bar(training, ranks) as show,
    ):
        for step in training:
            if on_step is not None and step.main:
                on_step(step)
            accuracy = None
            if evaluate_every and test is not None and (step.number + 1) % evaluate_every == 0:
                right = training.outcomes(test)[1]
                accuracy = None if right is None else float(right.mean())
            show(step.number + 1, step.loss, accuracy, training.refresh_seconds)
    return training.run


def _expect_startable(out: Path, resume: bool) -> None:
    if not resume:
        expect_free(out)
    elif not (out / "private" / "journal.sqlite").exists():
        talk = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        talk.print(f"nothing to resume at {out}: a new run begins")


def _expect_unfinished(run: Run) -> None:
    if run.finished:
        raise ValueError(f"{run.path} is finished; there is nothing to resume")


def _bar(training: _Fit, ranks: Ranks) -> AbstractContextManager[Show]:
    if not ranks.main:
        return nullcontext(lambda done, loss, right, refresh: None)
    return training_bar(training.run.journal, training.last_step)


class _Fit(EvaluatedTraining):
    """Training that is stopped between two steps."""

    signal: Callable[[], int | None]

    def _signal_during_body(self) -> int | None:
        return self.signal()
