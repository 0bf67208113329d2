"""The loss of a transformers model for each example, and whether it is the model's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from epsilons.gradients.isolation import undisturbed
from epsilons.training.evaluation import to_device

_NO_LABEL = -100  # labels of tokens that don't count
_SAME_LOSS = 1e-2  # relative: bfloat16 has three digits
_OWN = "give loss_fn(model, batch) with one loss per example"


def per_example_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss of a transformers model with labels, one per example (B,).

    Classification, regression and several labels as the model has it; of tokens (causal, masked,
    sequence to sequence, token classification) the mean over the example's own that have a label.
    `model`: one of transformers. `batch`: what its collator gives, with `labels`.
    """
    config: Any = model.config
    inputs, labels = dict(batch), batch["labels"]
    if not getattr(config, "is_encoder_decoder", False):  # else they are the decoder's input too
        del inputs["labels"]  # the model's own loss is a mean over the batch
    logits = model(**inputs).logits.float()
    if logits.dim() == 2:
        return _of_labels(logits, labels, getattr(config, "problem_type", None))
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; "
            + _OWN
        )
    if _is_causal(model):
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=_NO_LABEL, reduction="none"
    )
    mean: Tensor = losses.sum(1) / (labels != _NO_LABEL).sum(1).clamp(min=1)
    return mean


def expect_own_loss(
    model: Any, examples: Sequence[Any], collate_fn: Callable[[list[Any]], Any]
) -> None:
    """ValueError if `per_example_loss` is not the model's own loss of an example by itself."""
    if not hasattr(model, "config"):
        raise ValueError(f"{type(model).__name__} is no model of transformers; {_OWN}")
    where = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), undisturbed(model, where, seed=0):
            for example in examples:
                batch = to_device(collate_fn([example]), where)
                if "labels" not in batch:
                    raise ValueError(f"a batch has {', '.join(batch)} and no labels; {_OWN}")
                theirs, ours = model(**batch).loss, float(per_example_loss(model, batch))
                # an example may have no token that counts
                if theirs is not None and theirs.isfinite() and not _close(float(theirs), ours):
                    raise ValueError(
                        f"{type(model).__name__} gives an example the loss {float(theirs):.6g}, "
                        f"and per_example_loss {ours:.6g}; {_OWN}"
                    )
    finally:
        model.train(training)


def _of_labels(logits: Tensor, labels: Tensor, problem: str | None) -> Tensor:
    """Losses (B,) of logits (B, outputs), for one label each or as many as there are outputs."""
    if problem == "regression" or (problem is None and logits.shape[1] == 1):
        losses = F.mse_loss(logits, labels.float().reshape(logits.shape), reduction="none")
    elif labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    else:
        losses = F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none")
    return losses.mean(1)


def _is_causal(model: Any) -> bool:
    while hasattr(model, "get_base_model"):  # of peft
        model = model.get_base_model()
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS)
