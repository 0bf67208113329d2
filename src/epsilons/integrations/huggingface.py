"""Hugging Face: `PrivateTrainer`, a `Trainer` of private steps; a callback for loops under Opacus.

Loops written with Accelerate need neither: `PrivateTraining` takes their model and optimizer, and
`integrations.opacus.attach` what `accelerator.prepare` returned of Opacus's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_utils import TrainOutput

from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.gradients.isolation import undisturbed
from epsilons.gradients.norms import LossFn
from epsilons.integrations.opacus import AttachedToOpacus, attach
from epsilons.runs import Run
from epsilons.training.evaluation import to_device
from epsilons.training.loop import Step
from epsilons.training.private_training import PrivateTraining

_NO_LABEL = -100  # labels of tokens that don't count
_COMPARED = 2  # examples whose loss is compared with the model's own
_SAME_LOSS = 1e-2  # relative: bfloat16 has three digits


def plan_of(
    args: TrainingArguments, n: int, *, epsilon: float, delta: float, **changes: Any
) -> Plan:
    """The plan of a `PrivateTrainer` with these arguments, on n examples.

    Expected batch, steps and clip bound are those of `args`: `per_device_train_batch_size` times
    `gradient_accumulation_steps`, `max_steps` or `num_train_epochs`, and `max_grad_norm`. `changes`
    go to `Plan.for_epsilon`, as refreshes_per_epoch=1.
    """
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
    steps = (
        args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * -(-n // batch))
    )
    constants = {"batch_size": batch, "steps": steps, "max_grad_norm": args.max_grad_norm}
    return Plan.for_epsilon(epsilon, delta=delta, n=n, **{**constants, **changes})


def per_example_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss of a transformers model with labels, one per example (B,).

    Classification, regression and several labels as the model has it; of tokens (causal, masked,
    sequence to sequence, token classification) the mean over the example's own that have a label.
    """
    config: Any = model.config
    labels = batch["labels"]
    inputs = (
        dict(batch) if config.is_encoder_decoder else {k: batch[k] for k in batch if k != "labels"}
    )
    logits = model(**inputs).logits.float()
    if labels.dim() == 1 and logits.dim() == 2:
        if logits.shape[1] == 1 or config.problem_type == "regression":
            return F.mse_loss(logits.squeeze(1), labels.float(), reduction="none")
        return F.cross_entropy(logits, labels, reduction="none")
    if labels.shape == logits.shape:
        by_class = F.mse_loss if config.problem_type == "regression" else _binary
        losses: Tensor = by_class(logits, labels.float(), reduction="none")
        return losses.mean(1)
    if logits.dim() != 3:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; "
            "give loss_fn(model, batch) with one loss per example"
        )
    if _is_causal(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=_NO_LABEL, reduction="none"
    )
    mean: Tensor = losses.sum(1) / (labels != _NO_LABEL).sum(1).clamp(min=1)
    return mean


