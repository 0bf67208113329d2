"""What operations did to the dimension of the examples, remembered from pass to pass.

Finding it out takes longer than many an operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epsilons.gradients.batch_dim.dims import BatchDim

Known = tuple[
    "weakref.ref[Tensor]", BatchDim | None, bool
]  # a tensor, its batch_dim; a guess or not
CacheKey = tuple[Any, ...]
CachedDims = list[tuple[torch.Size, BatchDim | None]]  # shapes and batch_dims of what comes out

_MOST = 2**14  # batches vary in size
_cache: dict[CacheKey, CachedDims] = {}


def cache_key(
    func: Any, args: Any, kwargs: Any, count: int, data: Mapping[int, Known]
) -> CacheKey | None:
    """An operation on data as far as batch_dims depend on it; None where they may on more.

    `data` is what is known of tensors, by id.
    """
    key = [func, count]
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            entry = data.get(id(arg))
            if entry is None or entry[2] or entry[0]() is not arg:
                return None
            key += arg.shape, entry[1]
        elif type(arg) in _PLAIN or _all_plain(arg):
            key.append(arg)
        else:
            return None
    if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor):
        return None  # where an index of tensors leads depends on its numbers
    return (*key, tuple(kwargs))


def lookup(key: CacheKey) -> CachedDims | None:
    return _cache.get(key)


def store(key: CacheKey, cached: CachedDims) -> None:
    if len(_cache) >= _MOST:
        _cache.clear()
    _cache[key] = cached


def _all_plain(arg: Any) -> bool:
    return type(arg) is tuple and all(type(part) in _PLAIN for part in arg)


_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        type(Ellipsis),
        torch.device,
        torch.dtype,
        torch.memory_format,
    }
)
