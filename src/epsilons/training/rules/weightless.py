"""Operations without weights that loops of ours do faster than torch's kernels.

There is nothing in them to be followed, so they may be left to torch wherever a loop doesn't fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.training.rules import attention as attentions
from epsilons.training.rules import gelu as gelus
from epsilons.training.rules import pooling
from epsilons.training.rules.conv import sizes
from epsilons.training.taps import Node, needs_gradients


class _Attention(Node):
    """Attention over short sequences."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, sums = attentions.attention(q, k, v, scale, causal)
        ctx.save_for_backward(q, k, v, sums)  # not the output, which may be modified in place
        ctx.options = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return (*attentions.attention_back(g, *ctx.saved_tensors, *ctx.options), None, None)


class _Gelu(Node):
    """GELU, which on the way there learns what it needs on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, slope = gelus.gelu(x)
        ctx.save_for_backward(slope)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0]
        return g * slope


class _MaxPool(Node):
    """Max pooling of pictures."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        out, which = pooling.max_pool(x, kernel, stride)
        ctx.save_for_backward(which)
        ctx.walk = x.shape, kernel, stride
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return pooling.max_pool_back(g, *ctx.saved_tensors, *ctx.walk), None, None


def _attention(
    interception: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    heads = query, key, value
    known = all(interception.batch_first(t) for t in heads) and attentions.fits(*heads)
    if not known or attn_mask is not None or dropout_p or enable_gqa or not _alike(*heads):
        return NotImplemented
    if not needs_gradients(*heads) or torch.is_autocast_enabled(interception.device):
        return NotImplemented
    factor = query.shape[3] ** -0.5 if scale is None else float(scale)
    out: Tensor = _Attention.applied(*heads, factor, is_causal).transpose(1, 2)
    interception.mark_rows(out)
    return out


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether sizes agree without being stretched."""
    heads = query.shape[:2] == key.shape[:2] == value.shape[:2]
    return heads and query.shape[3] == key.shape[3] and key.shape[2] == value.shape[2]


def _gelu(
    interception: Any, input: Tensor, approximate: str = "none", out: Tensor | None = None
) -> Any:
    known = interception.batch_first(input) and gelus.fits(input) and needs_gradients(input)
    if not known or approximate != "none" or out is not None:
        return NotImplemented
    value: Tensor = _Gelu.applied(input)
    interception.mark_rows(value)
    return value


def _max_pool2d(
    interception: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel, pads, gaps = (sizes(o, (0, 0)) for o in (kernel_size, padding, dilation))
    steps = sizes(stride, (0, 0)) if stride else kernel
    plain = pads == (0, 0) and gaps == (1, 1) and not (ceil_mode or return_indices)
    if not plain or not interception.batch_first(input) or not pooling.fits(input, kernel):
        return NotImplemented
    if min(steps, default=0) < 1 or len(steps) != 2 or not needs_gradients(input):
        return NotImplemented
    out: Tensor = _MaxPool.applied(input, kernel, steps)
    interception.mark_rows(out)
    return out


WEIGHTLESS: dict[Any, Callable[..., Any]] = {
    F.gelu: _gelu,
    F.max_pool2d: _max_pool2d,
    F.scaled_dot_product_attention: _attention,
}
