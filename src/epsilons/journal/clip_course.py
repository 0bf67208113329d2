"""The course of a clip bound that adapts: what steps released of it, and the bound that follows.

Both are public. A released count is recorded before the bound that follows from it is used.
"""

from __future__ import annotations

from typing import NamedTuple

from epsilons.accounting.plan import Plan
from epsilons.journal.chain import Chain
from epsilons.journal.charges import steps_charged


class Move(NamedTuple):
    """From `step` on the clip bound is `bound`; `released`: the noisy count before it."""

    step: int
    released: float
    bound: float


def append_move(chain: Chain, plan: Plan, step: int, released: float) -> None:
    """Append what the charged `step` released, noisy Σ(b − ½), and the bound that follows from it.

    The same again changes nothing. ValueError for a step that releases none, or is not charged.
    """
    if plan.adaptive is None or not plan.adaptive.updates(step) or step >= steps_charged(chain):
        raise ValueError(f"step {step} is charged for no count of unclipped examples")
    if any(move.step == step + 1 and move.released == released for move in moves(chain, plan)):
        return
    found = next_move(plan, moves(chain, plan), step, released)
    chain.append("clip_bound", found._asdict(), b"", b"")


def moves(chain: Chain, plan: Plan) -> list[Move]:
    """All moves in force, without those of steps that a restart undid.

    ValueError if a bound is not what follows from what was released.
    """
    found: list[Move] = []
    if plan.adaptive is None:
        return found
    for entry in chain.entries("clip_bound", "restart"):
        step = entry.facts["step"]
        if entry.kind == "restart":
            found = [move for move in found if move.step <= step]
            continue
        move = Move(step, entry.facts["released"], entry.facts["bound"])
        before = found[-1].bound if found else plan.max_grad_norm
        size = plan.phase(step - 1).batch_size
        if move.bound != plan.adaptive.next_bound(before, move.released, size):
            raise ValueError(f"the clip bound of step {step} is not what its count leads to")
        found.append(move)
    return found


def next_move(plan: Plan, course: list[Move], step: int, released: float) -> Move:
    """What follows in a `course` from what `step` of a bound that adapts released."""
    assert plan.adaptive is not None
    size, bound = plan.phase(step).batch_size, bound_at(plan, course, step)
    return Move(step + 1, released, plan.adaptive.next_bound(bound, released, size))


def bound_at(plan: Plan, course: list[Move], step: int) -> float:
    """The clip bound of `step`: the phase's, or the latest that an adaptive one has moved to."""
    if plan.adaptive is None:
        return plan.phase(step).max_grad_norm
    earlier = [move.bound for move in course if move.step <= step]
    return earlier[-1] if earlier else plan.max_grad_norm