class PrivateTrainer(Trainer):
    """A `Trainer` whose steps are private, with ε for every example.

        trainer = PrivateTrainer(model=…, args=…, train_dataset=…, plan=plan, out="runs/mine")
        trainer.train()
        eps = trainer.epsilons()

    Logging, evaluation, saving, callbacks, optimizer and scheduler are the `Trainer`'s. Each step
    is one of `PrivateTraining`: a Poisson batch of the plan's rate, in passes of at most
    `per_device_train_batch_size` examples. `loss_fn(model, batch)` gives one loss per example, by
    default `per_example_loss`, which is compared with the model's own on some examples. `out` is
    the run folder: the same call again goes on with the run there. `examples` and `seed` are as for
    `PrivateTraining`. The losses that are logged are exact: they are for the curator alone.
    """

    def __init__(
        self,
        *arguments: Any,
        plan: Plan,
        out: str | os.PathLike[str],
        loss_fn: LossFn | None = None,
        examples: Examples | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        _check_arguments(self.args)
        if loss_fn is None and (self.label_smoother or self.compute_loss_func):
            raise ValueError(
                "label_smoothing_factor and compute_loss_func give one loss for all; give "
                "loss_fn(model, batch) with one loss per example"
            )
        self._plan, self._out, self._seed, self._examples = plan, Path(out), seed, examples
        self._loss_fn, self._loss_given = loss_fn or per_example_loss, loss_fn is not None
        self._epoch = max(1, math.ceil(1 / plan.sample_rate - 1e-9))
        self._training: PrivateTraining | None = None
        self._steps = _no_steps()
        self.add_callback(_EpochOfStep(self._epoch))

    @property
    def run(self) -> Run:
        """The run folder, once training has begun."""
        return Run.open(self._out) if self._training is None else self._training.run

    def epsilons(self, delta: float | None = None) -> Epsilons:
        """ε of every training example for the steps taken so far, in data set order."""
        return self.run.epsilons(delta)

    def train(self, resume_from_checkpoint: Any = None, **options: Any) -> TrainOutput:
        """Train, or go on with the run at `out`; a run that is finished gives its weights."""
        if resume_from_checkpoint:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: what was charged is known to "
                f"the run folder alone; train() goes on with {self._out} by itself"
            )
        if (planned := self._planned_steps()) != self._plan.steps:
            raise ValueError(
                f"the arguments give {planned} steps and the plan has {self._plan.steps}; expected "
                "max_steps=plan.steps in TrainingArguments, or a plan of plan_of(args, n, …)"
            )
        if self._finished():
            self.create_optimizer()
            for _ in self._begun():
                pass
            return TrainOutput(self._plan.steps, math.nan, {})
        try:
            result: TrainOutput = super().train(**options)
            if self._training is not None:  # open still: its model is what train() leaves
                self._training.finish()
        finally:
            self._steps.close()
            self._training, self._steps = None, _no_steps()
        return result

    def get_train_dataloader(self) -> Any:
        """Stands for the batches of an epoch, which the private steps draw themselves."""
        return _Epoch(self._epoch, self.train_dataset)

    def training_step(self, model: nn.Module, inputs: Any, *_: Any) -> Tensor:
        """Take one private step, the optimizer's included."""
        model.train()
        if self._training is None:
            self._training = self._begun()
            self._steps = (step for step in self._training)
        step = next(self._steps)
        self.state.global_step = step.number
        self.optimizer.zero_grad()  # what the Trainer's own optimizer.step() finds: nothing
        return torch.tensor(step.loss, device=self.args.device)

    def _begun(self) -> PrivateTraining:
        loader = super().get_train_dataloader()
        collate_fn = _Plain(loader.collate_fn)
        model: Any = self.model
        if not self._loss_given:
            _check_loss(model, [loader.dataset[k] for k in range(_COMPARED)], collate_fn)
        return PrivateTraining(
            model,
            self.optimizer,
            self._loss_fn,
            loader.dataset,
            self._plan,
            out=self._out,
            state=[] if self.lr_scheduler is None else [self.lr_scheduler],
            examples=self._examples,
            seed=self._seed,
            micro_batch=self.args.per_device_train_batch_size,
            collate_fn=collate_fn,
            num_workers=self.args.dataloader_num_workers,
        )

    def _planned_steps(self) -> int:
        steps: int = self.args.max_steps
        return steps if steps > 0 else math.ceil(float(self.args.num_train_epochs) * self._epoch)

    def _finished(self) -> bool:
        begun = (self._out / "private" / "journal.sqlite").exists()
        return begun and self.run.finished

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
    """As many empty batches as an epoch has steps."""

    def __init__(self, steps: int, dataset: Any) -> None:
        self._steps, self.dataset = steps, dataset

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return ({} for _ in range(self._steps))


class _Plain:
    """A collate function whose batches are plain dictionaries."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, examples: list[Any]) -> Any:
        batch = self._collate_fn(examples)
        return dict(batch) if isinstance(batch, Mapping) else batch


class _EpochOfStep(TrainerCallback):
    """Keeps the epoch right where a run was gone on with."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / self._epoch


def _no_steps() -> Generator[Step, None, None]:
    yield from ()


def _binary(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, labels, reduction=reduction)


def _is_causal(model: Any) -> bool:
    while hasattr(model, "get_base_model"):  # of peft
        model = model.get_base_model()
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


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


def _check_loss(model: Any, examples: list[Any], collate_fn: _Plain) -> None:
    """ValueError if `per_example_loss` is not the model's own loss of an example by itself."""
    where = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), undisturbed(model, where, seed=0):
            for example in examples:
                batch = to_device(collate_fn([example]), where)
                if "labels" not in batch:
                    raise ValueError(
                        f"a batch has {', '.join(batch)} and no labels; give loss_fn(model, batch) "
                        "with one loss per example"
                    )
                theirs, ours = model(**batch).loss, float(per_example_loss(model, batch))
                if theirs is not None and not math.isclose(
                    float(theirs), ours, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS
                ):
                    raise ValueError(
                        f"{type(model).__name__} gives an example the loss {float(theirs):.6g}, "
                        f"and per_example_loss {ours:.6g}; give loss_fn(model, batch) with one "
                        "loss per example"
                    )
    finally:
        model.train(training)


class IndividualPrivacy(TrainerCallback):
    """Individual accounting of a `Trainer`'s loop under Opacus, from its start to its end.

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
