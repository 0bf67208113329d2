"""Which dimension of a tensor counts the examples.

A batch enters with its examples along dimension 0, but models transpose and flatten: an attention
layer wants (T, B, E), a linear layer (B·T, E). The layout of every tensor that depends on the data
is followed from operation to operation, by position and never by size alone, so that a sequence
as long as the batch is not mistaken for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epsilons.gradients.batch_dim.indexing import (
    aligned,
    index_along,
    is_list,
    keeps_first,
    names_each,
    place_of_lists,
)
from epsilons.gradients.batch_dim.probing import FAILED, Function, probed
from epsilons.gradients.trees import tensors_in


class Layout(NamedTuple):
    """Dimension `dim` is (outer, examples, inner) flattened; plain batches have inner = 1."""

    dim: int
    inner: int = 1


BATCH_FIRST = Layout(0)


def examples_first(tensor: Tensor, layout: Layout, count: int) -> Tensor:
    """A view or copy (B, …) whose row i is the tensor as the operation would see it for example i.

    The row keeps every dimension of the original; the one that counted examples has the
    outer · inner entries that belong to one example (1 for plain batches).
    """
    dim, inner = layout
    if dim == 0 and tensor.shape[0] == count:
        return tensor.unsqueeze(1)
    outer = tensor.shape[dim] // (count * inner)
    split = torch.unflatten(tensor, dim, (outer, count, inner)).movedim(dim + 1, 0)
    return split.flatten(dim + 1, dim + 2)


def examples_back(rows: Tensor, layout: Layout, shape: Sequence[int]) -> Tensor:
    """The inverse of `examples_first`: rows (B, …) put back into a tensor of the given shape."""
    dim, inner = layout
    outer = shape[dim] // (len(rows) * inner)
    split = torch.unflatten(rows, dim + 1, (outer, inner)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2)


def output_layout(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[tuple[Tensor, Layout | None]],
    out: Tensor,
    count: int,
) -> Layout | None:
    """The layout of an operation's output, from those of its data inputs; None if it is lost.

    Guarantee: None, or the dimension that carries the examples for every operation that does
    not mix them. (An operation that does is caught by the canary in `checks`.)
    """
    if out.dim() == 0:
        return None
    known = [(tensor, layout) for tensor, layout in inputs if layout is not None]
    if not known:
        return None
    if count == 1:
        return BATCH_FIRST  # every entry belongs to the one example
    tensor, layout = known[0]
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = _PROPERTIES.get(function, "")
    first = args[0] if args else kwargs.get("input")
    if first is tensor and _reorders(name, args, kwargs, tensor, layout, count):
        return None
    if name in _RECURRENT and out.dim() == 3:
        if out.shape[:-1] != tensor.shape[:-1]:  # a state (layers, examples, …)
            return Layout(1) if out.shape[1] == count else None
        if layout.dim == 0 and tensors_in(args[1])[0].shape[:-1] == out.shape[:-1]:
            return None  # output or state: as many layers as examples and places
    if name in _MOVING:
        return _moved(name, function, args, kwargs, tensor, layout)
    if name == "__getitem__":
        return _indexed(args, known, out, count)
    if name in _JOINING:
        return _joined(name, args, kwargs, known, out)
    if name in _PARTING:
        return _parted(name, args, kwargs, known[0], out, count)
    if name in _CONVOLVING and layout.dim == 1:
        return _convolved(args, kwargs, known, out, count)
    if name == "repeat_interleave":
        return _interleaved(args, kwargs, layout, tensor, out)
    if name in EXPANDING:
        place = layout.dim + out.dim() - tensor.dim()
        return None if out.shape[place] % (count * layout.inner) else Layout(place, layout.inner)
    if name in ELEMENTWISE:
        met = {(its.dim - t.dim(), its.inner) for t, its in known} if len(known) > 1 else {layout}
        return None if len(met) > 1 else Layout(layout.dim + out.dim() - tensor.dim(), layout.inner)
    if name in _RESHAPING:
        return _reshaped(tensor.shape, layout, out.shape, count)
    alone = name in _NORMALISING or len(tensors_in((args, kwargs))) == 1
    if tensor.shape == out.shape and first is tensor and alone:
        return layout
    return _followed(function, args, kwargs, known, out)


def agreeing(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[tuple[Tensor, Layout | None]],
) -> bool:
    """Whether an operation on several data inputs leaves each example to itself.

    Asked where one of the layouts is a presumption from sizes: False where in doubt.
    """
    name = getattr(function, "__name__", "")
    layouts = {layout for _, layout in inputs}
    if None in layouts or name in _WEIGHTED:
        return False
    places = {layout.dim - tensor.dim() for tensor, layout in inputs if layout is not None}
    if name in ELEMENTWISE:
        return len(places) == 1
    if name in _CONTRACTING:
        return len(places) == 1 and max(places) <= -3
    if name in _ROW_BY_ROW:
        return layouts == {BATCH_FIRST}
    if name not in _JOINING or len(layouts) > 1 or len({t.dim() for t, _ in inputs}) > 1:
        return False
    (layout,) = layouts
    (ndim,) = {tensor.dim() for tensor, _ in inputs}
    along = _joined_along(args, kwargs) % ndim
    return name == "stack" or (layout is not None and along != layout.dim)


def assigned_layout(
    target: Tensor, index: Any, value: Tensor, its: Layout, known: Layout | None, count: int
) -> Layout | None:
    """The layout of a tensor after target[index] = value, from the value's; None if it is lost.

    `known` is the target's layout before, or None if it held no data.
    """
    if count == 1:
        return BATCH_FIRST
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or type(part) in (int, slice) for part in parts):
        first = index_along(0, index, target.dim())
        rows = its == known == BATCH_FIRST and value.shape[0] == count
        return known if rows and is_list(first) and names_each(first, count) else None
    # Each dimension gets a size of its own, so that what is left tells where it comes from.
    labelled = torch.empty(*range(2, target.dim() + 2), device="meta")
    whole: dict[type, Any] = {int: 0, slice: slice(None)}
    left = labelled[tuple(whole.get(type(part), part) for part in parts)].shape
    place = its.dim + len(left) - value.dim()
    if place < 0:
        return None
    found = Layout(left[place] - 2, its.inner)
    covered = target[index].shape[place] == target.shape[found.dim] == value.shape[its.dim]
    return found if covered and known in (None, found) else None


def _joined(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, Layout]],
    out: Tensor,
) -> Layout | None:
    (layout, *others) = {its for _, its in known}
    position = _joined_along(args, kwargs) % out.dim()
    if others:
        return None
    if name == "stack":
        return Layout(layout.dim + (position <= layout.dim), layout.inner)
    strangers = len(known) < len(tensors_in((args, kwargs)))  # rows that belong to nobody
    return None if strangers and position == layout.dim else layout


def _parted(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    data: tuple[Tensor, Layout],
    out: Tensor,
    count: int,
) -> Layout | None:
    """Parts along a dimension: if along that of the examples, each must begin with the first."""
    tensor, layout = data
    if out.shape[layout.dim] == tensor.shape[layout.dim]:
        return layout
    period = count * layout.inner
    if name == "narrow":
        start = kwargs.get("start", args[2] if len(args) > 2 else 0)
        return None if start % period or out.shape[layout.dim] % period else layout
    named = [v for k, v in kwargs.items() if k.startswith("split_size")]
    sizes = named[0] if named else args[1]
    if name != "chunk" and not isinstance(sizes, int) and any(size % period for size in sizes):
        return None
    return None if out.shape[layout.dim] % period else layout


def _joined_along(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    along: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return along


def _reorders(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensor: Tensor,
    layout: Layout,
    count: int,
) -> bool:
    """Whether an operation may give an example the place of another."""
    if name in _PICKING:
        return True
    if name == "where":
        return len(args) + len(kwargs) == 1  # the places of what is true, in any number
    if name == "__getitem__":
        part = index_along(layout.dim, args[1], tensor.dim())
        return is_list(part) and not names_each(part, count)
    if name not in _REORDERING:
        return False
    keyword, position, default = _REORDERING[name]
    given = kwargs.get(keyword, args[position] if len(args) > position else default)
    if given is None:
        return True  # through the flattened tensor
    if name == "flip" and isinstance(given, int):
        given = args[1:] if len(args) > 1 else (given,)
    dims = (given,) if isinstance(given, int) else given
    return layout.dim in {d % tensor.dim() for d in dims}


def _indexed(
    args: Sequence[Any], known: Sequence[tuple[Tensor, Layout]], out: Tensor, count: int
) -> Layout | None:
    (tensor, layout), index = known[0], args[1]
    if layout.dim == 0 and keeps_first(index):
        return layout
    part = index_along(layout.dim, index, tensor.dim()) if args[0] is tensor else None
    if isinstance(part, slice) and part != slice(None):
        if not aligned(part, tensor.shape[layout.dim], count * layout.inner):
            return None
        parts = index if isinstance(index, tuple) else (index,)
        index = tuple(slice(None) if its is part else its for its in parts)
    elif is_list(part):  # it names every example once, in order
        place = place_of_lists(index)
        return None if place is None or layout.inner > 1 else Layout(place)
    found = _followed(torch.Tensor.__getitem__, (args[0], index), {}, known, out)
    alone = isinstance(index, tuple) and sum(map(is_list, index)) == 1
    if found is None and layout.dim == 0 and part == slice(None) and alone:
        return layout  # a mask of places: how many it leaves can't be told without data
    return found


def _convolved(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, Layout]],
    out: Tensor,
    count: int,
) -> Layout | None:
    """Examples side by side as channels: each keeps to its own, if there is a group for it."""
    (tensor, layout), *others = known
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    alone = groups % count == 0 and layout.inner * count == tensor.shape[1]
    rows = all(its.dim == 0 and its.inner * count == other.shape[0] for other, its in others)
    return Layout(1, out.shape[1] // count) if alone and rows else None


def _interleaved(
    args: Sequence[Any], kwargs: Mapping[str, Any], layout: Layout, tensor: Tensor, out: Tensor
) -> Layout | None:
    """Every entry of a dimension several times over, and as often as any other."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    if not isinstance(repeats, int) or out.dim() != tensor.dim():
        return None
    old, new = tensor.shape[layout.dim], out.shape[layout.dim]
    return layout if new == old else Layout(layout.dim, layout.inner * (new // old))


def _reshaped(old: Sequence[int], layout: Layout, new: Sequence[int], count: int) -> Layout | None:
    if 0 in old:
        kept = slice(layout.dim + 1)
        return layout if tuple(old[kept]) == tuple(new[kept]) else None
    # In row-major order the example index advances every `stride` entries, before and after.
    stride = layout.inner * math.prod(old[layout.dim + 1 :])
    below = 1
    for dim in range(len(new) - 1, -1, -1):
        above = below * new[dim]
        if below <= stride and above >= stride * count and stride % below == 0:
            inner = stride // below
            return Layout(dim, inner) if new[dim] % (inner * count) == 0 else None
        below = above
    return None


def _moved(
    name: str,
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensor: Tensor,
    layout: Layout,
) -> Layout:
    return Layout(
        _permutation(name, function, tensor.dim(), *_rest(args, kwargs))[layout.dim], layout.inner
    )


def _rest(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    positional = tuple(tuple(a) if isinstance(a, list) else a for a in args[1:])
    named = tuple(
        (k, tuple(v) if isinstance(v, list) else v) for k, v in kwargs.items() if k != "input"
    )
    return positional, named


@functools.cache
def _permutation(
    name: str, function: Function, dims: int, args: Any, kwargs: Any
) -> dict[int, int]:
    # Each dimension gets a size of its own, so that the result's shape tells where it went.
    labelled = torch.empty(*range(2, dims + 2), device="meta")
    shape = function(labelled, *args, **dict(kwargs)).shape
    return {size - 2: place for place, size in enumerate(shape)}


def _followed(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, Layout]],
    out: Tensor,
) -> Layout | None:
    """The operation again, without data, on a batch of another size: the dimension that differs."""
    (tensor, layout), others = known[0], tensors_in((args, kwargs))
    dims = {id(t): its.dim for t, its in known}
    place = probed(function, args, kwargs, dims, others, out)
    if place == FAILED and len(others) == 1 and layout.dim < out.dim():
        kept = out.shape[layout.dim] == tensor.shape[layout.dim]
        return layout if kept else None
    if place < 0:  # what was repeated for the batch, a weight or an index, goes along with it
        dim = layout.dim
        long = slice(dim, dim + 1)
        alike = {id(t): dim for t in others if t.shape[long] == tensor.shape[long]}
        place = probed(function, args, kwargs, alike | dims, others, out)
    return Layout(place, layout.inner) if place >= 0 else None


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_PROPERTIES: dict[Any, str] = {
    torch.Tensor.T.__get__: "T",  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__: "mT",  # type: ignore[attr-defined]
    torch.Tensor.H.__get__: "H",  # type: ignore[attr-defined]
    torch.Tensor.mH.__get__: "mH",  # type: ignore[attr-defined]
}
_MOVING = names("T mT H mH t transpose permute swapaxes swapdims movedim moveaxis adjoint")
_RESHAPING = names("view reshape flatten unflatten unsqueeze ravel view_as reshape_as")
_PARTING = names("chunk split split_with_sizes narrow")
_NORMALISING = names("group_norm layer_norm rms_norm instance_norm batch_norm")
_CONVOLVING = names(
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
_JOINING = names("cat concat concatenate stack")
_RECURRENT = names("lstm gru rnn_tanh rnn_relu")
_PICKING = names("nonzero argwhere masked_select unique")
_REORDERING: dict[str, tuple[str, int, Any]] = {
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
}  # the keyword, place and default of the dimensions along which they do
_CONTRACTING = names("matmul bmm mm __matmul__ __rmatmul__ baddbmm")
_ROW_BY_ROW = names(
    "__getitem__ __setitem__ gather index_select take_along_dim scatter cross_entropy nll_loss "
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy copy_"
)
_WEIGHTED = names(
    "linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d "
    "embedding embedding_bag group_norm layer_norm rms_norm instance_norm bilinear"
)
