"""Operations whose own backward kernel gives per-example gradients at no extra cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_OFF_CENTRE = 30.0  # deviations from zero beyond which Σ r(x·g) − Σ rμg would lose two digits


class _GroupNorm(torch.autograd.Function):
    """Group norm; on the way back the examples are handed to the kernel as channels.

    A batch (N, C) with G groups is (1, N·C) with N·G groups: the same sums, except that the
    kernel no longer adds the examples' scale and shift gradients together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        deliver: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        n, c = x.shape[:2]
        out, mean, rstd = torch.native_group_norm(
            x, weight, bias, n, c, math.prod(x.shape[2:]), groups, eps
        )
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.groups, ctx.deliver = groups, deliver
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        n, c = x.shape[:2]
        dx, scale, shift = torch.ops.aten.native_group_norm_backward(
            g.contiguous().view(1, n * c, -1),
            x.contiguous().view(1, n * c, -1),
            mean.view(1, -1),
            rstd.view(1, -1),
            None if weight is None else weight.repeat(n),
            1,
            n * c,
            x[0, 0].numel(),
            n * ctx.groups,
            [ctx.needs_input_grad[0], True, True],
        )
        ctx.deliver(scale.view(n, c), shift.view(n, c))
        return (dx.view(x.shape) if ctx.needs_input_grad[0] else None, *[None] * 6)


class _LayerNorm(torch.autograd.Function):
    """Layer norm over the last dimension, with mean μ and reciprocal deviation r per place t.

        ∂/∂γ = Σ_t r_t (x_t·g_t) − Σ_t r_t μ_t g_t,   ∂/∂β = Σ_t g_t

    Both sums over g are one matrix product; nothing is normalised a second time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        count: int,
        deliver: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.count, ctx.deliver = count, deliver
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.aten.native_layer_norm_backward(
                g, x, x.shape[-1:], mean, rstd, weight, bias, [True, False, False]
            )[0]
        rows, its = x.reshape(ctx.count, -1, x.shape[-1]), g.reshape(ctx.count, -1, x.shape[-1])
        mean, rstd = mean.view(ctx.count, 1, -1), rstd.view(ctx.count, 1, -1)
        if bool((mean * rstd).abs().max() > _OFF_CENTRE):
            scale = torch.bmm(rstd, (rows - mean.mT) * its)
            shift = its.sum(1, keepdim=True)
        else:
            sums = torch.bmm(torch.cat([rstd * mean, torch.ones_like(rstd)], 1), its)
            scale, shift = torch.bmm(rstd, rows * its) - sums[:, :1], sums[:, 1:]
        ctx.deliver(scale.squeeze(1), shift.squeeze(1))
        return (dx, *[None] * 6)


def _layer_norm(
    interception: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not _applies(interception, input) or len(normalized_shape) > 1 or not interception.count:
        return NotImplemented
    deliver = _delivery(interception, weight, bias, "layer_norm")
    values = [None if w is None else w.detach() for w in (weight, bias)]
    out = _LayerNorm.apply(  # type: ignore[no-untyped-call]
        input, interception.anchor, *values, eps, interception.count, deliver
    )
    interception.mark_rows(out)
    return out


def _applies(interception: Any, input: Tensor) -> bool:
    autocast = torch.is_autocast_enabled(input.device.type)
    precise = input.dtype in (torch.float32, torch.float64)
    return precise and not autocast and bool(interception.batch_first(input))


def _delivery(
    interception: Any, weight: Any, bias: Any, name: str
) -> Callable[[Tensor, Tensor], None]:
    uses = [interception.expect(w, name) for w in (weight, bias)]

    def deliver(scale: Tensor, shift: Tensor) -> None:
        interception.deliver(uses[0], scale)
        interception.deliver(uses[1], shift)

    return deliver


def _group_norm(
    interception: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not _applies(interception, input):
        return NotImplemented
    deliver = _delivery(interception, weight, bias, "group_norm")
    values = [None if w is None else w.detach() for w in (weight, bias)]
    out = _GroupNorm.apply(  # type: ignore[no-untyped-call]
        input, interception.anchor, *values, num_groups, eps, deliver
    )
    interception.mark_rows(out)
    return out


FUSED: dict[Any, Callable[..., Any]] = {F.group_norm: _group_norm, F.layer_norm: _layer_norm}
