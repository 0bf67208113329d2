"""`epsilons train`: one settings file carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from epsilons.cli.show import (
    accuracy_line,
    owner_lines,
    parts_line,
    person_line,
    print_epsilons,
    promise_lines,
    sums_line,
    warn_of_delta,
)
from epsilons.runs import Run
from epsilons.settings import Settings
from epsilons.terminal import speaks


def train(
    config: Annotated[Path, typer.Argument(help="Settings of the run, a flat TOML file.")],
    out: Annotated[Path, typer.Option(help="Folder of the run, new or empty.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(help="Settings to change: key=value …", metavar="KEY=VALUE"),
    ] = None,
) -> None:
    """Train as a settings file says (for the curator: the run folder has a private half).

    Ctrl-C and SIGTERM stop between two steps; `epsilons resume` goes on.
    """
    settings = Settings.read(config, changes or ())
    talk = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not speaks())
    if settings.seed is not None:
        talk.print("seed: everyone can compute sampling and noise; leave it out for real data")
    if settings.learn_encoding:
        talk.print("learn_encoding: ranges and categories of the data are outside the guarantee")
    if settings.max_grad_norm == "median":
        talk.print(
            f"max_grad_norm: a median for ε = {settings.median_epsilon:g} at "
            f"δ = {settings.median_delta:g}; its cost is part of the worst case"
        )
    from epsilons import job

    print_run(out, lambda: job.train(settings, out))


def print_run(path: Path, carry_out: Callable[[], Run]) -> None:
    """Carry a run out and print what it has come to; a stopped one says how to go on."""
    try:
        run = carry_out()
        if not speaks():
            return
        warn_of_delta(run.plan.delta, run.plan.n)
        console = Console(highlight=False)
        epsilons = run.epsilons()
        private = [*accuracy_line(run.test), *owner_lines(run, epsilons)]
        public = [*parts_line(run), *promise_lines(run), person_line(run), *sums_line(run)]
        print_epsilons(console, epsilons, public, private, run.plan.per)
    except KeyboardInterrupt as stopped:
        stopped.args = (f"{str(stopped) or 'stopped'}: {_way_on(path)}",)
        raise
    console.print(f"run folder      {run.path}", soft_wrap=True)


def _way_on(path: Path) -> str:
    private = path / "private"
    if (private / "model.pt").exists() and not (private / "checkpoint.pt").exists():
        return f"the run is finished, see epsilons status {path}"
    if (path / "public" / "settings.json").exists():
        return f"epsilons resume {path}"
    return "no step was taken, the same command in a new folder starts it"
