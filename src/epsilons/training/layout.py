"""Which dimension of a tensor counts the examples.

A batch enters with its examples along dimension 0, but models transpose and flatten: an attention
layer wants (T, B, E), a linear layer (B·T, E). The layout of every tensor that depends on the data
is followed from operation to operation, by position and never by size alone, so that a sequence
as long as the batch is not mistaken for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Function = Callable[..., Any]


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
    if name in _PAIRING and first is not tensor:
        return None  # rows of another operand may come first in what it gives
    if name in _RECURRENT and out.dim() == 3 and out.shape[:-1] != tensor.shape[:-1]:
        return Layout(1) if out.shape[1] == count else None  # a state (layers, examples, …)
    if name in _MOVING:
        return _moved(name, function, args, kwargs, tensor, layout)
    if name in _REDUCING:
        if name == "__getitem__" and layout.dim == 0 and _keeps_first(args[1]):
            return layout
        return _probed(function, args, kwargs, known, out, count)
    if name in _JOINING:
        position = _joined_along(args, kwargs) % out.dim()
        if len({its for _, its in known}) > 1:
            return None
        if name == "stack":
            return Layout(layout.dim + (position <= layout.dim), layout.inner)
        if position == layout.dim and len(known) < len(tensors_in((args, kwargs))):
            return None  # rows that belong to nobody
    if name in EXPANDING:
        place = layout.dim + out.dim() - tensor.dim()
        return None if out.shape[place] % (count * layout.inner) else Layout(place, layout.inner)
    for other, its_layout in known:
        if other.shape == out.shape:
            return its_layout
    if name in ELEMENTWISE:
        return Layout(layout.dim + out.dim() - tensor.dim(), layout.inner)
    if tensor.numel() == out.numel():
        return _reshaped(tensor.shape, layout, out.shape, count)
    if layout.dim >= out.dim() or out.shape[layout.dim] % (count * layout.inner):
        return None
    if out.shape[layout.dim] == tensor.shape[layout.dim] or name in _RESIZING:
        return layout
    return None


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
        part = _index_along(layout.dim, args[1], tensor.dim())
        return isinstance(part, (Tensor, list, np.ndarray)) and not _names_each(part, count)
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


def _index_along(dim: int, index: Any, ndim: int) -> Any:
    """What an index says about one dimension of a tensor; None if nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = [_dims_taken(part) for part in parts]
    at = 0
    for part, dims in zip(parts, taken, strict=True):
        if part is Ellipsis:
            dims = ndim - sum(taken)
        if at <= dim < at + dims:
            return None if part is Ellipsis else part
        at += dims
    return None


def _dims_taken(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if mask else 1


def _names_each(index: Any, count: int) -> bool:
    """Whether an index names every example once, in order."""
    named = torch.as_tensor(index)
    if named.dtype == torch.bool:
        return named.dim() == 1 and bool(named.all())
    if named.dim() == 0 or named.shape[0] != count:
        return False
    order = torch.arange(count, device=named.device).view(-1, *[1] * (named.dim() - 1))
    return bool((named == order).all())


def _reshaped(old: Sequence[int], layout: Layout, new: Sequence[int], count: int) -> Layout | None:
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


def _probed(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, Layout]],
    out: Tensor,
    count: int,
) -> Layout | None:
    stand_ins = {id(tensor): _resized(tensor, layout) for tensor, layout in known}
    tensor, layout = known[0]
    positional, named = _rest(args, kwargs)
    if args and args[0] is tensor and _hashable(positional) and _hashable(named):
        place = _probe_alone(function, stand_ins[id(tensor)].shape, tensor.dtype, positional, named)
    else:
        place = _probe(function, swapped(args, stand_ins), swapped(kwargs, stand_ins))
    if place == _FAILED:
        # An index that names examples one by one: examples stay in front, or the layout is lost.
        in_front = layout == BATCH_FIRST and out.shape[0] == count
        return BATCH_FIRST if in_front else None
    return None if place == _LOST else Layout(place, layout.inner)


