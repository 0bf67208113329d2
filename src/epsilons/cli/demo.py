"""`epsilons demo`: the whole walk on the embedded digits."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.cli.show import accuracy_line, print_epsilons


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run, new or empty [runs/demo-1, -2, …].")
    ] = None,
) -> None:
    """Train on the embedded digits and show ε per example (under a minute)."""
    from epsilons import job
    from epsilons.analysis import group_summary
    from epsilons.report import write_report

    folder = _unused("runs/demo") if out is None else out
    try:
        run = job.demo(folder)
    except KeyboardInterrupt as stopped:
        stopped.args = (f"{str(stopped) or 'stopped'}: epsilons demo --out {folder}",)
        raise
    epsilons = run.epsilons()
    report = write_report(run)
    console = Console(highlight=False)
    print_epsilons(console, epsilons, private=accuracy_line(run.test))
    table = Table("class", "examples", "mean ε", "test accuracy")
    for row in group_summary(epsilons, run.examples, run.test, "class"):
        table.add_row(row.group, str(row.n), f"{row.mean_epsilon:.3f}", f"{row.test_accuracy:.1%}")
    console.print(table)
    console.print(
        f"run folder      {run.path}", f"report          {report}", sep="\n", soft_wrap=True
    )


def _unused(stem: str) -> Path:
    """The first of stem-1, stem-2, … that is not there."""
    return next(path for k in count(1) if not (path := Path(f"{stem}-{k}")).exists())
