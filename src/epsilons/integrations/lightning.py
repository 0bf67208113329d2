"""Lightning: a loader whose batches are private steps, and a callback for loops under Opacus."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import Dataset

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.gradients.norms import LossFn
from epsilons.integrations.opacus import AttachedToOpacus, attach
from epsilons.runs import Run
from epsilons.training.loop import Step
from epsilons.training.private_training import PrivateTraining

TakeStep = Callable[[pl.LightningModule], Step]


class PrivateLoader:
    """Takes the place of the train loader: each of its batches is a function that takes a step.

        def training_step(self, private_step, batch_idx):   # self.automatic_optimization is False
            self.log("loss", private_step(self).loss)

    `loss_fn(module, batch)` gives one loss per example; optimizer and scheduler are those of
    `configure_optimizers`. An epoch is as many steps as the plan's rate has in one. `train`,
    `plan`, `out` and `options` are as for `PrivateTraining`: the same call again goes on with the
    run. Its last step ends the run; if the trainer stops before, `finish()` does.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        train: Dataset[Any],
        plan: Plan,
        *,
        out: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        if plan.endless:
            raise ValueError("training needs a plan with steps or epochs")
        self._loss_fn, self._train, self._plan = loss_fn, train, plan
        self._out, self._options = Path(out), options
        self._epoch = min(plan.steps, max(1, round(1 / plan.sample_rate)))
        self._training: PrivateTraining | None = None
        self._steps: Iterator[Step] = iter(())
        self._taken = False

    def __len__(self) -> int:
        return self._epoch

    @property
    def run(self) -> Run:
        """The run folder, once training has begun."""
        return Run.open(self._out) if self._training is None else self._training.run

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order."""
        return self.run.epsilons(delta)

    def finish(self) -> None:
        """End the run before its last step: its journal is sealed and its keys are destroyed."""
        if self._training is not None:
            self._training.finish()
            self._close()

    def __iter__(self) -> Iterator[TakeStep]:
        if self._finished():
            return
        offered = 0
        try:
            while offered < len(self):
                self._taken = False
                offered += 1
                yield self._take
                if not self._taken:
                    raise ValueError(
                        "training_step took no step; its first argument is a function that does: "
                        "def training_step(self, private_step, batch_idx): private_step(self)"
                    )
                if self._finished():
                    return
        finally:
            if offered < len(self):  # interrupted: the run is saved, and can be gone on with
                self._close()

    def _take(self, module: pl.LightningModule) -> Step:
        if self._training is None:
            self._training = self._begun(module)
            self._steps = iter(self._training)
        step = next(self._steps)
        self._taken = True
        if (step.number + 1) % self._epoch == 0:
            for config in module.trainer.lr_scheduler_configs:
                if config.interval == "epoch":
                    config.scheduler.step()
        if step.number + 1 >= self._training.last_step:
            next(self._steps, None)
        return step

    def _begun(self, module: pl.LightningModule) -> PrivateTraining:
        trainer = module.trainer
        if module.automatic_optimization:
            raise ValueError(
                "the module's optimization is automatic, and would apply gradients without noise; "
                "set self.automatic_optimization = False in its __init__"
            )
        if trainer.world_size != 1 or len(trainer.optimizers) != 1:
            raise ValueError(
                f"{trainer.world_size} processes with {len(trainer.optimizers)} optimizers; "
                "expected one of each"
            )
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' scales losses; expected 'bf16-mixed' or '32-true'"
            )
        by_epoch, by_step = (
            [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == interval]
            for interval in ("epoch", "step")
        )
        if len(by_step) > 1:
            raise ValueError(f"{len(by_step)} schedulers step with the optimizer; expected one")

        def loss_fn(module: Any, batch: Any) -> Tensor:
            with trainer.precision_plugin.forward_context():
                return self._loss_fn(module, batch)

        return PrivateTraining(
            module,
            _optimizer(module),
            loss_fn,
            self._train,
            self._plan,
            out=self._out,
            scheduler=by_step[0] if by_step else None,
            state=[*by_epoch, *self._options.pop("state", ())],
            **self._options,
        )

    def _finished(self) -> bool:
        begun = (self._out / "private" / "journal.sqlite").exists()
        return begun and self.run.finished

    def _close(self) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()
        self._training, self._steps = None, iter(())


class IndividualPrivacy(pl.Callback):
    """Individual accounting of a module that trains under Opacus, from its start to its end.

    `hooks` is what `make_private(..., wrap_model=False)` returned first, `delta` the guarantee's.
    `loss_fn(module, batch)` gives one loss per example. Further options are those of `attach`.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        hooks: Any,
        delta: float,
        out: str | os.PathLike[str],
        **options: Any,
    ) -> None:
        super().__init__()
        self.accounted: AttachedToOpacus | None = None
        self._hooks = hooks
        self._options = {"loss_fn": loss_fn, "delta": delta, "out": out, **options}

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order."""
        if self.accounted is None:
            raise ValueError("training has not begun; there is nothing to account for")
        return self.accounted.epsilons(delta)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.world_size != 1 or len(trainer.optimizers) != 1:
            raise ValueError(
                f"{trainer.world_size} processes with {len(trainer.optimizers)} optimizers; "
                "expected one of each"
            )
        loader: Any = trainer.train_dataloader
        self.accounted = attach(self._hooks, trainer.optimizers[0], loader, **self._options)

    def on_exception(self, *_: Any) -> None:
        if self.accounted is not None:
            self.accounted.leave()

    def on_train_end(self, *_: Any) -> None:
        if self.accounted is not None:
            self.accounted.close()


def _optimizer(module: pl.LightningModule) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = module.optimizers()
    return found
