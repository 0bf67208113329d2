"""A Lightning callback: individual accounting for a `Trainer`'s run, in one process."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import Dataset

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.gradients.norms import LossFn
from epsilons.integrations.accounted import Accounted
from epsilons.randomness import Randomness
from epsilons.training import PoissonLoader


class IndividualPrivacy(pl.Callback):
    """Individual accounting from the start of training to its end.

    With Opacus: `hooks` is what `make_private(..., wrap_model=False)` returned first, and `delta`
    the guarantee's. With `private_step` in a `training_step` of manual optimization: `plan`, the
    `micro_batch` of the steps if there is one, and the train loader is `PoissonLoader(dataset,
    plan)`; bounds, if needed, are `accounted.run.journal.bounds(...)`.
    `loss_fn(module, batch)` gives one loss per example.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        out: str | os.PathLike[str],
        hooks: Any = None,
        plan: Plan | None = None,
        delta: float | None = None,
        dataset: Dataset[Any] | None = None,
        examples: Examples | None = None,
        batch_size: int = 256,
        micro_batch: int | None = None,
        **opacus: Any,
    ) -> None:
        super().__init__()
        if (hooks is None) == (plan is None):
            raise ValueError("give hooks (of Opacus) or plan (for private_step), one of them")
        if plan is not None and dataset is None:
            raise ValueError("with a plan, give the dataset that the loader draws from")
        if hooks is not None:
            if delta is None:
                raise ValueError("with hooks of Opacus, give delta, well below 1/n examples")
            opacus["delta"] = delta
        elif delta is not None or opacus:
            given = [*opacus, *([] if delta is None else ["delta"])]
            raise ValueError(f"{', '.join(given)}: with a plan, these are the plan's")
        self.accounted: Accounted | None = None
        self._loss_fn, self._hooks, self._plan, self._dataset = loss_fn, hooks, plan, dataset
        self._micro_batch = micro_batch
        self._options = {"out": out, "examples": examples, "batch_size": batch_size, **opacus}

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
        if self._plan is not None:
            assert self._dataset is not None
            if not isinstance(loader, PoissonLoader) or len(loader) != self._plan.steps:
                raise ValueError(
                    f"the train loader is a {type(loader).__name__}; with a plan, expected "
                    "PoissonLoader(dataset, plan)"
                )
            self.accounted = Accounted(
                pl_module, self._loss_fn, self._dataset, self._plan, on_grid=True,
                micro_batch=self._micro_batch, collate_fn=loader.collate_fn,
                randomness=Randomness(coins=loader.coins), **self._options,
            )  # fmt: skip
        else:
            from epsilons.integrations.opacus import attach

            self.accounted = attach(
                self._hooks,
                trainer.optimizers[0],
                loader,
                loss_fn=self._loss_fn,
                dataset=self._dataset,
                **self._options,
            )

    def on_train_batch_start(self, *_: Any) -> None:
        if self._plan is not None and self.accounted is not None:
            self.accounted.before_step()

    def on_train_end(self, *_: Any) -> None:
        if self.accounted is not None:
            self.accounted.close()
