"""Batch dimensions of outputs, cached by operation and shapes from pass to pass.

Finding one out takes longer than many an operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from epsilons.gradients.batch_dim.dims import BatchDim
from epsilons.gradients.batch_dim.propagate import output_batch_dim

# A tensor, its batch dimension, and whether that is presumed.
Known = tuple["weakref.ref[Tensor]", BatchDim | None, bool]

_MOST = 2**14  # entries: batches vary in size
_cache: dict[Any, list[BatchDim | None]] = {}
_PLAIN = frozenset(
    {int, float, bool, str, type(None), type(Ellipsis)}
    | {torch.device, torch.dtype, torch.memory_format}
)


def cached_batch_dims(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: Sequence[tuple[Tensor, BatchDim | None]],
    outputs: Sequence[Tensor],
    count: int,
    known: Mapping[int, Known],
) -> list[BatchDim | None]:
    """The batch dimension of every output; `known`: what is known of tensors, by id."""
    key = _key(func, args, kwargs, outputs, count, known)
    found = _cache.get(key)
    if found is None:
        by_shape = {part.shape: part for part in outputs}
        dims = {
            shape: output_batch_dim(func, args, kwargs, inputs, part, count)
            for shape, part in by_shape.items()
        }
        found = [dims[part.shape] for part in outputs]
        if key is not None:
            if len(_cache) >= _MOST:
                _cache.clear()
            _cache[key] = found
    return found


def _key(
    func: Any,
    args: Any,
    kwargs: Any,
    outputs: Sequence[Tensor],
    count: int,
    known: Mapping[int, Known],
) -> Any:
    """An operation as far as batch dimensions depend on it; None where they may on more."""
    key: list[Any] = [func, count, tuple(part.shape for part in outputs)]
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            entry = known.get(id(arg))
            if entry is None or entry[2] or entry[0]() is not arg:
                return None
            key += arg.shape, entry[1]
        elif type(arg) in _PLAIN or (
            type(arg) is tuple and all(type(part) in _PLAIN for part in arg)
        ):
            key.append(arg)
        else:
            return None
    if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor):
        return None  # where an index of tensors leads depends on its numbers
    return (*key, tuple(kwargs))
