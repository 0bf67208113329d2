"""`epsilons compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.analysis import compare as compared
from epsilons.cli.machine import print_json
from epsilons.cli.show import PRIVATE
from epsilons.runs import Run


def compare(
    run: Annotated[Path, typer.Argument(help="Folder of one run.")],
    other: Annotated[Path, typer.Argument(help="Folder of the other run.")],
    by: Annotated[str | None, typer.Option(help="The column of groups [the first].")] = None,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Two runs side by side: clippings, clip bounds, private or not (for the curator)."""
    from epsilons.report.compared import number_rows

    left, right = Run.checked(run), Run.checked(other)
    column = by or next((c for c in left.examples.groups if c in right.examples.groups), None)
    found = compared(left, right, column)
    if json:
        print_json(
            {
                "runs": [str(run), str(other)],
                "private": [found.left.private, found.right.private],
                "left": found.left.numbers(),
                "right": found.right.numbers(),
                "rank_correlation": found.rank_correlation,
                "differences": found.differences,
            }
        )
        return
    table = Table("", str(run), str(other))
    for row in number_rows(found):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(PRIVATE)
    console.print(table)
    if found.rank_correlation is not None:
        console.print(
            f"rank correlation of ε over {found.shared} common examples: "
            f"{found.rank_correlation:.3f}"
        )
    plans = Table("plan", str(run), str(other))
    for name, (a, b) in found.differences.items():
        plans.add_row(name, f"{a}", f"{b}")
    if found.differences:
        console.print(plans)
