"""The batch dimension of what an index takes out of a tensor, or puts into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from epsilons.gradients.batch_dim.dims import BATCH_FIRST, BatchDim
from epsilons.gradients.batch_dim.probing import probed_output


def indexed_batch_dim(
    args: Sequence[Any], known: Sequence[tuple[Tensor, BatchDim]], out: Tensor, count: int
) -> BatchDim | None:
    (tensor, batch), index = known[0], args[1]
    if batch.dim == 0 and _keeps_first(index):
        return batch
    part = index_along(batch.dim, index, tensor.dim()) if args[0] is tensor else None
    if isinstance(part, slice) and part != slice(None):
        if not _aligned(part, tensor.shape[batch.dim], count * batch.inner):
            return None
        parts = index if isinstance(index, tuple) else (index,)
        index = tuple(slice(None) if its is part else its for its in parts)
    elif is_list(part):  # it names every example once, in order
        dim = _gathered_dim(index)
        return None if dim is None or batch.inner > 1 else BatchDim(dim)
    found = probed_output(torch.Tensor.__getitem__, (args[0], index), {}, known, out)
    alone = isinstance(index, tuple) and sum(map(is_list, index)) == 1
    if found is None and batch.dim == 0 and part == slice(None) and alone:
        return batch  # a mask of positions: how many it leaves can't be told without data
    return found


def assigned_batch_dim(
    target: Tensor, index: Any, value: Tensor, its: BatchDim, known: BatchDim | None, count: int
) -> BatchDim | None:
    """The batch_dim of a tensor after target[index] = value, from the value's; None if it is lost.

    `known` is the target's batch_dim before, or None if it held no data.
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
    dim = its.dim + len(left) - value.dim()
    if dim < 0:
        return None
    found = BatchDim(left[dim] - 2, its.inner)
    covered = target[index].shape[dim] == target.shape[found.dim] == value.shape[its.dim]
    return found if covered and known in (None, found) else None


def index_along(dim: int, index: Any, ndim: int) -> Any:
    """What an index says about one dimension of a tensor; None if nothing."""
    parts = index if isinstance(index, tuple) else (index,)
    taken = [_dims_taken(part) for part in parts]
    start = 0
    for part, dims in zip(parts, taken, strict=True):
        if part is Ellipsis:
            dims = ndim - sum(taken)
        if start <= dim < start + dims:
            return None if part is Ellipsis else part
        start += dims
    return None


def _dims_taken(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    mask = isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)
    return part.dim() if mask else 1


def is_list(part: Any) -> bool:
    """Whether a part of an index names positions one by one."""
    return isinstance(part, (Tensor, list, np.ndarray))


def names_each(index: Any, count: int) -> bool:
    """Whether an index names every example once, in order."""
    named = torch.as_tensor(index)
    if named.dtype == torch.bool:
        return named.dim() == 1 and bool(named.all())
    if named.dim() == 0 or named.shape[0] != count:
        return False
    order = torch.arange(count, device=named.device).view(-1, *[1] * (named.dim() - 1))
    return bool((named == order).all())


def _keeps_first(index: Any) -> bool:
    """Whether an index leaves the first dimension as it is, and in front."""
    return (
        isinstance(index, tuple)
        and index[0] == slice(None)
        and all(isinstance(part, (int, slice)) for part in index)
    )


def _gathered_dim(index: Any) -> int | None:
    """The dimension of the result that lists of positions are gathered in; None if unsure.

    It is that of the first list, or 0 if something else stands between the lists. Torch takes whole
    numbers out beforehand.
    """
    parts = [p for p in index if type(p) is not int] if isinstance(index, tuple) else [index]
    lists = [dim for dim, part in enumerate(parts) if is_list(part)]
    listed = [torch.as_tensor(parts[dim]) for dim in lists]
    others = all(is_list(part) or isinstance(part, slice) for part in parts)
    alike = len({named.dim() for named in listed}) == 1
    if not others or not alike or any(named.dtype == torch.bool for named in listed):
        return None
    return lists[0] if lists[-1] - lists[0] + 1 == len(lists) else 0


def _aligned(part: slice, size: int, period: int) -> bool:
    """Whether a slice of a dimension takes whole periods of it, from the start of one."""
    start, stop, step = part.indices(size)
    return step == 1 and start < stop and start % period == (stop - start) % period == 0
