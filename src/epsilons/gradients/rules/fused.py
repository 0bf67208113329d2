"""Operations run as one autograd node each: the fewer nodes and calls, the faster.

Normalisations hand over per-example gradients that their backward kernels give at no extra cost;
linear maps and convolutions hand their output gradients to their rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.contractions import Geometry, Sizes
from epsilons.gradients.rules.conv import ChannelBias, Conv, conv, sizes
from epsilons.gradients.rules.linear import linear
from epsilons.gradients.rules.normalization import group_norm, layer_norm
from epsilons.gradients.rules.registry import GradientRule, RuleBuilder

_Deliver = Callable[[Tensor, Tensor], None]
_PRECISE = frozenset({torch.float32, torch.float64})

# Looked up once: between kernels, Python is slow.
_conv_backward = torch.ops.aten.convolution_backward.default
_group_norm_backward = torch.ops.aten.native_group_norm_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class _Linear(torch.autograd.Function):
    """A linear map; in the backward pass its operands go to the rules."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, deliver: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deliver = deliver
        return F.linear(x, weight, bias).detach()  # no view: models modify outputs in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        _, weight = ctx.deliver(ctx, g)
        return (g @ weight if ctx.needs_input_grad[0] else None, *[None] * 4)


class _Conv2d(torch.autograd.Function):
    """A 2-D convolution; in the backward pass its operands go to the rules."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: tuple[Any, ...],
        deliver: Any,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.deliver = options, deliver
        return torch.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.deliver(ctx, g)
        stride, padding, dilation, groups = ctx.options
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _conv_backward(
                g, x, weight, None, stride, padding, dilation, False, [0, 0], groups,
                [True, False, False],
            )[0]  # fmt: skip
        return (dx, *[None] * 5)


class _GroupNorm(torch.autograd.Function):
    """Group norm; in the backward pass the examples are passed to the kernel as channels.

    A batch (N, C) with G groups is (1, N·C) with N·G groups: the same sums, except that the
    kernel no longer adds the examples' scale and shift gradients together.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
        eps: float,
        deliver: _Deliver,
    ) -> Tensor:
        if not (x.is_contiguous() or _pixel_by_pixel(x)):
            x = x.contiguous()
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
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
        dx, scale, shift = _group_norm_backward(
            g.contiguous(),
            x.contiguous(),
            mean.view(1, -1),
            rstd.view(1, -1),
            weight.repeat(n),
            1,
            n * c,
            math.prod(x.shape[2:]),
            n * ctx.groups,
            [ctx.needs_input_grad[0], True, True],
        )
        ctx.deliver(scale.view(n, c), shift.view(n, c))
        return (dx, *[None] * 6)


def _pixel_by_pixel(x: Tensor) -> bool:
    """Whether a kernel takes pictures as they are though their channels come last in memory."""
    return x.is_cpu and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


