"""Charges and restarts: which steps of a run were paid for, and which entries are in force.

A restart goes back to an earlier step. Steps charged after it are paid again; refreshes of later
steps are no longer in force.
"""

from __future__ import annotations

from epsilons.accounting.plan import Phase, Plan
from epsilons.journal.assumptions import expect_separate
from epsilons.journal.chain import Chain, Entry


def append_charge(chain: Chain, plan: Plan, first: int, last: int, *, anchored: bool) -> None:
    """Validate and append the charge of steps `first` to `last`; see `Journal.charge`."""
    expect_separate(chain)
    newest, charged = latest_entry(chain, "charge"), steps_charged(chain)
    if newest is not None and (newest.facts["first"], newest.facts["last"]) == (first, last):
        return
    if first in (charged, next_step(chain, plan)):
        _expect_promised(chain, plan, first, last)
    if first != next_step(chain, plan) or last < first:
        raise ValueError(f"steps {first} to {last} don't follow the {charged} charged so far")
    if not plan.endless and last >= plan.steps:
        raise ValueError(f"step {last} is beyond the plan's {plan.steps} steps")
    if plan.phase(first).count(first, last + 1) != last + 1 - first:
        raise ValueError(f"steps {first} to {last} are of two phases; charge them apart")
    if any(plan.refresh_due(step) for step in range(first + 1, last + 1)):
        raise ValueError(f"steps {first} to {last} cross a refresh; charge them apart")
    recorded = chain.last("refresh", "sampled") is not None
    if plan.clipping == "filtered" and refresh_in_force(chain, first) is None:
        raise ValueError(
            f"step {first} has no norms, which the bounds of a filter are taken from; "
            "record(step, norms) of all examples first"
        )
    if plan.refresh_due(first) and recorded and refresh_in_force(chain, first) != first:
        raise ValueError(
            f"the plan has a refresh at step {first}, and the norms that hold are of "
            f"{_before(refresh_in_force(chain, first))}; record(step, norms) of all examples "
            "first, or plan fewer refreshes"
        )
    facts = {"first": first, "last": last, **phase_constants(plan.phase(first))}
    chain.append("charge", facts, b"", b"", anchored=anchored)


def _before(step: int | None) -> str:
    return "no refresh" if step is None else f"step {step}"


def append_restart(chain: Chain, step: int) -> None:
    """Append a restart from `step`; see `Journal.restart`."""
    if not 0 <= step <= steps_charged(chain):
        raise ValueError(f"can't go back to step {step} of {steps_charged(chain)}")
    chain.append("restart", {"step": step}, b"", b"")


def steps_charged(chain: Chain) -> int:
    """The first step that is not charged; after a restart, the step it went back to."""
    last = chain.last("charge", "restart")
    if last is None:
        return 0
    return int(last.facts["step"] if last.kind == "restart" else last.facts["last"] + 1)


def _expect_promised(chain: Chain, plan: Plan, first: int, last: int) -> None:
    end = phase_end(chain, plan, first)
    if end <= last and end < plan.phase(first).end:
        raise ValueError(
            f"steps {first} to {last} are more than was promised: repeated steps take the place of "
            f"the last ones of a phase. Charge none from step {end} on, and go on at "
            "journal.next_step"
        )


def next_step(chain: Chain, plan: Plan) -> int:
    """The step to be charged next; see `Journal.next_step`."""
    step = steps_charged(chain)
    while not plan.endless and step < plan.steps and step == phase_end(chain, plan, step):
        step = plan.phase(step).end
    return step


def phase_end(chain: Chain, plan: Plan, step: int) -> int:
    """The step before which the phase of `step` ends; earlier, where steps of it were repeated.

    Scaled promises are for as many charged steps in each phase as the plan has.
    """
    phase, charged = plan.phase(step), steps_charged(chain)
    scaled = plan.budgets and plan.clipping != "filtered"
    repeated = scaled and chain.last("restart") is not None
    if not repeated or not phase.first <= charged <= phase.end:
        return phase.end
    paid = charged_counts(chain, plan)[plan.all_phases.index(phase)]
    return min(phase.end, charged + max(0, phase.end - phase.first - paid))


def skipped(chain: Chain) -> int:
    """How many steps were passed over, since repeated ones had taken their place."""
    found = place = 0
    for entry in chain.entries("charge", "restart"):
        if entry.kind == "charge":
            found += entry.facts["first"] - place
            place = entry.facts["last"] + 1
        else:
            place = entry.facts["step"]
    return found


def charged_counts(
    chain: Chain, plan: Plan, until: int | None = None, at: int | None = None
) -> tuple[int, ...]:
    """How many steps were paid for in each of the plan's `all_phases`; see `Journal.charged`."""
    phases, done = plan.all_phases, steps_charged(chain) if at is None else at
    counts = [p.count(done, until or 0) for p in phases]
    for entry in chain.entries("charge"):
        first, last = entry.facts["first"], entry.facts["last"]
        counts[phases.index(plan.phase(first))] += last + 1 - first
    if until is not None and plan.budgets and plan.clipping != "filtered":
        planned = (p.end - p.first for p in phases)  # no more is ever charged
        counts = [min(count, most) for count, most in zip(counts, planned, strict=True)]
    return tuple(counts)


def turns(chain: Chain) -> tuple[int, ...]:
    """The first step not charged after the last charge, then after each restart since."""
    found = [0]
    for entry in chain.entries("charge", "restart"):
        if entry.kind == "charge":
            found = [entry.facts["last"] + 1]
        else:
            found.append(entry.facts["step"])
    return tuple(found)


def latest_entry(chain: Chain, kind: str) -> Entry | None:
    """The last entry of a kind, unless the run was restarted since."""
    last, restart = chain.last(kind), chain.last("restart")
    return last if last and (restart is None or restart.number < last.number) else None


def refresh_in_force(chain: Chain, step: int) -> int | None:
    """The step of the refresh whose norms hold at `step`; None before the first refresh."""
    last = chain.last("refresh", "restart")
    if last is not None and last.kind == "refresh" and last.facts["step"] <= step:
        return int(last.facts["step"])
    steps = [e.facts["step"] for e in current_refreshes(chain) if e.facts["step"] <= step]
    return steps[-1] if steps else None


def current_refreshes(chain: Chain) -> list[Entry]:
    """Refreshes, in order, without those of steps later than a restart went back to."""
    current: list[Entry] = []
    for entry in chain.entries("refresh", "restart"):
        if entry.kind == "refresh":
            current.append(entry)
        else:
            current = [e for e in current if e.facts["step"] <= entry.facts["step"]]
    return current


def phase_constants(phase: Phase) -> dict[str, float]:
    """Sample rate, noise and clip bound of a phase, as in entries "charge" and "refresh".

    With `beside`, where its steps release a count beside the gradient.
    """
    counted = {"beside": phase.beside} if phase.beside else {}
    return {
        "sample_rate": phase.sample_rate,
        "noise_std": phase.noise_std,
        "bound": phase.max_grad_norm,
        **counted,
    }
