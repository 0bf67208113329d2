"""Compiled loops for host memory, and their threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numba
import torch
from numba import njit
from torch import Tensor

_ONE_AT_A_TIME = threading.Lock()  # numba's simplest threads know one caller only

# A loop whose sums may be reordered, as in any library; what isn't finite stays so.
reordered = functools.partial(
    njit, cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"}
)


def compilable(tensor: Tensor) -> bool:
    """Whether a tensor is such as compiled loops take: single precision, in host memory."""
    return tensor.is_cpu and tensor.dtype == torch.float32


def share_out(
    count: int, some: Callable[..., None], at_once: Callable[..., None], *operands: Any
) -> None:
    """Have as many threads as torch's go through `count` items: `at_once(threads, …)`.

    On one thread `some(0, count, …)` does it.
    """
    threads = min(torch.get_num_threads(), count)
    if threads <= 1:
        some(0, count, *operands)
        return
    with compiled_threads(threads):
        at_once(threads, *operands)


def compiled_threads(count: int) -> AbstractContextManager[Any]:
    """Have compiled loops run on so many threads, if there are as many.

    For one thread none of numba's are started: a process that has them must not fork.
    """
    if count <= 1:
        return nullcontext()
    most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
    return _fewer(count) if count < most else _ONE_AT_A_TIME


@contextmanager
def _fewer(count: int) -> Iterator[None]:
    with _ONE_AT_A_TIME:
        before = numba.get_num_threads()
        numba.set_num_threads(min(count, before))
        try:
            yield
        finally:
            numba.set_num_threads(before)
