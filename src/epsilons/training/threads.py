"""Threads of compiled loops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba

_ONE_AT_A_TIME = threading.Lock()  # numba's simplest threads know one caller only


@contextmanager
def compiled_threads(count: int) -> Iterator[None]:
    """Have compiled loops run on so many threads, if there are as many.

    Not to be entered for one thread: a process that has started numba's must not fork.
    """
    with _ONE_AT_A_TIME:
        before = numba.get_num_threads()
        numba.set_num_threads(min(count, before))
        try:
            yield
        finally:
            numba.set_num_threads(before)
