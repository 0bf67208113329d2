"""fit: a plan carried out. Loader → step → journal, and what the run leaves behind.

Sampling, noise and norm passes each draw from a generator of their own, so that accounting on or
off changes no weight.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.files import private_file
from epsilons.runs import Run
from epsilons.training.evaluation import CorrectFn, outcomes, to_device
from epsilons.training.noise import SeededNoise
from epsilons.training.norms import NORM_ERROR, LossFn, gradient_norms
from epsilons.training.progress import training_bar
from epsilons.training.sampling import PoissonLoader
from epsilons.training.step import private_step

_PASS_BATCH = 256  # examples at a time in passes over all of them


@dataclass(frozen=True)
class Step:
    """What `on_step` is told: the step just taken (from 0), the model, and the optimizer."""

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer


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
    on_step: Callable[[Step], None] | None = None,
) -> Run:
    """Train `model` as `plan` says and leave a run folder at `out`.

    `loss_fn(model, batch)` gives one loss per example, `correct_fn(model, batch)` whether each was
    right. `examples` names the training data (ids, owners, groups), `test_examples` the held-out
    data. With a `seed`, sampling and noise are reproducible; then they are not secret either.
    Privacy: the weights after each step, and so the trajectory, are (`plan.worst_case()`,
    `plan.delta`)-DP for add/remove neighbours.
    """
    where = torch.device(device) if device is not None else next(model.parameters()).device
    model.to(where)
    run = Run.create(out, plan, Examples.numbered(plan.n) if examples is None else examples)
    base = secrets.randbits(62) if seed is None else seed
    loader = PoissonLoader(train, plan, generator=_generator(base, "sampling"))
    noise = SeededNoise(_generator(base, "noise"))
    bounds: Tensor | None = None
    due = set(plan.refresh_steps)

    with torch.random.fork_rng(), training_bar(plan) as advance:
        torch.manual_seed(_stream(base, "model"))
        for step in range(plan.steps):
            if step in due:
                norms = gradient_norms(
                    model, loss_fn, train, batch_size=micro_batch or _PASS_BATCH, device=where
                ) * (1 + NORM_ERROR)
                run.journal.record(step, norms)
                bounds = _bounds(norms, plan)
            indices = loader.draw()
            run.journal.charge(step)
            private_step(
                model,
                optimizer,
                loss_fn,
                to_device(loader.batch(indices), where),
                plan,
                noise=noise,
                bounds=None if bounds is None else bounds[indices].to(where),
                micro_batch=micro_batch,
            )
            if scheduler is not None:
                scheduler.step()
            if on_step is not None:
                on_step(Step(step, model, optimizer))
            advance(step + 1)

    _finish(run, model, loss_fn, correct_fn, train, test, test_examples, where)
    return run


def _bounds(norms: NDArray[np.float64], plan: Plan) -> Tensor | None:
    """Each example's clip bound under individual clipping; None where it is the common one."""
    if plan.clipping == "max":
        return None
    return torch.from_numpy(clipping_thresholds(norms, plan.max_grad_norm, plan.levels))


def _finish(
    run: Run,
    model: nn.Module,
    loss_fn: LossFn,
    correct_fn: CorrectFn | None,
    train: Dataset[Any],
    test: Dataset[Any] | None,
    test_examples: Examples | None,
    where: torch.device,
) -> None:
    """Save the model and every example's final loss and correctness, train and test."""
    with private_file(run.model_file) as file:
        torch.save(model.state_dict(), file)
    examples = run.examples.with_outcomes(
        *outcomes(model, loss_fn, correct_fn, train, _PASS_BATCH, where)
    )
    held_out = None
    if test is not None:
        named = test_examples or Examples.numbered(len(test))  # type: ignore[arg-type]
        held_out = named.with_outcomes(
            *outcomes(model, loss_fn, correct_fn, test, _PASS_BATCH, where)
        )
    run.save_examples(examples, held_out)


def _stream(base: int, purpose: str) -> int:
    """A seed for one purpose, unrelated to the seeds for others."""
    words = np.random.SeedSequence([base, *purpose.encode()]).generate_state(2)
    return int(words[0]) << 31 ^ int(words[1])


def _generator(base: int, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(_stream(base, purpose))
