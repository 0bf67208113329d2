"""Hugging Face: `PrivateTrainer`, a `Trainer` of private steps; a callback for loops under Opacus.

Loops written with Accelerate need neither: `PrivateTraining` takes their model and optimizer, and
`integrations.opacus.attach` what `accelerator.prepare` returned of Opacus's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.gradients.norms import LossFn
from epsilons.integrations.huggingface_loss import expect_own_loss, per_example_loss
from epsilons.runs import Run
from epsilons.training.arguments import check_data_set
from epsilons.training.evaluated import EvaluatedTraining
from epsilons.training.evaluation import CorrectFn
from epsilons.training.loop import Step
from epsilons.training.private_training import PrivateTraining

if TYPE_CHECKING:
    from epsilons.integrations.opacus import AttachedToOpacus

__all__ = ["IndividualPrivacy", "PrivateTrainer", "per_example_loss", "plan_of"]

_COMPARED = 2  # examples whose loss is compared with the model's own
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


def plan_of(
    args: TrainingArguments, n: int, *, epsilon: float, delta: float, **changes: Any
) -> Plan:
    """The plan of a `PrivateTrainer` with these arguments, on n examples.

    Expected batch, steps and clip bound are those of `args`: `per_device_train_batch_size` times
    `gradient_accumulation_steps`, `max_steps` or `num_train_epochs`, and `max_grad_norm`. `changes`
    go to `Plan.for_epsilon`, as refreshes_per_epoch=1. `args`: those of the `Trainer`. `n`: how
    many training examples there are. `epsilon`: the worst case to meet, at `delta`.
    """
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps = (
        args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * -(-n // batch))
    )
    constants = {"batch_size": batch, "steps": steps, "max_grad_norm": args.max_grad_norm}
    return Plan.for_epsilon(epsilon, delta=delta, n=n, **{**constants, **changes})


class PrivateTrainer(Trainer):
    """A `Trainer` whose steps are private, with ε for every example.

        trainer = PrivateTrainer(model=…, args=…, train_dataset=…, plan=plan, out="runs/mine")
        trainer.train()
        eps = trainer.epsilons()

    Logging, evaluation, saving, callbacks, optimizer and scheduler are the `Trainer`'s. Each step
    is one of `PrivateTraining`: a Poisson batch of the plan's rate, in passes of at most
    `per_device_train_batch_size` examples. `loss_fn(model, batch)` gives one loss per example, by
    default `per_example_loss`, which is compared with the model's own on some examples. `out` is
    the run folder: the same call again goes on with the run there. With `correct_fn(model, batch)`,
    whether the model is right about each example, the run ends with that and the loss of every
    example of `train_dataset` and `eval_dataset`, named by `eval_examples`, as those of `fit` do.
    The losses that are logged are exact: they are for the curator alone. `arguments` and `options`
    are those of the `Trainer`; `plan`, `out`, `examples`, `seed` and `follow` those of
    `PrivateTraining`.
    """

    def __init__(
        self,
        *arguments: Any,
        plan: Plan,
        out: str | os.PathLike[str],
        loss_fn: LossFn | None = None,
        examples: Examples | None = None,
        seed: int | None = None,
        follow: int = 0,
        correct_fn: CorrectFn | None = None,
        eval_examples: Examples | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        _check_arguments(self.args)
        own_loss = type(self).compute_loss is not Trainer.compute_loss
        if loss_fn is None and (self.label_smoother or self.compute_loss_func or own_loss):
            raise ValueError(
                "label_smoothing_factor, compute_loss_func and compute_loss give one loss for all; "
                "give loss_fn(model, batch) with one loss per example"
            )
        self._plan, self._out, self._seed, self._examples = plan, Path(out), seed, examples
        self._follow, self._correct_fn, self._eval_examples = follow, correct_fn, eval_examples
        if correct_fn is not None and isinstance(self.eval_dataset, Mapping):
            raise ValueError(
                f"eval_dataset has several data sets, {', '.join(self.eval_dataset)}; with "
                "correct_fn give the one whose outcomes the run shall have"
            )
        if correct_fn is not None and self.eval_dataset is not None:
            check_data_set("eval_dataset", self.eval_dataset)
        self._loss_fn, self._loss_given = loss_fn or per_example_loss, loss_fn is not None
        self._epoch = max(1, math.ceil(1 / plan.sample_rate - 1e-9))
        self._training: PrivateTraining | None = None
        self._steps = _steps_of(())
        self.callback_handler.callbacks.insert(0, _EpochOfStep(self._epoch))

    @property
    def run(self) -> Run:
        """The run folder, once training has begun."""
        return Run.open(self._out) if self._training is None else self._training.run

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every training example for the steps taken so far, in data set order.

        `delta`: by default the plan's.
        """
        return self.run.epsilons(delta)

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> TrainOutput:
        """Train, or go on with the run at `out`; a run that is finished gives its weights."""
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: what was charged is known to "
                f"the run folder alone; train() goes on with {self._out} by itself"
            )
        if options.get("trial") is not None:
            raise ValueError(
                "hyperparameter_search would train several models into one run; each is a run of "
                "its own, and all of them cost privacy"
            )
        if (planned := self._planned_steps()) != self._plan.steps:
            raise ValueError(
                f"the arguments give {planned} steps and the plan has {self._plan.steps}; expected "
                "max_steps=plan.steps in TrainingArguments, or a plan of plan_of(args, n, …)"
            )
        try:
            result: TrainOutput = super().train(**options)
            if self._training is not None:  # open still: its model is what train() leaves
                self._training.finish()
        finally:
            self._steps.close()
            self._training, self._steps = None, _steps_of(())
        return result

    def get_train_dataloader(self) -> Any:
        """Stands for the batches of an epoch, which the private steps draw themselves."""
        return _Epoch(self, self._epoch)

    def training_step(self, model: Any, inputs: Any, *_: Any) -> Tensor:
        """Take one private step, the optimizer's included: of several accumulated, at the last."""
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        model.train()
        first = self._training is None
        if self._training is None:
            self._training = self._begun()
            self._steps = _steps_of(self._training)
        step = next(self._steps, None)  # None: all were taken earlier
        taken = self._plan.steps if step is None else step.number
        if first:
            self._initial_global_step = self._globalstep_last_logged = taken
        self.state.global_step = min(taken, self._plan.steps - 1)
        self.optimizer.zero_grad()  # what the Trainer's own optimizer.step() finds: nothing
        return torch.tensor(math.nan if step is None else step.loss, device=self.args.device)

    def _begun(self) -> PrivateTraining:
        loader = super().get_train_dataloader()
        collate_fn = _Plain(loader.collate_fn)
        model: Any = self.model
        if not self._loss_given:
            some = range(min(_COMPARED, len(loader.dataset)))
            expect_own_loss(model, [loader.dataset[k] for k in some], collate_fn)
        optimizer = self.optimizer
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        kept: list[Any] = [_Best(self)]
        if self.lr_scheduler is not None:
            kept.append(self.lr_scheduler)
        kind = PrivateTraining if self._correct_fn is None else EvaluatedTraining
        training = kind(
            model,
            optimizer,
            self._loss_fn,
            loader.dataset,
            self._plan,
            out=self._out,
            state=kept,
            examples=self._examples,
            seed=self._seed,
            micro_batch=self.args.per_device_train_batch_size,
            collate_fn=collate_fn,
            num_workers=self.args.dataloader_num_workers,
            follow=self._follow,
        )
        if isinstance(training, EvaluatedTraining):
            training.correct_fn, training.test = self._correct_fn, self.eval_dataset
            training.test_examples = self._eval_examples
        return training

    def _planned_steps(self) -> int:
        steps: int = self.args.max_steps
        return steps if steps > 0 else math.ceil(float(self.args.num_train_epochs) * self._epoch)

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        """Log, with the worst case so far; without the norm of a gradient that is no more there."""
        logs.pop("grad_norm", None)
        if self._training is not None:
            logs["worst_case"] = self._training.run.journal.worst_case()
        super().log(logs, *arguments)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the size of a Poisson batch is private."""
        return 0


class _Epoch:
    """The batches of an epoch, all empty; of an epoch that was begun earlier the rest."""

    def __init__(self, trainer: PrivateTrainer, steps: int) -> None:
        self._trainer, self._steps = trainer, steps
        self._accumulated: int = trainer.args.gradient_accumulation_steps
        self.dataset = trainer.train_dataset

    def __len__(self) -> int:
        return self._steps * self._accumulated

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._steps):
            yield from ({} for _ in range(self._accumulated))
            if self._trainer.state.global_step % self._steps == 0:
                return


class _Plain:
    """A collate function whose batches are plain dictionaries."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, examples: list[Any]) -> Any:
        batch = self._collate_fn(examples)
        return dict(batch) if isinstance(batch, Mapping) else batch


