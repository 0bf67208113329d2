"""Standing: what every process of a run knows of its journal, which rank 0 has."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from epsilons.accounting.plan import Phase, Plan
from epsilons.journal import Journal
from epsilons.journal.clip_course import Move, bound_at, next_move
from epsilons.journal.run_entries import clip_moves

RANGE = 32  # steps charged ahead at most


@dataclass
class Standing:
    """Where a journal stands.

    `charged`: the first step that is not. `counts`: how many steps everyone has paid for, by phase.
    `refreshes`: those that stand. `random`: whether norms of a refresh differ from those of a step.
    `moves`: the course of a clip bound that adapts.
    """

    charged: int
    counts: list[int]
    restarts: int
    refreshes: set[int]
    random: bool
    moves: list[Move]

    @classmethod
    def of(cls, journal: Journal) -> Self:
        return cls(
            journal.steps_charged,
            list(journal.charged()),
            journal.restarts,
            set(journal.refreshes_now()),
            bool(journal.random),
            clip_moves(journal),
        )

    def charge(self, plan: Plan, first: int, last: int) -> None:
        """Know that steps `first` to `last`, of one phase, are charged."""
        self.charged = last + 1
        self.counts[plan.all_phases.index(plan.phase(first))] += last + 1 - first

    def phase(self, plan: Plan, step: int) -> Phase:
        """The phase of `step`, with the clip bound that it has there."""
        return replace(plan.phase(step), max_grad_norm=bound_at(plan, self.moves, step))

    def move(self, plan: Plan, step: int, released: float) -> None:
        """Know what `step` released of the number of unclipped examples."""
        self.moves = [move for move in self.moves if move.step <= step]  # else a replay
        self.moves.append(next_move(plan, self.moves, step, released))


def range_end(plan: Plan, step: int, last: int) -> int:
    """The last step of the range that begins at `step`: within one refresh and phase."""
    phase = plan.phase(step)
    end = min(step - step % RANGE + RANGE, last, phase.end)
    later = range(step + 1, end)
    return next((t for t in later if plan.refresh_due(t) or not phase.count(t, t + 1)), end) - 1


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
