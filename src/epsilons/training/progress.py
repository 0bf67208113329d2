"""The progress bar of a run, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from epsilons.accounting.plan import Plan


@contextmanager
def progress_bar(plan: Plan) -> Iterator[Callable[[int], None]]:
    """A bar that shows the steps done, the worst case so far and the time left."""
    console = Console(stderr=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("worst case so far ε = {task.fields[epsilon]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=plan.steps, epsilon="0.00")
        every = max(1, plan.steps // 50)

        def advance(done: int) -> None:
            if done % every == 0 or done == plan.steps:
                epsilon = f"{plan.worst_case(steps=done):.2f}"
                progress.update(task, completed=done, epsilon=epsilon)

        yield advance
