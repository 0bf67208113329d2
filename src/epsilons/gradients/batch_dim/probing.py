"""Where an operation puts the examples, found by running it without data on another batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epsilons.gradients.batch_dim.dims import BatchDim
from epsilons.gradients.trees import tensors_in

Function = Callable[..., Any]

_PROBE = 10007  # a size that no other dimension has
_LOST, _FAILED = -1, -2  # what may be found instead of a dimension


def probed_output(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    known: Sequence[tuple[Tensor, BatchDim]],
    out: Tensor,
) -> BatchDim | None:
    """The operation again, without data, on a batch of another size: the dimension that differs."""
    (tensor, batch), others = known[0], tensors_in((args, kwargs))
    dims = {id(t): its.dim for t, its in known}
    grown = _grown_dim(function, args, kwargs, dims, others, out)
    if grown == _FAILED and len(others) == 1 and batch.dim < out.dim():
        kept = out.shape[batch.dim] == tensor.shape[batch.dim]
        return batch if kept else None
    if grown < 0:  # a weight or an index repeated for the batch grows with it
        dim = batch.dim
        long = slice(dim, dim + 1)
        alike = {id(t): dim for t in others if t.shape[long] == tensor.shape[long]}
        grown = _grown_dim(function, args, kwargs, alike | dims, others, out)
    return BatchDim(grown, batch.inner) if grown >= 0 else None


def _grown_dim(
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dims: Mapping[int, int],
    tensors: Sequence[Tensor],
    out: Tensor,
) -> int:
    """The dimension of the output that grows with dimension dims[id(t)] of the tensors t.

    `_LOST` if there is none or more than one, `_FAILED` if the operation needs data to run.
    """
    stands = {id(t): _stand(t, dims.get(id(t))) for t in tensors}
    arguments = _frozen(args, stands), _frozen(tuple(kwargs.items()), stands)
    try:
        return _probe(function, out.shape, *arguments)
    except TypeError:  # slices have no hash
        return _probe.__wrapped__(function, out.shape, *arguments)


class _Stand(NamedTuple):
    """What stands for a tensor where only shapes matter."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _stand(tensor: Tensor, dim: int | None) -> _Stand:
    shape = list(tensor.shape)
    if dim is not None:
        shape[dim] = _PROBE
    # One type for all: autocast, which would make them equal, leaves such tensors alone.
    wide = torch.float32 if tensor.is_floating_point() else tensor.dtype
    return _Stand(tuple(shape), wide)


class _Listed(NamedTuple):
    """What stands for a list, which has no hash and as an index is no tuple."""

    branches: tuple[Any, ...]


def _frozen(tree: Any, stands: Mapping[int, _Stand]) -> Any:
    if isinstance(tree, Tensor):
        return stands[id(tree)]
    if isinstance(tree, (list, tuple)):
        branches = tuple(_frozen(branch, stands) for branch in tree)
        return _Listed(branches) if isinstance(tree, list) else branches
    return tree


def _thawed(tree: Any) -> Any:
    if isinstance(tree, _Stand):
        return torch.empty(tree.shape, dtype=tree.dtype, device="meta")
    if isinstance(tree, _Listed):
        return [_thawed(branch) for branch in tree.branches]
    return tuple(map(_thawed, tree)) if isinstance(tree, tuple) else tree


@functools.lru_cache(4096)
def _probe(function: Function, shape: torch.Size, args: Any, kwargs: Any) -> int:
    """Which dimension of the result of that shape is as long as the other batch, and alone so."""
    try:
        found = tensors_in(function(*_thawed(args), **dict(_thawed(kwargs))))
    except (RuntimeError, IndexError, TypeError, NotImplementedError, ValueError):
        return _FAILED
    sizes = [list(part.shape) for part in found if part.dim() == len(shape)]
    places = {
        size.index(_PROBE)
        for size in sizes
        if [length for length, old in zip(size, shape, strict=True) if length != old] == [_PROBE]
    }
    return places.pop() if len(places) == 1 else _LOST
