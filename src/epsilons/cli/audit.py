"""`epsilons audit`: try to contradict what a run claims."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table

from epsilons.accounting.printed import epsilon_text
from epsilons.cli.machine import print_json
from epsilons.files import private_file
from epsilons.terminal import counting

_CODES = {"kept": 0, "contradicted": 1, "inconclusive": 3}
_CANARIES = 10_000


def audit(
    run: Annotated[Path, typer.Argument(help="Folder of the run; it is only read.")],
    seconds: Annotated[float, typer.Option(help="How long, about.", min=1)] = 60.0,
    canaries: Annotated[
        int, typer.Option(help="Planted examples of each fresh run.", min=100)
    ] = _CANARIES,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Try to contradict what a run claims (for the curator).

    Exit code 0: kept; 1: contradicted; 3: inconclusive. Writes private/audit.json.
    """
    from epsilons import job

    with counting("audit", 100, TextColumn("{task.fields[now]}"), now="") as show:
        found = job.audit(
            run, seconds, canaries=canaries,
            progress=lambda share, what: show(round(100 * share), now=what),
        ).to_dict()  # fmt: skip
    with private_file(run / "private" / "audit.json") as file:
        file.write(jsons.dumps(found, indent=2, ensure_ascii=False).encode() + b"\n")
    if json:
        print_json(found)
    else:
        _print(found)
    raise typer.Exit(_CODES[found["outcome"]])


def _print(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    table = Table("planted examples", "stated ε", "at least (95 %)", "trials", "")
    for row in found["strata"]:
        bounds = row["bounds"]
        table.add_row(
            row["name"], epsilon_text(row["claim"]),
            f"{max(bounds['family'], bounds['exact']):.3f}", str(row["trials"]), row["outcome"],
        )  # fmt: skip
    console.print(table)
    checks = Table("check", "kept", "of")
    for instrument in dict.fromkeys(check["instrument"] for check in found["checks"]):
        outcomes = [c["outcome"] for c in found["checks"] if c["instrument"] == instrument]
        checks.add_row(instrument, str(outcomes.count("kept")), str(len(outcomes)))
    console.print(checks)
    for line in (*found["reasons"], *(f"not tried: {each}" for each in found["skipped"])):
        console.print(line, soft_wrap=True)
    console.print(f"{found['outcome']}: {found['sentence']}", soft_wrap=True)
