"""BatchDim: which dimension of a tensor is the batch; tensors arranged by example and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class BatchDim(NamedTuple):
    """Dimension `dim` is (outer, examples, inner) flattened; plain batches have inner = 1."""

    dim: int
    inner: int = 1


BATCH_FIRST = BatchDim(0)


def examples_first(tensor: Tensor, batch: BatchDim, count: int) -> Tensor:
    """A view or copy (B, …) whose row i is the tensor as the operation would see it for example i.

    The row keeps every dimension of the original; the one that counted examples has the
    outer · inner entries that belong to one example (1 for plain batches).
    """
    dim, inner = batch
    if dim == 0 and tensor.shape[0] == count:
        return tensor.unsqueeze(1)
    outer = tensor.shape[dim] // (count * inner)
    split = torch.unflatten(tensor, dim, (outer, count, inner)).movedim(dim + 1, 0)
    return split.flatten(dim + 1, dim + 2)


def examples_back(rows: Tensor, batch: BatchDim, shape: Sequence[int]) -> Tensor:
    """The inverse of `examples_first`: rows (B, …) put back into a tensor of the given shape."""
    dim, inner = batch
    outer = shape[dim] // (len(rows) * inner)
    split = torch.unflatten(rows, dim + 1, (outer, inner)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2)
