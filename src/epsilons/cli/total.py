"""`epsilons total`: what several runs on one data set cost together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.accounting.printed import epsilon_text
from epsilons.accounting.sums import NOT_COVERED
from epsilons.cli.machine import print_json
from epsilons.cli.show import PRIVATE, print_distribution, warn_of_delta
from epsilons.release import Total
from epsilons.release import total as added_up
from epsilons.runs import Run
from epsilons.tables import expect_table


def total(
    runs: Annotated[list[Path], typer.Argument(help="Folders of the runs.", metavar="RUN...")],
    delta: Annotated[
        float | None, typer.Option(help="δ of the figures [the plans', if they agree].")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Id and ε of every example: .csv, .parquet or .json.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """What several runs on the same data cost together (for the curator: the output is private).

    Tuning runs count, whether their models were kept or not. Examples are matched by id and record
    digest; what is not matched is said and not added up.
    """
    if out is not None:
        expect_table(out)
    found = added_up([Run.checked(run) for run in runs], delta=delta)
    if out is not None:
        found.epsilons.save(out, ids=found.ids.tolist())
    if json:
        print_json(_for_machines(found))
        return
    _print(found)
    if out is not None:
        Console(highlight=False, soft_wrap=True).print(
            f"written         {out} (private: mode 0600)"
        )


def _print(found: Total) -> None:
    console = Console(highlight=False, soft_wrap=True)
    eps = found.epsilons
    table = Table("run", "steps", "worst case ε", "releases", "noise and coins")
    for part in found.parts:
        of = "" if part.planned_steps in (None, part.steps) else f" of {part.planned_steps}"
        table.add_row(
            part.name,
            f"{part.steps}{of}",
            epsilon_text(part.worst_case),
            str(part.releases),
            "secret" if part.randomness.secret else "not secret",
        )
    console.print(table)
    console.print(
        f"together        ε = {epsilon_text(found.worst_case)} at δ = {eps.delta:g} "
        f"(method {eps.method}), worst case per {found.per}, clip bounds and publications "
        "included"
    )
    for names in found.common:
        console.print(
            f"copies          {', '.join(names)} began as one folder; each counts in full"
        )
    for part in found.parts:
        if not part.sums_covered:
            console.print(f"arithmetic      {NOT_COVERED} in {part.name}")
    console.print(
        "note            an account of what was spent; a promise only if every plan was fixed "
        "before the first run"
    )
    console.print(PRIVATE)
    console.print(f"matched         {len(eps)} examples, by id and record digest")
    for part in found.parts:
        for reason, count in part.unmatched.items():
            console.print(f"not added up    {count} of {part.examples} in {part.name}: {reason}")
    if len(eps):
        print_distribution(console, eps, cautious=True)
    warn_of_delta(eps.delta, max(part.examples for part in found.parts))


def _for_machines(found: Total) -> dict[str, object]:
    eps = found.epsilons
    return {
        "runs": found.parts,
        "worst_case": found.worst_case,
        "delta": eps.delta,
        "method": eps.method,
        "kind": eps.kind,
        "matched": len(eps),
        "quantiles": {q: float(eps.quantile(q)) for q in (0.1, 0.5, 0.9)} if len(eps) else None,
        "copies": found.common,
    }
