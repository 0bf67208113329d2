"""A tensor taken apart, whose pieces' gradients are put together without a copy where they can be.

Attention takes queries, keys and values out of one linear map, and has room for their gradients as
they lay there (`room_like`): these, side by side in memory, are the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from epsilons.training.compiled import addressable
from epsilons.training.taps import Node, needs_gradients


class _Pieces(Node):
    """What `unbind`, `chunk` and `split` give: views, none of which may be modified in place."""

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, func: Any, rest: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = func(whole, *rest, **options)
        place = _DIM_AT[func]
        dim = options.get("dim", rest[place] if len(rest) > place else 0)
        ctx.dim, ctx.ranges = dim % whole.dim(), pieces[0].dim() == whole.dim()
        return pieces

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        put_together = torch.cat if ctx.ranges else torch.stack
        view = side_by_side(gradients, ctx.dim)
        if view is None:
            return put_together(gradients, ctx.dim), None, None, None
        return view.flatten(ctx.dim, ctx.dim + 1) if ctx.ranges else view, None, None, None


# Where each has the dimension, after the tensor.
_DIM_AT: dict[Any, int] = {
    torch.unbind: 0, torch.Tensor.unbind: 0,
    torch.chunk: 1, torch.Tensor.chunk: 1,
    torch.split: 1, torch.Tensor.split: 1,
}  # fmt: skip
PIECEWISE = frozenset(_DIM_AT)


def pieces_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same as `func(*args, **kwargs)`, for one that is PIECEWISE."""
    if not args or not _has_pieces(args[0]):
        return func(*args, **kwargs)
    return _Pieces.applied(args[0], func, args[1:], kwargs)


def _has_pieces(whole: Any) -> bool:
    """Whether there is something to take apart, and a way back that torch's nodes alone go."""
    known = isinstance(whole, Tensor) and addressable(whole) and not whole.is_nested
    if not known or not whole.numel() or torch._C._are_functorch_transforms_active():
        return False
    return torch.is_grad_enabled() and needs_gradients(whole)


def side_by_side(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """Tensors stacked along `dim`, as a view; None unless they lie evenly in one memory."""
    first = tensors[0]
    if not all(addressable(t) for t in tensors):
        return None
    memory = first.untyped_storage().data_ptr()
    for t in tensors[1:]:
        alike = t.shape == first.shape and t.stride() == first.stride()
        if not alike or t.untyped_storage().data_ptr() != memory:
            return None
    starts = [t.storage_offset() for t in tensors]
    steps = {int(there - here) for here, there in pairwise(starts)}
    step = min(steps, default=0)
    if len(steps) != 1 or step <= 0:
        return None
    sizes, strides = list(first.shape), list(first.stride())
    sizes.insert(dim, len(tensors))
    strides.insert(dim, step)
    return first.as_strided(sizes, strides)


def room_like(tensors: Sequence[Tensor]) -> Sequence[Tensor] | None:
    """Room for as many tensors, side by side as these are; None if they aren't."""
    view = side_by_side(tensors, 0)
    return None if view is None else torch.empty_like(view).unbind(0)
