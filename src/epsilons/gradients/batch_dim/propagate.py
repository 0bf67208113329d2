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
    """The batch dimension of an operation's output; None if it is lost.

    `inputs`: its data inputs and their batch dimensions.

    Guarantee: None, or the dimension that carries the examples for every operation that does
    not mix them. (An operation that does is caught by the canary in `model_checks`.)
    """
    if out.dim() == 0:
        return None
    known = [(tensor, batch) for tensor, batch in inputs if batch is not None]
    if not known:
        return None
    if count == 1:
        return BATCH_FIRST  # every entry belongs to the one example
    tensor, batch = known[0]
    name = getattr(function, "__name__", "")
    first = args[0] if args else kwargs.get("input")
    if first is tensor and _reorders(name, args, kwargs, tensor, batch, count):
        return None
    if name in RECURRENT and out.dim() == 3:
        if out.shape[:-1] != tensor.shape[:-1]:  # a state (layers, examples, …)
            return BatchDim(1) if out.shape[1] == count else None
        if batch.dim == 0 and tensors_in(args[1])[0].shape[:-1] == out.shape[:-1]:
            return None  # output or state: as many layers as examples and positions
    if name == "__getitem__":
        return indexed_batch_dim(args, known, out, count)
    if name in JOINING:
        return _joined(name, args, kwargs, known, out)
    if name in PARTING:
        return _parted(name, args, kwargs, known[0], out, count)
    if name in CONVOLVING and batch.dim == 1:
        return _convolved(args, kwargs, known, out, count)
    if name == "repeat_interleave":
        return _interleaved(args, kwargs, batch, tensor, out)
    if name in EXPANDING:
        dim = batch.dim + out.dim() - tensor.dim()
        return None if out.shape[dim] % (count * batch.inner) else BatchDim(dim, batch.inner)
    if name in ELEMENTWISE:
        met = (
            {(other_batch.dim - t.dim(), other_batch.inner) for t, other_batch in known}
            if len(known) > 1
            else {batch}
        )
        return None if len(met) > 1 else BatchDim(batch.dim + out.dim() - tensor.dim(), batch.inner)
    if name in RESHAPING:
        return _reshaped(tensor.shape, batch, out.shape, count)
    alone = name in NORMALISING or len(tensors_in((args, kwargs))) == 1
    moved = name in MOVING or function in MOVING_PROPERTIES
    if tensor.shape == out.shape and first is tensor and alone and not moved:
        return batch
    return probed_output(function, args, kwargs, known, out)


def agreeing(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[tuple[Tensor, BatchDim | None]],
) -> bool:
    """Whether an operation on several data inputs leaves each example to itself.

    Called where one of the batch dimensions is presumed from sizes: False where in doubt.
    """
    name = getattr(function, "__name__", "")
    batch_dims = {batch for _, batch in inputs}
    if None in batch_dims or name in WEIGHTED:
        return False
    from_behind = {batch.dim - tensor.dim() for tensor, batch in inputs if batch is not None}
    if name in ELEMENTWISE:
        return len(from_behind) == 1
    if name in CONTRACTING:
        return len(from_behind) == 1 and max(from_behind) <= -3
    if name in ROWS_MEET_ROWS:
        return batch_dims == {BATCH_FIRST}
    if name not in JOINING or len(batch_dims) > 1 or len({t.dim() for t, _ in inputs}) > 1:
        return False
    (batch,) = batch_dims
    (ndim,) = {tensor.dim() for tensor, _ in inputs}
    along = _joined_along(args, kwargs) % ndim
    return name == "stack" or (batch is not None and along != batch.dim)


def _joined(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, BatchDim]],
    out: Tensor,
) -> BatchDim | None:
    (batch, *others) = {other_batch for _, other_batch in known}
    position = _joined_along(args, kwargs) % out.dim()
    if others:
        return None
    if name == "stack":
        return BatchDim(batch.dim + (position <= batch.dim), batch.inner)
    constants = len(known) < len(tensors_in((args, kwargs)))  # rows of no example
    return None if constants and position == batch.dim else batch


def _parted(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    data: tuple[Tensor, BatchDim],
    out: Tensor,
    count: int,
) -> BatchDim | None:
    """Parts along a dimension: if along that of the examples, each must begin with the first."""
    tensor, batch = data
    if out.shape[batch.dim] == tensor.shape[batch.dim]:
        return batch
    period = count * batch.inner
    if name == "narrow":
        start = kwargs.get("start", args[2] if len(args) > 2 else 0)
        return None if start % period or out.shape[batch.dim] % period else batch
    named = [v for k, v in kwargs.items() if k.startswith("split_size")]
    sizes = named[0] if named else args[1]
    if name != "chunk" and not isinstance(sizes, int) and any(size % period for size in sizes):
        return None
    return None if out.shape[batch.dim] % period else batch


def _joined_along(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    along: int = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    return along


def _reorders(
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensor: Tensor,
    batch: BatchDim,
    count: int,
) -> bool:
    """Whether an operation may move an example to the position of another."""
    if name in PICKING:
        return True
    if name == "where":
        return len(args) + len(kwargs) == 1  # the positions of what is true, in any number
    if name == "__getitem__":
        part = index_along(batch.dim, args[1], tensor.dim())
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
    return batch.dim in {d % tensor.dim() for d in dims}


def _convolved(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, BatchDim]],
    out: Tensor,
    count: int,
) -> BatchDim | None:
    """Examples side by side as channels: they stay apart if each has a group of its own."""
    (tensor, batch), *others = known
    groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
    alone = groups % count == 0 and batch.inner * count == tensor.shape[1]
    rows = all(
        other_batch.dim == 0 and other_batch.inner * count == other.shape[0]
        for other, other_batch in others
    )
    return BatchDim(1, out.shape[1] // count) if alone and rows else None


def _interleaved(
    args: Sequence[Any], kwargs: Mapping[str, Any], batch: BatchDim, tensor: Tensor, out: Tensor
) -> BatchDim | None:
    """Every entry of a dimension several times over, and as often as any other."""
    repeats = kwargs.get("repeats", args[1] if len(args) > 1 else None)
    if not isinstance(repeats, int) or out.dim() != tensor.dim():
        return None
    old, new = tensor.shape[batch.dim], out.shape[batch.dim]
    return batch if new == old else BatchDim(batch.dim, batch.inner * (new // old))


def _reshaped(
    old: Sequence[int], batch: BatchDim, new: Sequence[int], count: int
) -> BatchDim | None:
    if 0 in old:
        kept = slice(batch.dim + 1)
        return batch if tuple(old[kept]) == tuple(new[kept]) else None
    # In row-major order the example index advances every `stride` entries, before and after.
    stride = batch.inner * math.prod(old[batch.dim + 1 :])
    below = 1
    for dim in range(len(new) - 1, -1, -1):
        above = below * new[dim]
        if below <= stride and above >= stride * count and stride % below == 0:
            inner = stride // below
            return BatchDim(dim, inner) if new[dim] % (inner * count) == 0 else None
        below = above
    return None
