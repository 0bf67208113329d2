"""Memory between steps: kept by the process instead of given back and asked for again."""

from __future__ import annotations

import ctypes
import functools
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_KEPT = 2**30
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep up to 1 GiB of freed memory; whether it was told to, once.

    glibc hands the memory of a training step back to the system when the step ends, and every page
    of the next step is then asked for and zeroed anew, which can take a third of the time. This is
    a setting of the whole process. Who chose one by a variable of the environment keeps it; with
    another allocator, or another system's C library, nothing happens.
    """
    if os.name != "posix" or any(name in os.environ for name in _CHOICES):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    told = [libc.mallopt(option, _KEPT) for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD)]
    return all(told)
