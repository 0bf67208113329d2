"""Kinds of operations that the tracer tells apart, by function or by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
# The commonest operations that give one row for a row, whatever their options.
ROW_BY_ROW = frozenset(
    {
        torch.relu, torch.sigmoid, torch.tanh, torch.Tensor.relu, torch.Tensor.sigmoid,
        torch.Tensor.tanh, F.elu, F.gelu, F.hardswish, F.leaky_relu, F.mish, F.relu, F.sigmoid,
        F.silu, F.softplus, F.tanh, F.avg_pool2d, F.max_pool2d,
    }
)  # fmt: skip
# They give properties of a tensor, and no tensor.
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

# What an operation does to the batch dimension.
MOVING = names("t transpose permute swapaxes swapdims movedim moveaxis adjoint")
MOVING_PROPERTIES = frozenset(getattr(torch.Tensor, n).__get__ for n in ("T", "mT", "H", "mH"))
RESHAPING = names("view reshape flatten unflatten unsqueeze ravel view_as reshape_as")
PARTING = names("chunk split split_with_sizes narrow")
NORMALISING = names("group_norm layer_norm rms_norm instance_norm batch_norm")
CONVOLVING = names(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"
)  # with the channels along dimension 1
ELEMENTWISE = names(
    "add sub mul div true_divide floor_divide remainder fmod pow where maximum minimum rsub "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __pow__ "
    "__rpow__ eq ne lt le gt ge logical_and logical_or logical_xor __and__ __or__ __xor__ atan2 "
    "lerp masked_fill addcmul addcdiv hypot logaddexp add_ sub_ mul_ div_ masked_fill_ __eq__ "
    "__lt__ __le__ __gt__ __ge__ __ne__ binary_cross_entropy_with_logits"
)
EXPANDING = names("expand expand_as repeat tile broadcast_to")
JOINING = names("cat concat concatenate stack")
RECURRENT = names("lstm gru rnn_tanh rnn_relu")
PICKING = names("nonzero argwhere masked_select unique")
REORDERING: dict[str, tuple[str, int, Any]] = {
    "flip": ("dims", 1, None),
    "flipud": ("dims", 1, 0),
    "roll": ("dims", 2, None),
    "rot90": ("dims", 2, (0, 1)),
    "index_select": ("dim", 1, None),
    "gather": ("dim", 1, None),
    "take_along_dim": ("dim", 2, None),
    "sort": ("dim", 1, -1),
    "argsort": ("dim", 1, -1),
    "msort": ("dim", 1, 0),
}  # the keyword, position and default of the argument that names the dimensions
CONTRACTING = names("matmul bmm mm __matmul__ __rmatmul__ baddbmm")
ROWS_MEET_ROWS = names(
    "__getitem__ __setitem__ gather index_select take_along_dim scatter cross_entropy nll_loss "
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy copy_"
)
WEIGHTED = names(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "embedding embedding_bag group_norm layer_norm rms_norm instance_norm bilinear"
)


def changes(name: str) -> bool:
    """Whether an operation of that name changes its first argument."""
    trailing = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return trailing or name in _ASSIGNING
