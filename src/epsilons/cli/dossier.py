"""`epsilons dossier` and `epsilons check-statement`: the curator's papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.files import private_file, public_file


def dossier(
    run: Annotated[Path, typer.Argument(help="Folder of the run, or of its public half.")],
    format: Annotated[
        str, typer.Option(help="One of model-card, registry, nist, dpia, statement.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="With exact figures, for the curator alone.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File to write [to stdout].")] = None,
    key: Annotated[
        Path | None, typer.Option(help="Private Ed25519 key, PEM: signs the statement.")
    ] = None,
) -> None:
    """Write a paper about a run: for a model hub, a registry, an auditor, a DPIA, or signed.

    From the public half alone, unless --private.
    """
    from epsilons.report.dossier import FORMATS, read_facts, sign
    from epsilons.report.dossier import dossier as written

    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is unknown; choose one of {', '.join(FORMATS)}")
    if (format == "statement") != (key is not None):
        raise ValueError("--key and --format statement belong together: a statement is signed")
    facts = read_facts(run, private=private)
    text = written(facts, format) if key is None else sign(facts, key)
    if out is None:
        print(text, end="")
        return
    with (private_file if private else public_file)(out) as file:
        file.write(text.encode())
    kept = "private: mode 0600" if private else "public"
    Console(highlight=False).print(f"{out} ({kept})", soft_wrap=True)


def check_statement(
    file: Annotated[Path, typer.Argument(help="The signed statement.")],
    public_key: Annotated[Path, typer.Option(help="The signer's public key, PEM.")],
    run: Annotated[
        Path | None, typer.Option(help="A run whose public files must be those that were signed.")
    ] = None,
) -> None:
    """Check who signed a statement of a run, and that nothing was changed since (for everyone).

    What was changed, or signed with another key, is exit code 2.
    """
    from epsilons.report.dossier import check_signed

    found = check_signed(file, public_key, run=run)
    files = "" if run is None else f"; the public files of {run} are those that were signed"
    Console(highlight=False).print(
        f"OK: signed with this key, unchanged{files}",
        f"run             {found['run']}, stated on {found['date']}",
        f"guaranteed      {found['guaranteed']['says']}",
        sep="\n",
        soft_wrap=True,
        markup=False,
    )
