"""One function on many blocks, shared among processes."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

from epsilons.accounting import threads

Block = TypeVar("Block")
Result = TypeVar("Result")

# What a process of the pool calls; each has its own, with what that keeps between two blocks.
_function: Callable[[Any], Any]


def in_processes(
    function: Callable[[Block], Result], blocks: Iterable[Block], processes: int
) -> Iterator[Result]:
    """`function(block)` for each block, in order; in this process if `processes` is 1.

    The function is sent once to each process, and blocks are asked for as they are needed, two for
    each process.
    """
    if processes == 1:
        yield from map(function, blocks)
        return
    # Started afresh: a copy of a process that has threads, as torch's, may hang.
    fresh = multiprocessing.get_context("spawn")
    each = max(1, threads.available() // processes)
    with ProcessPoolExecutor(
        processes, mp_context=fresh, initializer=_begin, initargs=(function, each)
    ) as pool:
        waiting: deque[Future[Result]] = deque()
        for block in blocks:
            waiting.append(pool.submit(_call, block))
            if len(waiting) == 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _begin(function: Callable[[Any], Any], cores: int) -> None:
    global _function
    os.environ["OMP_NUM_THREADS"] = str(cores)
    _function = function


def _call(block: Any) -> Any:
    return _function(block)
