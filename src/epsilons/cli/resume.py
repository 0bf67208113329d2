"""`epsilons resume`: go on with a run that was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from epsilons.cli.train import print_run


def resume(run: Annotated[Path, typer.Argument(help="Folder of the run.")]) -> None:
    """Go on with a run that was stopped (for the curator).

    With a seed it ends as if it had not been; without, it goes on with fresh noise.
    """
    from epsilons import job

    print_run(run, lambda: job.resume(run))
