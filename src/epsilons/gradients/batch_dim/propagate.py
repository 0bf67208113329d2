"""Where an operation puts the batch dimension of its inputs.

A batch enters with its examples along dimension 0, but models transpose and flatten: an attention
layer wants (T, B, E), a linear layer (B·T, E). The batch dimension of every tensor that depends on
the data is followed from operation to operation, by position and never by size alone, so that a
sequence as long as the batch is not mistaken for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from epsilons.gradients.batch_dim.dims import BATCH_FIRST, BatchDim
from epsilons.gradients.batch_dim.indexing import (
    index_along,
    indexed_batch_dim,
    is_list,
    names_each,
)
from epsilons.gradients.batch_dim.probing import Function, probed_output
from epsilons.gradients.operations import (
    CONTRACTING,
    CONVOLVING,
    ELEMENTWISE,
    EXPANDING,
    JOINING,
    MOVING,
    MOVING_PROPERTIES,
    NORMALISING,
    PARTING,
    PICKING,
    RECURRENT,
    REORDERING,
    RESHAPING,
    ROWS_MEET_ROWS,
    WEIGHTED,
)
from epsilons.gradients.trees import tensors_in


def output_batch_dim(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[tuple[Tensor, BatchDim | None]],
    out: Tensor,
    count: int,
) -> BatchDim | None:
    """The at of an operation's output, from those of its data inputs; None if it is lost.

    Guarantee: None, or the dimension that carries the examples for every operation that does
    not mix them. (An operation that does is caught by the canary in `checks`.)
    """
    if out.dim() == 0:
        return None
    known = [(tensor, at) for tensor, at in inputs if at is not None]
    if not known:
        return None
    if count == 1:
        return BATCH_FIRST  # every entry belongs to the one example
    tensor, at = known[0]
    name = getattr(function, "__name__", "")
    first = args[0] if args else kwargs.get("input")
    if first is tensor and _reorders(name, args, kwargs, tensor, at, count):
        return None
    if name in RECURRENT and out.dim() == 3:
        if out.shape[:-1] != tensor.shape[:-1]:  # a state (layers, examples, …)
            return BatchDim(1) if out.shape[1] == count else None
        if at.dim == 0 and tensors_in(args[1])[0].shape[:-1] == out.shape[:-1]:
            return None  # output or state: as many layers as examples and places
    if name == "__getitem__":
        return indexed_batch_dim(args, known, out, count)
    if name in JOINING:
        return _joined(name, args, kwargs, known, out)
    if name in PARTING:
        return _parted(name, args, kwargs, known[0], out, count)
    if name in CONVOLVING and at.dim == 1:
        return _convolved(args, kwargs, known, out, count)
    if name == "repeat_interleave":
        return _interleaved(args, kwargs, at, tensor, out)
    if name in EXPANDING:
        place = at.dim + out.dim() - tensor.dim()
        return None if out.shape[place] % (count * at.inner) else BatchDim(place, at.inner)
    if name in ELEMENTWISE:
        met = {(its.dim - t.dim(), its.inner) for t, its in known} if len(known) > 1 else {at}
        return None if len(met) > 1 else BatchDim(at.dim + out.dim() - tensor.dim(), at.inner)
    if name in RESHAPING:
        return _reshaped(tensor.shape, at, out.shape, count)
    alone = name in NORMALISING or len(tensors_in((args, kwargs))) == 1
    moved = name in MOVING or function in MOVING_PROPERTIES
    if tensor.shape == out.shape and first is tensor and alone and not moved:
        return at
    return probed_output(function, args, kwargs, known, out)


def agreeing(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[tuple[Tensor, BatchDim | None]],
) -> bool:
    """Whether an operation on several data inputs leaves each example to itself.

    Asked where one of the batch_dims is a presumption from sizes: False where in doubt.
    """
    name = getattr(function, "__name__", "")
    batch_dims = {at for _, at in inputs}
    if None in batch_dims or name in WEIGHTED:
        return False
    places = {at.dim - tensor.dim() for tensor, at in inputs if at is not None}
    if name in ELEMENTWISE:
        return len(places) == 1
    if name in CONTRACTING:
        return len(places) == 1 and max(places) <= -3
    if name in ROWS_MEET_ROWS:
        return batch_dims == {BATCH_FIRST}
    if name not in JOINING or len(batch_dims) > 1 or len({t.dim() for t, _ in inputs}) > 1:
        return False
    (at,) = batch_dims
    (ndim,) = {tensor.dim() for tensor, _ in inputs}
    along = _joined_along(args, kwargs) % ndim
    return name == "stack" or (at is not None and along != at.dim)


def _joined(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, BatchDim]],
    out: Tensor,
) -> BatchDim | None:
    (at, *others) = {its for _, its in known}
    position = _joined_along(args, kwargs) % out.dim()
    if others:
        return None
    if name == "stack":
        return BatchDim(at.dim + (position <= at.dim), at.inner)
    strangers = len(known) < len(tensors_in((args, kwargs)))  # rows that belong to nobody
    return None if strangers and position == at.dim else at


def _parted(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    data: tuple[Tensor, BatchDim],
    out: Tensor,
    count: int,
) -> BatchDim | None:
    """Parts along a dimension: if along that of the examples, each must begin with the first."""
    tensor, at = data
    if out.shape[at.dim] == tensor.shape[at.dim]:
        return at
    period = count * at.inner
    if name == "narrow":
        start = kwargs.get("start", args[2] if len(args) > 2 else 0)
        return None if start % period or out.shape[at.dim] % period else at
    named = [v for k, v in kwargs.items() if k.startswith("split_size")]
    sizes = named[0] if named else args[1]
    if name != "chunk" and not isinstance(sizes, int) and any(size % period for size in sizes):
        return None
    return None if out.shape[at.dim] % period else at


def _joined_along(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    along: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return along


def _reorders(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensor: Tensor,
    at: BatchDim,
    count: int,
) -> bool:
    """Whether an operation may give an example the place of another."""
    if name in PICKING:
        return True
    if name == "where":
        return len(args) + len(kwargs) == 1  # the places of what is true, in any number
    if name == "__getitem__":
        part = index_along(at.dim, args[1], tensor.dim())
        return is_list(part) and not names_each(part, count)
    if name not in REORDERING:
        return False
    keyword, position, default = REORDERING[name]
    given = kwargs.get(keyword, args[position] if len(args) > position else default)
    if given is None:
        return True  # through the flattened tensor
    if name == "flip" and isinstance(given, int):
        given = args[1:] if len(args) > 1 else (given,)
    dims = (given,) if isinstance(given, int) else given
    return at.dim in {d % tensor.dim() for d in dims}


def _convolved(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, BatchDim]],
    out: Tensor,
    count: int,
) -> BatchDim | None:
    """Examples side by side as channels: each keeps to its own, if there is a group for it."""
    (tensor, at), *others = known
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    alone = groups % count == 0 and at.inner * count == tensor.shape[1]
    rows = all(its.dim == 0 and its.inner * count == other.shape[0] for other, its in others)
    return BatchDim(1, out.shape[1] // count) if alone and rows else None


def _interleaved(
    args: Sequence[Any], kwargs: Mapping[str, Any], at: BatchDim, tensor: Tensor, out: Tensor
) -> BatchDim | None:
    """Every entry of a dimension several times over, and as often as any other."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    if not isinstance(repeats, int) or out.dim() != tensor.dim():
        return None
    old, new = tensor.shape[at.dim], out.shape[at.dim]
    return at if new == old else BatchDim(at.dim, at.inner * (new // old))


def _reshaped(old: Sequence[int], at: BatchDim, new: Sequence[int], count: int) -> BatchDim | None:
    if 0 in old:
        kept = slice(at.dim + 1)
        return at if tuple(old[kept]) == tuple(new[kept]) else None
    # In row-major order the example index advances every `stride` entries, before and after.
    stride = at.inner * math.prod(old[at.dim + 1 :])
    below = 1
    for dim in range(len(new) - 1, -1, -1):
        above = below * new[dim]
        if below <= stride and above >= stride * count and stride % below == 0:
            inner = stride // below
            return BatchDim(dim, inner) if new[dim] % (inner * count) == 0 else None
        below = above
    return None
