"""What an index says about the dimension that carries the examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def index_along(dim: int, index: Any, ndim: int) -> Any:
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


def is_list(part: Any) -> bool:
    """Whether a part of an index names places one by one."""
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


def keeps_first(index: Any) -> bool:
    """Whether an index leaves the first dimension as it is, and in front."""
    return (
        isinstance(index, tuple)
        and index[0] == slice(None)
        and all(isinstance(part, (int, slice)) for part in index)
    )


def place_of_lists(index: Any) -> int | None:
    """Where the first dimension that lists of places leave stands in the result; None if unsure.

    In the place of the first list, or in front if something else stands between the lists. Torch
    takes whole numbers out beforehand.
    """
    parts = [p for p in index if type(p) is not int] if isinstance(index, tuple) else [index]
    lists = [place for place, part in enumerate(parts) if is_list(part)]
    listed = [torch.as_tensor(parts[place]) for place in lists]
    others = all(is_list(part) or isinstance(part, slice) for part in parts)
    alike = len({named.dim() for named in listed}) == 1
    if not others or not alike or any(named.dtype == torch.bool for named in listed):
        return None
    return lists[0] if lists[-1] - lists[0] + 1 == len(lists) else 0


def aligned(part: slice, size: int, period: int) -> bool:
    """Whether a slice of a dimension takes whole periods of it, from the start of one."""
    start, stop, step = part.indices(size)
    return step == 1 and start < stop and start % period == (stop - start) % period == 0
