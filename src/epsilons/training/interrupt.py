"""Ctrl-C and SIGTERM stop a run at the next step, where it can be taken up again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A run was stopped between two steps, by a signal, and can be resumed.

    A `KeyboardInterrupt`. `path`: the run folder, `.path`. `step`: the next one. `number`: of the
    signal, `.signal`.
    """

    def __init__(self, path: Path, step: int, number: int) -> None:
        super().__init__(f"stopped before step {step}; {path} can be resumed")
        self.path = path
        self.signal = number


@contextmanager
def interruptible(wanted: bool = True) -> Iterator[Callable[[], int | None]]:
    """The signal that came since, Ctrl-C's or SIGTERM; a second one stops at once, as usual.

    Without being `wanted`, signals do what they did.
    """
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    received: int | None = None

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received is not None:
            raise KeyboardInterrupt
        received = number

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
