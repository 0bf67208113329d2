"""Groups beside each other: who pays more, and is it who is served worse?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples


@dataclass(frozen=True)
class GroupRow:
    """One group: its name, size, mean ε, and the accuracy on its held-out examples."""

    group: str
    n: int
    mean_epsilon: float
    test_accuracy: float | None


def group_summary(
    epsilons: Epsilons, examples: Examples, test: Examples | None, by: str
) -> list[GroupRow]:
    """The groups of one column, by ascending mean ε."""
    if by not in examples.groups:
        known = ", ".join(examples.groups) or "none"
        raise ValueError(f"there is no group column {by!r}; the run has: {known}")
    column = examples.groups[by]
    rows = [
        GroupRow(
            group=str(group),
            n=int((column == group).sum()),
            mean_epsilon=float(epsilons.values[column == group].mean()),
            test_accuracy=_accuracy(test, by, group),
        )
        for group in np.unique(column)
    ]
    return sorted(rows, key=lambda row: row.mean_epsilon)


def _accuracy(test: Examples | None, by: str, group: object) -> float | None:
    if test is None or test.correct is None or by not in test.groups:
        return None
    members = test.groups[by] == group
    return float(test.correct[members].mean()) if members.any() else None
