"""`epsilons owner`: what one owner is told about their own records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from epsilons.release import owner_statement, statement_html, statement_text
from epsilons.runs import Run

_FORMATS = ("text", "json", "html")


def owner(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    identity: Annotated[str, typer.Argument(metavar="ID", help="The owner, or a record's id.")],
    format: Annotated[str, typer.Option(help=f"One of {', '.join(_FORMATS)}.")] = "text",
    delta: Annotated[float | None, typer.Option(help="δ of the figures [the plan's].")] = None,
    other: Annotated[
        list[Path] | None,
        typer.Option("--with", help="Another run on the same data, added up; may be repeated."),
    ] = None,
) -> None:
    """The privacy statement of one owner (for that person alone)."""
    if format not in _FORMATS:
        raise ValueError(f"--format {format!r} is unknown; choose one of {', '.join(_FORMATS)}")
    others = [Run.checked(path) for path in other or ()]
    statement = owner_statement(Run.checked(run), identity, delta=delta, others=others)
    if format == "json":
        print(json.dumps(statement.to_dict(), indent=2, ensure_ascii=False))
    else:
        print((statement_html if format == "html" else statement_text)(statement), end="")