def _probe(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    # The operation again, without data, on a batch of another size: the dimension that differs.
    try:
        found = tensors_in(function(*args, **kwargs))
    except (RuntimeError, IndexError, TypeError, NotImplementedError):
        return _FAILED
    return list(found[0].shape).index(_PROBE) if found and _PROBE in found[0].shape else _LOST


@functools.lru_cache(4096)
def _probe_alone(
    function: Function, shape: torch.Size, dtype: torch.dtype, args: Any, kwargs: Any
) -> int:
    return _probe(function, (torch.empty(shape, dtype=dtype, device="meta"), *args), dict(kwargs))


def _hashable(arguments: tuple[Any, ...]) -> bool:
    return not tensors_in(arguments) and not any(
        isinstance(a, (slice, list, dict, np.ndarray))
        or (isinstance(a, tuple) and not _hashable(a))
        for a in arguments
    )


def _keeps_first(index: Any) -> bool:
    return (
        isinstance(index, tuple)
        and index[0] == slice(None)
        and all(isinstance(part, (int, slice)) for part in index)
    )


def _resized(tensor: Tensor, layout: Layout) -> Tensor:
    shape = list(tensor.shape)
    shape[layout.dim] = _PROBE
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return found
    for branch in tree:
        if type(branch) in _LEAVES:
            continue
        if isinstance(branch, Tensor):
            found.append(branch)
        elif isinstance(branch, (list, tuple, dict)):
            found += tensors_in(branch)
    return found


def swapped(tree: Any, replacements: Mapping[int, Tensor]) -> Any:
    """The same nest of lists, tuples and dictionaries with some tensors (by id) replaced."""
    if isinstance(tree, Tensor):
        return replacements.get(id(tree), tree)
    if isinstance(tree, (list, tuple)):
        branches = [b if type(b) in _LEAVES else swapped(b, replacements) for b in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    if isinstance(tree, dict):
        return {key: swapped(branch, replacements) for key, branch in tree.items()}
    return tree


_UNHASHABLE = (slice, list, dict, np.ndarray)
_LEAVES = frozenset({int, float, bool, str, type(None)})


def names(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


_PROBE = 10007  # a size that no other dimension has
_LOST, _FAILED = -1, -2  # what a probe may find instead of a dimension

_PROPERTIES: dict[Any, str] = {
    torch.Tensor.T.__get__: "T",  # type: ignore[attr-defined]
    torch.Tensor.mT.__get__: "mT",  # type: ignore[attr-defined]
    torch.Tensor.H.__get__: "H",  # type: ignore[attr-defined]
    torch.Tensor.mH.__get__: "mH",  # type: ignore[attr-defined]
}
_MOVING = names("T mT H mH t transpose permute swapaxes swapdims movedim moveaxis adjoint")
_REDUCING = names(
    "__getitem__ select unbind sum mean max min amax amin aminmax prod std var std_mean var_mean "
    "argmax argmin any all logsumexp norm vector_norm median mode nansum nanmean count_nonzero "
    "squeeze diagonal einsum"
)
_RESIZING = names("cat concat concatenate chunk split tensor_split narrow repeat tile")
ELEMENTWISE = names(
    "add sub mul div true_divide floor_divide remainder fmod pow where maximum minimum rsub "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __pow__ "
    "__rpow__ eq ne lt le gt ge logical_and logical_or logical_xor __and__ __or__ __xor__ atan2 "
    "lerp masked_fill addcmul addcdiv hypot logaddexp add_ sub_ mul_ div_ masked_fill_ __eq__ "
    "__lt__ __le__ __gt__ __ge__ __ne__ binary_cross_entropy_with_logits"
)
EXPANDING = names("expand expand_as repeat tile broadcast_to")
_JOINING = names("cat concat concatenate stack")
_PAIRING = names("linear tensordot outer ger inner cdist kron")
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
