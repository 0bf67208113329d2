"""`epsilons init`: settings proposed for a CSV file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.accounting.printed import epsilon_text
from epsilons.proposal import propose, train_command
from epsilons.terminal import counting


def init(
    data: Annotated[Path, typer.Argument(metavar="DATA.csv", help="A CSV file with a header.")],
    out: Annotated[Path, typer.Option(help="File to write, new.")] = Path("settings.toml"),
    target: Annotated[
        str | None, typer.Option(help="The column to predict [proposed by name, or the last].")
    ] = None,
) -> None:
    """Write settings for a CSV file, to be checked and trained (for the curator)."""
    size = data.stat().st_size if data.is_file() else 0
    with counting("bytes", size) as advance:
        proposal = propose(data, out=out, target=target, progress=advance)
    proposal.write(out)
    roles, plan = proposal.roles, proposal.plan
    names = {
        "target": [roles.target.name],
        "id": [] if roles.id is None else [roles.id.name],
        "owner": [] if roles.owner is None else [roles.owner.name],
        "groups": [column.name for column in roles.groups],
        "inputs": [column.name for column in roles.inputs],
        "ignored": [column.name for column, _ in roles.ignored],
    }
    Console(highlight=False, markup=False).print(
        *(f"{what:<16}{', '.join(found) or 'none'}" for what, found in names.items()),
        f"privacy         ε = {epsilon_text(plan.worst_case())} at δ = {plan.delta:g} for each of "
        f"{plan.n} rows: {plan.steps} steps with noise multiplier {plan.noise_multiplier:.3f}",
        f"written         {out}",
        f"next            {train_command(data, out)}",
        sep="\n",
        soft_wrap=True,
    )
    Console(stderr=True, highlight=False, soft_wrap=True, markup=False).print(
        f"check {out} first: its ranges, categories and classes were read off the data, which the "
        "guarantee does not cover. Put in what is known without the data, and delete the line "
        "learn_encoding"
    )
