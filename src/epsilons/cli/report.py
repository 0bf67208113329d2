"""`epsilons report`: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.runs import Run


def report(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    public: Annotated[
        bool, typer.Option("--public", help="From published statistics alone, into public/.")
    ] = False,
    compare: Annotated[
        Path | None, typer.Option(help="Another run, to be put beside this one.")
    ] = None,
) -> None:
    """Write the report of a run (for the curator; with --public, for everyone)."""
    from epsilons.report import write_comparison, write_public_report, write_report

    console = Console(highlight=False)
    if public and compare is not None:
        raise ValueError("--public and --compare don't go together: a comparison is private")
    if public:
        console.print(f"{write_public_report(run)} (public)", soft_wrap=True)
    elif compare is not None:
        page = write_comparison(Run.checked(run), Run.checked(compare))
        console.print(f"{page} (private: mode 0600)", soft_wrap=True)
    else:
        console.print(f"{write_report(Run.checked(run))} (private: mode 0600)", soft_wrap=True)
