"""Operations made of others, written again in those that have rules; and operations refused.

A composite is called with the tracer, which it enters so as to be traced, and with the
arguments of the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.recurrent import RECURRENT
from epsilons.gradients.rules.registry import UnsupportedLayer, without_autocast


def _embedding_bag(
    tracer: Any,
    /,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    if offsets is not None or input.dim() != 2 or mode == "max":
        raise UnsupportedLayer(
            "embedding_bag with offsets or the maximum has no rule. Use a padded (B, L) batch of "
            'ids with padding_idx, and mode "sum" or "mean".'
        )
    with tracer:
        rows = F.embedding(
            input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
        )
        if per_sample_weights is not None:
            rows = rows * per_sample_weights.unsqueeze(2)
        if padding_idx is None:
            return rows.sum(1) if mode == "sum" else rows.mean(1)
        present = (input != padding_idx % weight.shape[0]).unsqueeze(2)
        total = (rows * present).sum(1)
        return total if mode == "sum" else total / present.sum(1).clamp(min=1)


def _bilinear(
    tracer: Any, /, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    # Autocast leaves the operation alone, but not the linear map that stands for it.
    with without_autocast(weight.device.type), tracer:
        pairs = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
        wide = torch.promote_types(pairs.dtype, weight.dtype)
        return F.linear(pairs.to(wide), weight.flatten(1), bias)


def _refuse_batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> None:
    if training:
        raise UnsupportedLayer(
            "batch_norm in training mode mixes the examples of a batch, so no per-example gradient "
            "exists. Replace it with GroupNorm: epsilons.gradients.replace_batch_norm(model)."
        )


def _refuse_running_statistics(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    *_: Any,
    **__: Any,
) -> None:
    if running_mean is not None and use_input_stats:
        raise UnsupportedLayer(
            "instance_norm keeps running statistics over the examples, which no noise protects. "
            "Use track_running_stats=False."
        )


COMPOSITES: dict[Any, Callable[..., Any]] = {
    **RECURRENT,
    F.embedding_bag: _embedding_bag,
    torch.bilinear: _bilinear,
    F.bilinear: _bilinear,
}
REFUSED: dict[Any, Callable[..., None]] = {
    F.batch_norm: _refuse_batch_norm,
    torch.batch_norm: _refuse_batch_norm,
    F.instance_norm: _refuse_running_statistics,
}
