"""Loops that numba compiles, for host memory."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from torch import Tensor

_intrinsic: Any = intrinsic  # numba itself gives the first argument

# A loop whose sums may be reordered, as in any library; what isn't finite stays so.
reordered = functools.partial(
    njit, cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def compilable(tensor: Tensor) -> bool:
    """Whether a tensor is such as compiled loops take: single precision, in host memory."""
    return tensor.is_cpu and tensor.dtype == torch.float32


def addressable(tensor: Tensor) -> bool:
    """Whether they may also go by its address: its numbers are where they seem, as they seem."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_neg()
    return compilable(tensor) and plain


@njit(cache=True, nogil=True)
def singles_at(start: int, size: int) -> Any:
    """So many numbers of single precision at an address, as an array; for compiled loops."""
    return carray(_pointer(start), size, np.float32)


@njit(cache=True, nogil=True)
def doubles_at(start: int, size: int) -> Any:
    """The same of double precision."""
    return carray(_pointer(start), size, np.float64)


@_intrinsic
def _pointer(typing: Any, start: Any) -> Any:
    """The memory at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate
