"""A Hugging Face `Trainer` callback: individual accounting for models trained under Opacus.

Loops written with Accelerate need no callback: `integrations.opacus.attach` takes the optimizer
and the loader that `accelerator.prepare` returns.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import Dataset
from transformers import TrainerCallback

from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.gradients.norms import LossFn
from epsilons.integrations.opacus import AttachedToOpacus, attach


class IndividualPrivacy(TrainerCallback):
    """Individual accounting from the start of training to its end.

    `hooks`, optimizer and loader are what `make_private(..., wrap_model=False)` returned; the
    `Trainer` has `optimizers=(optimizer, None)` and a `get_train_dataloader` that returns the
    loader. `loss_fn(model, batch)` gives one loss per example, for the batches of the collator;
    `delta` is the guarantee's. Further options are those of `attach`.
    """

    def __init__(
        self,
        hooks: Any,
        loss_fn: LossFn,
        *,
        out: str | os.PathLike[str],
        delta: float,
        dataset: Dataset[Any] | None = None,
        examples: Examples | None = None,
        **options: Any,
    ) -> None:
        self.accounted: AttachedToOpacus | None = None
        self._hooks = hooks
        self._options = {
            "loss_fn": loss_fn, "out": out, "delta": delta, "dataset": dataset,
            "examples": examples, **options,
        }  # fmt: skip

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every example for the steps taken so far, in data set order."""
        if self.accounted is None:
            raise ValueError("training has not begun; there is nothing to account for")
        return self.accounted.epsilons(delta)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.accounted = attach(
            self._hooks, kwargs["optimizer"], kwargs["train_dataloader"], **self._options
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the Trainer clears the model's gradients and not the optimizer's per-example ones
        kwargs["optimizer"].zero_grad()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.accounted is not None:
            self.accounted.close()
