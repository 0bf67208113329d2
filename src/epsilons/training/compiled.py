"""What the noise's compiled loops need: memory by address, and functions of torch's libraries."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba import njit, types
from numba.core import config
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

_intrinsic: Any = intrinsic  # numba itself gives the first argument

_features: Any = get_host_cpu_features
_asked: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
_enabled: str = _features() if _asked is None else _asked  # none at all, for any processor
FEATURES = frozenset(  # of the processor that numba compiles for
    feature.removeprefix("+") for feature in _enabled.split(",") if feature.startswith("+")
)

_LINE = 64  # bytes that memory brings at once


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
