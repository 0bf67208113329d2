"""Loops that numba compiles, for host memory."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray
from numpy.typing import NDArray
from torch import Tensor

_intrinsic: Any = intrinsic  # numba itself gives the first argument

_features: Any = get_host_cpu_features
_asked: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
_enabled: str = _features() if _asked is None else _asked  # none at all, for any processor
FEATURES = frozenset(  # of the processor that numba compiles for
    feature.removeprefix("+") for feature in _enabled.split(",") if feature.startswith("+")
)

_LINE = 64  # bytes that memory brings at once

# A loop whose sums may be reordered, as in any library; what isn't finite stays so.
reordered = functools.partial(
    njit, cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def made_known(*names: str) -> bool:
    """Make functions of torch's own libraries known to compiled code; False if it lacks one."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        found = {name: getattr(library, name) for name in names}
    except (OSError, AttributeError):
        return False
    for name, function in found.items():
        binding.add_symbol(known_as(name), ctypes.cast(function, ctypes.c_void_p).value)
    return True


def known_as(name: str) -> str:
    """What compiled code calls a function of torch's: others of that name may be loaded as well."""
    return f"epsilons_{name}"


def compilable(tensor: Tensor) -> bool:
    """Whether a tensor is such as compiled loops take: single precision, in host memory."""
    return tensor.is_cpu and tensor.dtype == torch.float32


def addressable(tensor: Tensor) -> bool:
    """Whether they may also go by its address: its numbers are where they seem, as they seem."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is torch.float32
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def together(tensor: Tensor) -> Tensor:
    """The same numbers, one after another in memory of their own."""
    if addressable(tensor) and tensor.is_contiguous():
        return tensor
    tensor = tensor.detach().resolve_neg().contiguous()
    if not addressable(tensor):
        raise TypeError(f"{type(tensor).__name__} of {tensor.dtype} on {tensor.device}")
    return tensor


def where(tensor: Tensor) -> tuple[int, ...]:
    """Address and sizes of a tensor whose numbers are `together`, of which `arrays` makes one."""
    return (tensor.data_ptr(), *tensor.shape)


def arrays(operands: Any) -> Any:
    """Operands of a compiled loop, with an array for every `where`; for compiled code."""
    raise TypeError("for compiled code only")


@overload(arrays, strict=False)  # which would compare annotations as well
def _arrays(operands: Any) -> Any:
    if not operands.types:
        return lambda operands: ()
    first = operands.types[0]
    if isinstance(first, types.UniTuple) and first.dtype == types.int64:
        return lambda operands: (
            carray(_pointer(operands[0][0]), operands[0][1:], np.float32),
            *arrays(operands[1:]),
        )
    return lambda operands: (operands[0], *arrays(operands[1:]))


@njit(cache=True, nogil=True)
def scratch(size: int, kind: type[Any]) -> NDArray[Any]:
    """Zeros of a kind, from the beginning of a line of memory on; for compiled loops.

    Vectors as long as a line would else lie on two of them, and take twice as long to be read.
    """
    room = np.zeros(size + _LINE, kind)
    first = -(room.ctypes.data // room.itemsize) % (_LINE // room.itemsize)
    return room[first : first + size]


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
