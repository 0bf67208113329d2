"""How results look on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from epsilons.accounting.composition import NOTHING
from epsilons.accounting.printed import epsilon_text
from epsilons.accounting.promises import Promise
from epsilons.accounting.results import Epsilons, small_bound
from epsilons.accounting.sums import NOT_COVERED
from epsilons.examples import Examples
from epsilons.journal.run_entries import clip_moves
from epsilons.release import meaningful, person_worst_case, persons, releases_of
from epsilons.runs import Run

_BARS = " ▏▎▍▌▋▊▉█"


def warn_of_delta(delta: float, n: int) -> None:
    """A line on stderr if δ is so large that it allows a whole record to be revealed."""
    if delta * n >= 1:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"delta: {delta:g} is not below 1/n = {1 / n:.2g}; with such a δ, publishing one "
            "record in full counts as private. Choose it well below 1/n."
        )


def kept_by(promise: Promise) -> str:
    """How a promise is kept, in a few words."""
    if promise.share is not None:
        return f"{promise.share:.4f} of the clip bound"
    if promise.order is not None:
        return f"a filter at Rényi order {promise.order:.4g}"
    return "a Gaussian filter"


def promise_lines(run: Run) -> list[str]:
    """What was promised before training, by budget; not who has which, nor how many are out."""
    at = run.plan.delta
    return [
        f"promised        ε = {epsilon_text(promise.epsilon)} at δ = {at:g} with the budget "
        f"{promise.budget:g}, by {kept_by(promise)}"
        for promise in run.promises
    ]


PRIVATE = "private         the figures below are exact: for the curator alone"


def accuracy_line(test: Examples | None) -> list[str]:
    """The share of held-out examples that the model has right, if it is known; private."""
    if test is None or test.correct is None:
        return []
    return [f"test accuracy   {test.correct.mean():.1%} of {len(test)} held-out examples"]


def person_line(run: Run) -> str:
    """The guarantee per person, as far as it is public."""
    most = run.plan.max_records_per_owner
    if run.plan.unit == "owner":
        return (
            f"per person      all of the above: one coin draws a person with up to {most} records"
        )
    if most is None:
        return "per person      no bound is stated: max_records_per_owner is not given"
    at, releases = run.plan.delta, releases_of(run)
    now = person_worst_case(run, most, releases)
    end = person_worst_case(run, most, releases, until=run.plan.steps)
    later = "" if run.plan.endless or end == now else f" so far; at the end {epsilon_text(end)}"
    return (
        f"per person      ε = {epsilon_text(now)} at δ = {at:g}{later} for up to {most} records "
        f"together{'' if meaningful(now, at) else ': no meaningful guarantee'}"
    )


def owner_lines(run: Run, epsilons: Epsilons) -> list[str]:
    """Records per owner and what they cost together, if the run has owners; private."""
    found = None if epsilons.kind == "none" else persons(run, epsilons)
    if found is None:
        return []
    least, half, most = (int(np.quantile(found.records, q, method="higher")) for q in (0, 0.5, 1))
    nothing = "" if meaningful(found.worst_case, found.delta) else ": no meaningful guarantee"
    return [
        f"owners          {len(found)} with {least} to {most} records, half with at most {half}",
        f"worst owner     ε = {epsilon_text(found.worst_case)} for {most} records together, "
        f"whatever they contain{nothing}",
        "combined ε      "
        + "  ".join(f"{q:.0%} ≤ {epsilon_text(float(found.quantile(q)))}" for q in (0.5, 0.9, 1.0))
        + " of the owners, all their records together"
        + (", cautious" if epsilons.kind == "estimate" else ""),
    ]


def small_bound_line(epsilons: Epsilons) -> list[str]:
    """What is to be said where everyone is at the worst case; private."""
    said = small_bound(epsilons)
    return [] if said is None else [f"clip bound      {said}"]


def sums_line(run: Run) -> list[str]:
    """What the guarantee leaves out of the arithmetic; nothing if nothing."""
    covered = run.journal.sums_covered or run.plan.kind == "none"
    return [] if covered else [f"arithmetic      {NOT_COVERED}"]


def bound_line(run: Run) -> list[str]:
    """Where a clip bound that adapts is now; public, as its course is."""
    if run.plan.adaptive is None:
        return []
    moves = clip_moves(run.journal)
    now = moves[-1].bound if moves else run.plan.max_grad_norm
    return [
        f"clip bound      {now:.4g} now, adaptive from {run.plan.max_grad_norm:.4g} in "
        f"{len(moves)} moves; each is part of the worst case"
    ]


def parts_line(run: Run, until: int | None = None) -> list[str]:
    """What the worst case of a run consists of; nothing if it is the training alone."""
    plan, releases = run.plan, releases_of(run)
    if not releases.mu or plan.kind == "none":
        return []
    training = run.journal.worst_case(until=until, releases=NOTHING)
    others = {"clip bound": plan.clip_bound, "publications": releases.without(plan.clip_bound)}
    parts = [f"training ε = {epsilon_text(training)}"]
    parts += [f"{k} ε = {epsilon_text(r.epsilon(plan.delta))}" for k, r in others.items() if r.mu]
    return [f"consists of     {', '.join(parts)}, which compose to less than their sum"]


def print_epsilons(
    console: Console,
    epsilons: Epsilons,
    public: Sequence[str] = (),
    private: Sequence[str] = (),
    per: str = "record",
) -> None:
    """Worst case, kind, quantiles and a histogram in characters; all but the first are private.

    `public`, `private`: further lines, above and below the one that says so. `per`: whom each ε is
    about.
    """
    console.print(
        f"worst case      ε = {epsilon_text(epsilons.worst_case)} at δ = {epsilons.delta:g} "
        f"per {per} (method {epsilons.method})",
        *public,
        PRIVATE,
        *private,
        sep="\n",
        soft_wrap=True,
    )
    print_distribution(console, epsilons)


def print_distribution(console: Console, epsilons: Epsilons, *, cautious: bool = False) -> None:
    """Kind, quantiles and a histogram of the values; private. `cautious`: what estimates are."""
    reading = []
    if cautious and epsilons.kind == "estimate":
        reading = ["estimates       cautious: by the larger of the norms before and after a step"]
    elif epsilons.cautious is not epsilons.values:
        reading = [
            "estimates       by the norm nearest in time, often too low; a person is told the "
            "cautious ones"
        ]
    console.print(
        f"individual ε    {epsilons.kind} for each of {len(epsilons.values)} examples, "
        f"{epsilons.at_worst_case.mean():.1%} at the worst case",
        *reading,
        *small_bound_line(epsilons),
        "quantiles       "
        + "  ".join(
            f"{q:.0%} ≤ {epsilon_text(float(epsilons.quantile(q)))}"
            for q in (0.1, 0.3, 0.5, 0.7, 0.9)
        ),
        sep="\n",
        soft_wrap=True,
    )
    console.print("\n".join(_histogram(epsilons)), soft_wrap=True)


def _histogram(epsilons: Epsilons, bins: int = 16, width: int = 50) -> list[str]:
    """Rows of `ε range, bar, count`; none without a finite worst case."""
    if not np.isfinite(epsilons.worst_case):
        return ["  no histogram: the worst case is ∞, which promises nothing"]
    counts, edges = np.histogram(epsilons.values, bins=bins, range=(0, epsilons.worst_case))
    eighths = np.ceil(counts / max(1, counts.max()) * width * 8).astype(int)
    return [
        f"  {low:5.2f}–{high:5.2f} {'█' * (bar // 8)}{_BARS[bar % 8].strip()} {count}"
        for low, high, bar, count in zip(edges[:-1], edges[1:], eighths, counts, strict=True)
    ]
