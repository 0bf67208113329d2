"""Tensors that depend on the data, and which dimension of each is the batch.

Some are known from the operations that made them. Others are *presumed*: constants that a model
makes with as many rows as there are examples, such as a zero state, are taken for one row each.
Where that turns out wrong, the pass is repeated without presuming (`PresumedWrongly`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from epsilons.gradients.batch_dim.dims import BATCH_FIRST, BatchDim
from epsilons.gradients.batch_dim.indexing import assigned_batch_dim
from epsilons.gradients.batch_dim.propagate import output_batch_dim
from epsilons.gradients.trees import tensors_in

# A tensor, its batch dimension, and whether that is presumed.
Known = tuple["weakref.ref[Tensor]", BatchDim | None, bool]

# Batch dimensions of an operation's outputs, by shape: finding them takes longer than many an
# operation does.
_cache: dict[Any, dict[torch.Size, BatchDim | None]] = {}
_MOST = 2**14  # entries: batches vary in size
_PLAIN = frozenset({int, float, bool, str, type(None), torch.device, torch.dtype})


class PresumedWrongly(Exception):
    """A tensor taken for one row per example, because of its size, was something else."""


class TracedData:
    """What is known of the tensors in a forward pass over `count` examples."""

    def __init__(self, count: int, presume: bool) -> None:
        self.count, self.presume = count, presume
        # By id; the reference tells a tensor from a later one that was given its id.
        self._known: dict[int, Known] = {}
        self._apart: dict[int, weakref.ref[Tensor]] = {}

    def mark(self, tensor: Tensor, batch_dim: BatchDim | None, presumed: bool = False) -> None:
        """Take a tensor for data with this batch dimension; None: nobody knows which."""
        self._known[id(tensor)] = (weakref.ref(tensor), batch_dim, presumed)

    def mark_rows(self, tensor: Tensor) -> None:
        """Take a tensor for data with one row per example."""
        self.mark(tensor, BATCH_FIRST)

    def mark_state(self, state: Tensor, dim: int, input: Tensor) -> None:
        """Take a tensor that is data by its size at most for one with its batch along `dim`."""
        batch_dim, presumed = self.batch_dim(state)
        its, _ = self.batch_dim(input)
        if (batch_dim is None or presumed) and its is not None:
            self.mark(state, BatchDim(dim, its.inner))

    def mark_constant(self, out: Any) -> None:
        """Presume one row per example of a constant, if its size allows it."""
        presumable = self.presume and isinstance(out, Tensor) and out.dim() > 0
        if presumable and out.shape[0] == self.count:
            self.mark(out, BATCH_FIRST, presumed=True)

    def mark_apart(self, out: Any) -> None:
        """Know what has a gradient, though of neither weights nor data: of a leaf made on the way.

        peft makes a parameter of a frozen weight's transpose, for one.
        """
        for part in tensors_in(out):
            if part.requires_grad:
                self._apart[id(part)] = weakref.ref(part)

    def find(self, tensor: Tensor) -> Known | None:
        """What is known of a tensor; None if it is no data."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known
        if tensor.requires_grad and not tensor.is_leaf:
            apart = self._apart.get(id(tensor))
            if apart is not None and apart() is tensor:
                return None
            # From what can't be traced, such as an autograd.Function of the model's own.
            rows = self.presume and tensor.dim() > 0 and tensor.shape[0] == self.count
            return weakref.ref(tensor), BATCH_FIRST if rows else None, rows
        return None

    def batch_dim(self, tensor: Any) -> tuple[BatchDim | None, bool]:
        """The batch dimension of a tensor, and whether it is presumed."""
        known = self._known.get(id(tensor))
        return known[1:] if known is not None and known[0]() is tensor else (None, False)

    def presumed(self, tensor: Tensor) -> bool:
        """Whether nothing but sizes ties a tensor to the data."""
        return self.batch_dim(tensor)[1]

    def batch_first(self, tensor: Tensor) -> bool:
        """Whether a tensor is known to have one row per example, and not only by its size."""
        known = self._known.get(id(tensor))
        if known is None or known[2] or known[1] != BATCH_FIRST:
            return False
        return known[0]() is tensor and tensor.shape[0] == self.count

    def mark_outputs(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: Sequence[tuple[Tensor, BatchDim | None]],
        out: Any,
        presumed: bool,
    ) -> None:
        """Take for data what comes out of an operation on data alone."""
        parts = [out] if isinstance(out, Tensor) else tensors_in(out)
        key = None if presumed else self._cache_key(func, args, kwargs, parts)
        found = None if key is None else _cache.get(key)
        if found is None:
            by_shape = {part.shape: part for part in parts}  # chunks are many and alike
            found = {
                shape: output_batch_dim(func, args, kwargs, inputs, part, self.count)
                for shape, part in by_shape.items()
            }
            if key is not None:
                if len(_cache) >= _MOST:
                    _cache.clear()
                _cache[key] = found
        for part in parts:
            self.mark(part, found[part.shape], presumed)

    def _cache_key(self, func: Any, args: Any, kwargs: Any, parts: Sequence[Tensor]) -> Any:
        """An operation as far as batch dimensions depend on it; None where they may on more."""
        if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor):
            return None  # where an index of tensors leads depends on its numbers
        key = [func, self.count, tuple(part.shape for part in parts), tuple(kwargs)]
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Tensor):
                known = self._known.get(id(arg))
                if known is None or known[2] or known[0]() is not arg:
                    return None
                key += arg.shape, known[1]
            elif type(arg) in _PLAIN:
                key.append(arg)
            else:
                return None
        return tuple(key)

    def assign(self, target: Tensor, index: Any, value: Any) -> None:
        """target[index] = value, which makes data of the target."""
        batch_dim, presumed = self.batch_dim(target)
        its, guessed = self.batch_dim(value)
        if (presumed and target.requires_grad) or (guessed and value.requires_grad):
            raise PresumedWrongly
        target[index] = value
        if its is not None and not guessed:
            known = None if presumed else batch_dim
            self.mark(target, assigned_batch_dim(target, index, value, its, known, self.count))
        elif batch_dim is None or (isinstance(value, Tensor) and value.requires_grad):
            self.mark(target, None)
