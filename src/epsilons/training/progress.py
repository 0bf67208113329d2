"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import TextColumn

from epsilons.accounting.printed import epsilon_text
from epsilons.journal import Journal
from epsilons.terminal import counting

Show = Callable[[int, float, float | None, float], None]

_UPDATES = 50  # of the worst case so far, which takes some milliseconds each


@contextmanager
def training_bar(journal: Journal, last: int) -> Iterator[Show]:
    """A bar with worst case so far, time of the last refresh, loss, accuracy and time left.

    Loss and accuracy are private: they are gone from the line that stays.
    """
    if not Console(stderr=True).is_terminal:
        yield lambda done, loss, right, refresh: None
        return
    column = TextColumn("{task.fields[facts]}")
    with counting("training", last, column, facts="") as show:
        every = max(1, last // _UPDATES)
        accuracy: float | None = None
        epsilon, until, at = 0.0, 0, 0

        def advance(done: int, loss: float, right: float | None, refresh: float) -> None:
            nonlocal epsilon, until, accuracy, at
            accuracy = accuracy if right is None else right
            if done > until:
                # of a step ahead, so that what is shown is never too small
                until = min(last, done - 1 + every)
                epsilon = journal.worst_case(until=until)
            public = f"ε so far {epsilon_text(epsilon)}, refresh {refresh:.1f} s"
            right_so_far = "" if accuracy is None else f", accuracy {accuracy:.1%}"
            show(done, facts=f"{public}; private: loss {loss:.3f}{right_so_far}")
            at = done

        try:
            yield advance
        finally:
            show(at, facts=f"ε so far {epsilon_text(epsilon)}")
