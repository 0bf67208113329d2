"""Lightning: a loader whose batches are private steps, and a callback for loops under Opacus."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from torch.utils.data import Dataset

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.gradients.norms import LossFn, check_loss_fn
from epsilons.runs import Run
from epsilons.training.private_training import PrivateTraining
from epsilons.training.taken import Step

if TYPE_CHECKING:
    from epsilons.integrations.opacus import AttachedToOpacus

TakeStep = Callable[[pl.LightningModule], Step]


class PrivateLoader:
    """Takes the place of the train loader: each of its batches is a function that takes a step.

        def training_step(self, private_step, batch_idx):   # self.automatic_optimization is False
            self.log("loss", private_step(self).loss)

    `loss_fn(module, batch)` gives one loss per example. The optimizer is that of
    `configure_optimizers`, and so are the schedulers: they are stepped here, by interval and
    frequency, but for ReduceLROnPlateau, which needs a value. An epoch is as many steps as the
    plan's rate has in one, counted from where `fit` begins; schedulers count from the first step
    of the run. `train`, `plan`, `out` and `options` are as for `PrivateTraining`: the same call
    again goes on with the run. One that is finished gives its weights, and its last step once
    more, with a loss of NaN. The last step ends the run; if the trainer stops before, `finish()`.
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
        check_loss_fn(loss_fn)
        if plan.endless:
            raise ValueError("training needs a plan with steps or epochs")
        self._loss_fn, self._train, self._plan = loss_fn, train, plan
        self._out, self._options = Path(out), options
        self._epoch = min(plan.steps, max(1, math.ceil(1 / plan.sample_rate - 1e-9)))
        self._epochs_begun = 0
        self._training: PrivateTraining | None = None  # while a trainer takes its steps
        self._steps = _steps_of(())
        self._taken = False  # whether the present batch took its step
        self._over = False  # whether it was the last

    def __len__(self) -> int:
        return self._epoch

    @property
    def run(self) -> Run:
        """The run folder, once training has begun."""
        return Run.open(self._out) if self._training is None else self._training.run

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order.

        `delta`: by default the plan's.
        """
        return self.run.epsilons(delta)

    def finish(self, module: pl.LightningModule) -> None:
        """End the run before its last step: its journal is sealed and its keys are destroyed.

        `module`: with the weights that the run shall have; in `training_step` or after `fit`.
        """
        training = self._training or self._begun(module)
        training.finish()
        self._close()

    def __iter__(self) -> Iterator[TakeStep]:
        self._epochs_begun += 1
        return self._batches(self._epochs_begun)

    def _batches(self, epoch: int) -> Iterator[TakeStep]:
        self._over = False
        try:
            for _ in range(len(self)):
                self._taken = False
                yield self._take
                if not self._taken:
                    raise ValueError(
                        "training_step took no step; its first argument is a function that does: "
                        "def training_step(self, private_step, batch_idx): private_step(self)"
                    )
                if self._over:
                    return
        finally:
            if epoch == self._epochs_begun:  # no other follows: the run can be gone on with
                self._close()

    def _take(self, module: pl.LightningModule) -> Step:
        if self._training is None:
            self._training = self._begun(module)
            self._steps = _steps_of(self._training)
        training, trainer = self._training, module.trainer
        (optimizer,) = trainer.optimizers
        step = next(self._steps, None)
        if step is None:  # finished earlier
            last = training.run.journal.steps_charged - 1
            step = Step(last, module, optimizer, math.nan, training.run, replayed=True)
        else:
            self._step_schedulers(trainer, step.number + 1)
        optimizer.zero_grad()
        wrapped: Any = module.optimizers()
        wrapped.step()  # without gradients: the trainer counts steps by it
        self._taken, self._over = True, step.number + 1 >= training.last_step
        if self._over:
            next(self._steps, None)
            trainer.should_stop = True
        return step

    def _step_schedulers(self, trainer: pl.Trainer, taken: int) -> None:
        for config in trainer.lr_scheduler_configs:
            every = config.frequency * (self._epoch if config.interval == "epoch" else 1)
            if taken % every == 0 and not config.reduce_on_plateau:
                config.scheduler.step()

    def _begun(self, module: pl.LightningModule) -> PrivateTraining:
        trainer = module.trainer
        if module.automatic_optimization:
            raise ValueError(
                "the module's optimization is automatic, and would apply gradients without noise; "
                "set self.automatic_optimization = False in its __init__"
            )
        _check_trainer(trainer)
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise ValueError(
                "precision='16-mixed' scales losses; expected 'bf16-mixed' or '32-true'"
            )
        options = dict(self._options)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        return PrivateTraining(
            module,
            trainer.optimizers[0],
            self._loss_fn,
            self._train,
            self._plan,
            out=self._out,
            state=[*schedulers, *options.pop("state", ())],
            **options,
        )

    def _close(self) -> None:
        self._steps.close()
        self._training, self._steps = None, _steps_of(())


class IndividualPrivacy(pl.Callback):
    """Individual accounting of a module that trains under Opacus, from its start to its end.

    `hooks` is what `make_private(..., wrap_model=False)` returned first, `delta` the guarantee's.
    `loss_fn(module, batch)` gives one loss per example. Further options are those of `attach`.
    `out`: the run folder; it and `options` are those of `attach`. `.accounted`: what `attach` gave,
    once training has begun.
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
        """ε of every example for the steps taken so far, in data set order.

        `delta`: by default the plan's. ValueError before training has begun.
        """
        if self.accounted is None:
            raise ValueError("training has not begun; there is nothing to account for")
        return self.accounted.epsilons(delta)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        from epsilons.integrations.opacus import attach  # PrivateLoader does without Opacus

        _check_trainer(trainer)
        loader: Any = trainer.train_dataloader
        self.accounted = attach(self._hooks, trainer.optimizers[0], loader, **self._options)

    def on_exception(self, *_: Any) -> None:
        if self.accounted is not None:
            self.accounted.leave()

    def on_train_end(self, *_: Any) -> None:
        if self.accounted is not None:
            self.accounted.close()


def _check_trainer(trainer: pl.Trainer) -> None:
    if trainer.world_size != 1 or len(trainer.optimizers) != 1:
        raise ValueError(
            f"{trainer.world_size} processes with {len(trainer.optimizers)} optimizers; "
            "expected one of each"
        )


def _steps_of(training: Iterable[Step]) -> Generator[Step, None, None]:
    yield from training
