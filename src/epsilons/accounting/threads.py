"""Compiled loops that release the interpreter, spread over the cores this process may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def available() -> int:
    """How many cores this process may use; no more than OMP_NUM_THREADS, which torchrun sets."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    said = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(cores or 1, int(said) if said.isdigit() else 2**16))


def run(part: Callable[[int, int], object], *, worthwhile: bool = True) -> None:
    """Calls `part(k, n)` for k = 0…n−1 on n threads; on one when it is not `worthwhile`.

    The parts must write to different memory; their results are not kept.
    """
    n = available() if worthwhile else 1
    if n == 1:
        part(0, 1)
        return
    with ThreadPoolExecutor(n) as pool:
        for done in [pool.submit(part, k, n) for k in range(n)]:
            done.result()
