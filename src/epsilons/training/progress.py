"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import TextColumn

from epsilons.accounting.plan import Plan
from epsilons.terminal import counting

_UPDATES = 50  # of the worst case so far, which takes some milliseconds each


@contextmanager
def training_bar(plan: Plan) -> Iterator[Callable[[int], None]]:
    """A bar that shows the steps done, the worst case so far and the time left."""
    column = TextColumn("worst case so far ε = {task.fields[epsilon]}")
    with counting("training", plan.steps, column, epsilon="0.00") as show:
        every = max(1, plan.steps // _UPDATES)

        def advance(done: int) -> None:
            if done % every == 0 or done == plan.steps:
                show(done, epsilon=f"{plan.worst_case(steps=done):.2f}")

        yield advance
