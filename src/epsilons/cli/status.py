"""`epsilons status`: how far a run is, and what it costs so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.accounting.printed import epsilon_text
from epsilons.cli.show import (
    PRIVATE,
    bound_line,
    owner_lines,
    parts_line,
    person_line,
    promise_lines,
    small_bound_line,
    sums_line,
)
from epsilons.release import releases_of
from epsilons.runs import Run

_COUNTED = {"record": "examples", "person": "persons"}


def status(run: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> None:
    """Steps, kind, worst case so far, chain; below the line, private figures (for the curator)."""
    opened = Run.open(run)
    verified = opened.verify()
    plan, journal, epsilons = opened.plan, opened.journal, verified.epsilons
    ours = (opened.path / "public" / "settings.json").exists()
    way_on = "; epsilons resume goes on" if ours else ""
    state = "finished" if opened.finished else f"not finished{way_on}"
    of = "" if plan.endless else f" of {plan.steps}"
    again = f", and {journal.repeated} more that were repeated" if journal.repeated else ""
    releases = releases_of(opened)
    total = journal.worst_case(releases=releases)
    end = ""
    if not plan.endless:
        last = journal.worst_case(until=plan.steps, releases=releases)
        end = f"; at the end {epsilon_text(last)}"
    sealed = ", sealed" if verified.sealed else ""
    Console(highlight=False).print(
        f"run             {opened.path} ({state})",
        f"steps           {verified.steps}{of} charged{again}",
        f"kind            {epsilons.kind}, clipping {plan.clipping}, {plan.n} {_COUNTED[plan.per]}",
        f"worst case      ε = {epsilon_text(total)} at δ = {epsilons.delta:g} so far{end} "
        f"per {plan.per} (method {epsilons.method})",
        *parts_line(opened, until=plan.steps),
        *promise_lines(opened),
        person_line(opened),
        *bound_line(opened),
        f"randomness      {journal.randomness}",
        *sums_line(opened),
        f"chain           OK, {verified.entries} entries{sealed}",
        PRIVATE,
        f"at worst case   {epsilons.at_worst_case.mean():.1%} of the examples",
        *small_bound_line(epsilons),
        *owner_lines(opened, epsilons),
        sep="\n",
        soft_wrap=True,
    )