class _Best:
    """What the `Trainer` knows of its best checkpoint, kept for a run that is gone on with."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._trainer.state, name, None) for name in _BEST}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self._trainer.state, name, value)


class _EpochOfStep(TrainerCallback):
    """Keeps the epoch right where a run was gone on with."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / self._epoch


def _steps_of(training: Iterable[Step]) -> Generator[Step, None, None]:
    yield from training


def _check_arguments(args: TrainingArguments) -> None:
    refused = {
        "several processes or devices": args.world_size > 1 or args.n_gpu > 1,
        "deepspeed": args.deepspeed is not None,
        "fsdp": bool(args.fsdp),
        "fp16, whose losses are scaled (bf16 works)": args.fp16,
        "auto_find_batch_size (the passes get smaller by themselves)": args.auto_find_batch_size,
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"PrivateTrainer does not work with {what}")


class IndividualPrivacy(TrainerCallback):
    """Individual accounting of a `Trainer`'s loop under Opacus, from its start to its end.

    `hooks`, optimizer and loader are what `make_private(..., wrap_model=False)` returned; the
    `Trainer` has `optimizers=(optimizer, None)` and a `get_train_dataloader` that returns the
    loader. `loss_fn(model, batch)` gives one loss per example, for the batches of the collator;
    `delta` is the guarantee's. Further options are those of `attach`. `out`: the run folder;
    `dataset`, `examples` and `options` are those of `attach`. `.accounted`: what it gave, once
    training has begun.
    """

    def __init__(
        self,
        loss_fn: LossFn,
        *,
        hooks: Any,
        delta: float,
        out: str | os.PathLike[str],
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
        """ε of every example for the steps taken so far, in data set order.

        `delta`: by default the plan's. ValueError before training has begun.
        """
        if self.accounted is None:
            raise ValueError("training has not begun; there is nothing to account for")
        return self.accounted.epsilons(delta)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from epsilons.integrations.opacus import attach  # PrivateTrainer does without Opacus

        if self.accounted is not None:  # of a train() that an exception ended
            self.accounted.leave()
        self.accounted = attach(
            self._hooks, kwargs["optimizer"], kwargs["train_dataloader"], **self._options
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # the Trainer clears the model's gradients and not the optimizer's per-example ones
        kwargs["optimizer"].zero_grad()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.accounted is not None:
            self.accounted.close()
