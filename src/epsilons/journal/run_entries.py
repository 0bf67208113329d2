"""Entries that a run folder and its loop keep in the journal: what the run is of, and its examples.

Nothing here is priced. They are functions of a journal, and no methods, since a loop of one's own
has no use for them.
"""

from __future__ import annotations

from collections.abc import Mapping

from epsilons.journal import charges, clip_course
from epsilons.journal.clip_course import Move
from epsilons.journal.journal import Journal
from epsilons.journal.norm_records import SomeKind
from epsilons.journal.opening import Opening


def opening(journal: Journal) -> Opening:
    """The first entry: the format number and facts that never change."""
    return journal._opening


def record_identity(journal: Journal, identity: Mapping[str, str]) -> None:
    """Record which data set, model and so on the run is of, once, before its first step."""
    if recorded_identity(journal) is not None or journal.steps_charged:
        raise ValueError("what the run is of is noted once, before its first step")
    journal._chain.append("identity", dict(identity), b"", b"")


def recorded_identity(journal: Journal) -> dict[str, str] | None:
    """What `record_identity` recorded; None if it was not called."""
    entry = journal._chain.last("identity")
    return None if entry is None else dict(entry.facts)


def columns(journal: Journal) -> bytes:
    """Packed columns of the examples beside their ids, as given to `Journal.create`."""
    return journal._chain.norms(0)


def record_outcomes(journal: Journal, training: bytes, held_out: bytes) -> None:
    """Record losses and correctness under the final model, as packed columns; the last counts.

    `held_out`: the held-out examples with their outcomes, empty if there are none.
    """
    journal._chain.append("outcomes", {}, training, held_out)


def outcomes(journal: Journal) -> tuple[bytes, bytes] | None:
    """The arguments of the last `record_outcomes`; None if it was not called."""
    last = journal._chain.last("outcomes")
    if last is None:
        return None
    return journal._chain.indices(last.number), journal._chain.norms(last.number)


def phase_end(journal: Journal, step: int) -> int:
    """The step before which the phase of `step` ends; earlier, where steps of it were repeated."""
    return charges.phase_end(journal._chain, journal.plan, step)


def record_move(journal: Journal, step: int, released: float) -> None:
    """Record the noisy count that the charged `step` released; see `clip_course.append_move`."""
    clip_course.append_move(journal._chain, journal.plan, step, released)


def clip_bound(journal: Journal, step: int) -> float:
    """The clip bound of `step`, as far as the journal has its course."""
    return clip_course.bound_at(journal.plan, clip_moves(journal), step)


def clip_moves(journal: Journal) -> list[Move]:
    """The course of a clip bound that adapts, which is public: from which step on it is what."""
    return clip_course.moves(journal._chain, journal.plan)


def turns(journal: Journal) -> tuple[int, ...]:
    """`steps_charged` after the last charge, then after each restart since."""
    return charges.turns(journal._chain)


def recorded_now(journal: Journal, kind: SomeKind, first: int) -> bool:
    """Whether norms of some examples from `first` on are recorded since the last restart."""
    latest = charges.latest_entry(journal._chain, kind)
    return latest is not None and latest.facts["first"] >= first
