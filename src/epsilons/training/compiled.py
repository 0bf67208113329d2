"""Loops that numba compiles, for host memory."""

from __future__ import annotations

import functools

import torch
from numba import njit
from torch import Tensor

# A loop whose sums may be reordered, as in any library; what isn't finite stays so.
reordered = functools.partial(
    njit, cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def compilable(tensor: Tensor) -> bool:
    """Whether a tensor is such as compiled loops take: single precision, in host memory."""
    return tensor.is_cpu and tensor.dtype == torch.float32
