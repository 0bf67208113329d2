"""Ctrl-C stops a run at the next step, where it can be taken up again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A run was stopped between two steps and can be resumed."""

    def __init__(self, path: Path, step: int) -> None:
        super().__init__(f"stopped before step {step}; {path} can be resumed")
        self.path = path


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed since; a second Ctrl-C stops at once, as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
