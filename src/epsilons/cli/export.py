"""`epsilons export`: every example's ε as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.runs import Run
from epsilons.tables import expect_table
from epsilons.terminal import counting


def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    to: Annotated[Path, typer.Option(help="File to write: .csv, .parquet or .json.")],
    delta: Annotated[float | None, typer.Option(help="δ of the ε's [the plan's].")] = None,
    processes: Annotated[int, typer.Option(help="How many processes price the examples.")] = 1,
) -> None:
    """Id and ε of every training example (for the curator: private)."""
    expect_table(to)
    opened = Run.checked(run)
    with counting("examples", opened.plan.n) as advance:
        epsilons = opened.epsilons(delta, progress=advance, processes=processes)
    epsilons.save(to, ids=opened.examples.ids.tolist())
    Console(highlight=False).print(
        f"{to}: {len(epsilons)} examples, δ = {epsilons.delta:g}, {epsilons.method}, "
        f"{epsilons.kind} (private: mode 0600)",
        soft_wrap=True,
    )
