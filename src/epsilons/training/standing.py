"""Standing: what every process of a run knows of its journal, which rank 0 has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from epsilons.accounting.plan import Plan
from epsilons.journal import Journal


@dataclass
class Standing:
    """Where a journal stands.

    `charged`: the first step that is not. `counts`: how many steps everyone has paid for, by phase.
    `refreshes`: those that stand. `random`: whether norms of a refresh differ from those of a step.
    """

    charged: int
    counts: list[int]
    restarts: int
    refreshes: set[int]
    random: bool

    @classmethod
    def of(cls, journal: Journal) -> Self:
        return cls(
            journal.steps_charged,
            list(journal.charged()),
            journal.restarts,
            set(journal.refreshes_now()),
            bool(journal.random),
        )

    def charge(self, plan: Plan, first: int, last: int) -> None:
        """Know that steps `first` to `last`, of one phase, are charged."""
        phase = next(k for k, p in enumerate(plan.all_phases) if p.first <= first < p.end)
        self.charged = last + 1
        self.counts[phase] += last + 1 - first


def last_step(journal: Journal, max_epsilon: float | None) -> int:
    """The number of steps that keeps the worst case within `max_epsilon`; what is paid is taken."""
    steps = journal.plan.steps
    if max_epsilon is None or journal.worst_case(until=steps) <= max_epsilon:
        return steps
    enough, too_many = journal.steps_charged, steps
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if journal.worst_case(until=middle) <= max_epsilon:
            enough = middle
        else:
            too_many = middle
    return enough