class _LayerNorm(torch.autograd.Function):
    """Layer norm over the last dimension, with mean μ and reciprocal deviation r per position t.

    ∂/∂γ = Σ_t r_t (x_t − μ_t) g_t,   ∂/∂β = Σ_t g_t
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
        deliver: _Deliver,
    ) -> Tensor:
        out, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.eps, ctx.count, ctx.deliver = eps, count, deliver
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        its = g.reshape(ctx.count, -1, x.shape[-1])
        dx = None
        if ctx.needs_input_grad[0]:
            dx = _layer_norm_backward(
                g, x, x.shape[-1:], mean, rstd, weight, bias, [True, False, False]
            )[0]
        standard = torch.layer_norm(x, x.shape[-1:], eps=ctx.eps).view_as(its)
        ctx.deliver(standard.mul_(its).sum(1), its.sum(1))
        return (dx, *[None] * 6)


def _linear(tracer: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    matrices = input.dim() >= 2 and weight.dim() == 2
    if not matrices or not _applies(tracer, input, weight, bias):
        return NotImplemented
    w, b = _values(weight, bias)
    deliver = _by_rule(tracer, (weight, bias), "linear", lambda x: linear(x, w, b))
    return _rows(tracer, _Linear, input, w, b, deliver)


def _conv2d(
    tracer: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    plain = not isinstance(padding, str) and not tracer.weights.has_closed_form(weight)
    if not plain or not _applies(tracer, input, weight, bias) or input.dim() != 4:
        return NotImplemented
    geometry = _geometry(
        weight.shape[2:], _hashed(stride), _hashed(padding), _hashed(dilation), groups
    )
    options = geometry[1:]

    def rules(x: Tensor) -> Iterable[tuple[Any, GradientRule]]:
        yield weight, Conv(x, geometry)
        if bias is not None:
            yield bias, ChannelBias(channel=0)

    deliver = _by_rule(tracer, (weight, bias), "conv2d", rules)
    return _rows(tracer, _Conv2d, input, *_values(weight, bias), options, deliver)


@functools.lru_cache(4096)
def _geometry(kernel: Sizes, stride: Any, padding: Any, dilation: Any, groups: int) -> Geometry:
    stride, padding, dilation = (sizes(option, kernel) for option in (stride, padding, dilation))
    return Geometry(tuple(kernel), stride, padding, dilation, groups)


def _hashed(option: Any) -> Any:
    return tuple(option) if type(option) is list else option


def _by_rule(
    tracer: Any,
    weights: Sequence[Any],
    name: str,
    build: Callable[[Tensor], Iterable[tuple[Any, GradientRule]]],
) -> Callable[[Any, Tensor], tuple[Tensor, Tensor]]:
    """The function that a node's backward pass calls: it delivers g, and returns input and weight.

    The rule is given rows without the dimension that `batch_dim.examples_first` would add.
    """
    uses = [tracer.expect(w, name) for w in weights if w is not None]

    def deliver(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        try:
            x, weight = ctx.saved_tensors
        except RuntimeError as error:
            path = sorted(root for use in uses if use is not None for root in use.weight.roots)
            raise RuntimeError(
                f"{', '.join(path)}: the input of {name} was modified in place afterwards. "
                "Use the out-of-place operation."
            ) from error
        for use, (_, rule) in zip(uses, build(x.detach()), strict=True):
            tracer.deliver(use, g, rule)
        uses.clear()  # the graph lives until the pass ends; the operands need not
        return x, weight

    return deliver


def _layer_norm(
    tracer: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    applies = _applies(tracer, input, weight, bias) and tracer.count > 0
    if not applies or len(normalized_shape) > 1:
        return NotImplemented
    deliver = _delivery(tracer, weight, bias, "layer_norm")
    options = eps, tracer.count, deliver
    return _rows(tracer, _LayerNorm, input, *_values(weight, bias), *options)


def _values(*weights: Tensor | None) -> list[Any]:
    return [None if w is None else w.detach() for w in weights]


def _rows(tracer: Any, node: type[torch.autograd.Function], input: Tensor, *rest: Any) -> Tensor:
    """A node applied to one row per example, which gives one row per example."""
    out: Tensor = node.apply(input, tracer.anchor, *rest)  # type: ignore[no-untyped-call]
    tracer.data.mark_rows(out)
    return out


def _applies(tracer: Any, input: Tensor, *weights: Tensor | None) -> bool:
    if not tracer.data.batch_first(input) or input.dtype not in _PRECISE:
        return False
    if torch.is_autocast_enabled(tracer.device):
        return False
    known = False
    for weight in weights:
        if weight is not None and weight in tracer.weights:
            known = True
        elif weight is not None and weight.requires_grad:
            return False  # from what can't be traced: the node would swallow its gradient
    return known


def _delivery(tracer: Any, weight: Any, bias: Any, name: str) -> _Deliver:
    uses = [tracer.expect(w, name) for w in (weight, bias)]

    def deliver(scale: Tensor, shift: Tensor) -> None:
        tracer.deliver(uses[0], scale)
        tracer.deliver(uses[1], shift)

    return deliver


def _group_norm(
    tracer: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if weight is None or not _applies(tracer, input, weight, bias):
        return NotImplemented
    deliver = _delivery(tracer, weight, bias, "group_norm")
    options = num_groups, eps, deliver
    return _rows(tracer, _GroupNorm, input, *_values(weight, bias), *options)


# Each with the rule that it stands for: a rule of the user's own comes first.
FUSED: dict[Any, tuple[Callable[..., Any], RuleBuilder]] = {
    F.group_norm: (_group_norm, group_norm),
    F.layer_norm: (_layer_norm, layer_norm),
    F.linear: (_linear, linear),
    torch.conv2d: (_conv2d, conv),
}
