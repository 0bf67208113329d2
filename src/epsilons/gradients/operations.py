"""Kinds of operations that a forward pass has to tell apart, by function or by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from epsilons.gradients.batch_dim.layout import names

DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
# The commonest operations that give one row for a row, whatever their options: nothing to ask.
ROW_BY_ROW = frozenset(
    {
        torch.relu, torch.sigmoid, torch.tanh, torch.Tensor.relu, torch.Tensor.sigmoid,
        torch.Tensor.tanh, F.elu, F.gelu, F.hardswish, F.leaky_relu, F.mish, F.relu, F.sigmoid,
        F.silu, F.softplus, F.tanh, F.avg_pool2d, F.max_pool2d,
    }
)  # fmt: skip
# What a tensor is like: no tensor comes out.
INQUIRING = frozenset(getattr(torch.Tensor, name) for name in ("dim", "numel", "size")) | frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("device", "dtype", "ndim", "shape")
)
_ASSIGNING = names(
    "__setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__ __ifloordiv__ __imod__ __ipow__ "
    "__iand__ __ior__ __ixor__ __ilshift__ __irshift__"
)
NEW = frozenset(
    getattr(torch.Tensor, name)
    for name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new")
)
ALIKE = NEW | {torch.Tensor.to, torch.Tensor.type_as}
CASTING = names("to float double half bfloat16 type type_as")
REARRANGING = names(
    "T mT H mH __get__ t transpose permute swapaxes swapdims movedim moveaxis view reshape flatten "
    "unflatten squeeze unsqueeze contiguous clone view_as reshape_as"
)
IN_PLACE: dict[str, Callable[..., Any]] = {
    "add_": torch.add,
    "sub_": torch.sub,
    "mul_": torch.mul,
    "div_": torch.div,
    "addmm_": torch.addmm,
    "addcmul_": torch.addcmul,
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.div,
}


def changes(name: str) -> bool:
    """Whether an operation of that name changes its first argument."""
    trailing = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return trailing or name in _ASSIGNING
