"""`epsilons attack`: membership inference by a threshold on the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.analysis import loss_threshold_attack
from epsilons.analysis.attack import SPLITS, expect_comparable
from epsilons.analysis.groups import SMALL
from epsilons.cli.machine import print_json
from epsilons.cli.show import PRIVATE
from epsilons.runs import Run


def attack(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    by: Annotated[
        str | None, typer.Option(help="A column of groups, or COLUMN,COLUMN for intersections.")
    ] = None,
    splits: Annotated[int, typer.Option(help="Random splits that are averaged.", min=1)] = SPLITS,
    seed: Annotated[int, typer.Option(help="Draws the splits.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """How often members are told from non-members by their loss (for the curator)."""
    folder = Run.checked(run)
    expect_comparable(folder)
    columns = None if by is None else tuple(by.split(","))
    found = loss_threshold_attack(folder.examples, folder.test, columns, splits=splits, seed=seed)
    if json:
        print_json(found)
        return
    table = Table("group", "members", "right guesses", "95 % interval", "found at 1 % false")
    for row in (*sorted(found.rows, key=lambda row: -row.success), found.everyone):
        name = "everyone" if row.group is None else row.group
        table.add_row(
            f"{name} *" if row.small else name,
            str(row.n),
            f"{row.success:.1%}",
            f"{row.interval.low:.1%}–{row.interval.high:.1%}",
            f"{row.true_positives:.1%}",
        )
    console = Console(highlight=False)
    console.print(PRIVATE)
    console.print(table)
    console.print(
        f"50 % is guessing; averaged over {found.splits} splits. A weak attack: what it does not "
        "find, a better one may.",
        soft_wrap=True,
    )
    if any(row.small for row in (*found.rows, found.everyone)):
        console.print(f"* fewer than {SMALL} members or non-members: too few to say much")
