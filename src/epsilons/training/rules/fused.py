"""Operations whose own backward kernel gives per-example gradients at no extra cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


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


def _group_norm(
    interception: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    autocast = torch.is_autocast_enabled(input.device.type)
    plain = input.dtype in (torch.float32, torch.float64) and not autocast
    if not plain or not interception.batch_first(input):
        return NotImplemented
    uses = [interception.expect(w, "group_norm") for w in (weight, bias)]

    def deliver(scale: Tensor, shift: Tensor) -> None:
        interception.deliver(uses[0], scale)
        interception.deliver(uses[1], shift)

    values = [None if w is None else w.detach() for w in (weight, bias)]
    out = _GroupNorm.apply(  # type: ignore[no-untyped-call]
        input, interception.anchor, *values, num_groups, eps, deliver
    )
    interception.mark_rows(out)
    return out


FUSED: dict[Any, Callable[..., Any]] = {F.group_norm: _group_norm}
