"""The command line: parse, call one function, print. Results to stdout, talk to stderr.

Verbs by reader: `plan` (nobody's data), `demo` (the curator of a public data set).
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from epsilons.accounting.individual import METHODS
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.measured import account as price
from epsilons.measured import read_norms
from epsilons.terminal import counting

app = typer.Typer(
    help="One ε per training example: individual privacy accounting for DP-SGD.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_BARS = " ▏▎▍▌▋▊▉█"


def main() -> None:
    """Run the command line; wrong input is one sentence on stderr and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            "[bold red]error:[/]", str(error)
        )
        sys.exit(2)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"epsilons {version('epsilons')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


@app.command()
def plan(
    n: Annotated[int, typer.Option(help="Number of training examples.")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size.")],
    epochs: Annotated[float, typer.Option(help="Passes over the data.")],
    epsilon: Annotated[float, typer.Option(help="Worst-case ε to meet.")],
    delta: Annotated[float, typer.Option(help="δ of the guarantee.")],
) -> None:
    """The least noise that meets a worst-case ε, and what it gives (needs nobody's data)."""
    table = Table("calibrated with", "noise multiplier", *(f"ε by {m}" for m in METHODS))
    found = None
    for method in METHODS:
        found = Plan.for_epsilon(
            epsilon,
            method,
            delta=delta,
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            max_grad_norm=1.0,
        )
        worst = (f"{found.worst_case(m):.4f}" for m in METHODS)
        table.add_row(method, f"{found.noise_multiplier:.5f}", *worst)
    assert found is not None
    console = Console(highlight=False)
    console.print(f"sampling rate {found.sample_rate:.6g}, {found.steps} steps, δ = {delta:g}")
    console.print(table)


@app.command()
def account(
    norms: Annotated[Path, typer.Argument(help="Norms (rows, n): .npy, .npz or .parquet.")],
    sample_rate: Annotated[str, typer.Option(help="Sampling probability p.")],
    noise_std: Annotated[str, typer.Option(help="Standard deviation of the noise on the sum.")],
    max_grad_norm: Annotated[str, typer.Option(help="Clip bound C.")],
    delta: Annotated[float, typer.Option(help="δ of the ε's.")],
    steps: Annotated[
        str | None, typer.Option(help="Steps that each row stands for; in an .npz: its `steps`.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = METHODS[0],
    clipping: Annotated[str, typer.Option(help="max or individual.")] = "max",
    rounding: Annotated[str | None, typer.Option(help="up or nearest [none].")] = None,
    levels: Annotated[int | None, typer.Option(help="Levels of the histogram of norms.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Parquet file to write [NORMS.epsilons.parquet].")
    ] = None,
) -> None:
    """ε per example from norms measured elsewhere (for the curator: the output is private).

    Steps, rate, noise and bound: one number, or one per row separated by commas.
    """
    measured = read_norms(norms)
    target = norms.with_suffix(".epsilons.parquet") if out is None else out
    with counting("examples", measured.norms.shape[1]) as advance:
        epsilons = price(
            measured,
            None if steps is None else _numbers("--steps", steps),
            sample_rate=_numbers("--sample-rate", sample_rate),
            noise_std=_numbers("--noise-std", noise_std),
            max_grad_norm=_numbers("--max-grad-norm", max_grad_norm),
            delta=delta,
            method=method,  # type: ignore[arg-type]  # checked where it is used
            levels=levels,
            rounding=rounding,  # type: ignore[arg-type]
            clipping=clipping,  # type: ignore[arg-type]
            progress=advance,
        )
    epsilons.to_parquet(target, ids=None if measured.ids is None else measured.ids.tolist())
    console = Console(highlight=False)
    _print_epsilons(console, epsilons)
    console.print(f"written         {target} (private: mode 0600)", soft_wrap=True)


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run, new or empty [runs/demo-1, -2, …].")
    ] = None,
) -> None:
    """Train on the embedded digits and show ε per example (under a minute)."""
    from epsilons import job
    from epsilons.analysis import group_summary
    from epsilons.report import write_report

    run = job.demo(_unused("runs/demo") if out is None else out)
    epsilons = run.epsilons()
    report = write_report(run)
    console = Console(highlight=False)
    assert run.test is not None
    assert run.test.correct is not None
    console.print(
        f"\ntest accuracy   {run.test.correct.mean():.1%} of {len(run.test)} held-out digits"
    )
    _print_epsilons(console, epsilons)
    table = Table("class", "examples", "mean ε", "test accuracy")
    for row in group_summary(epsilons, run.examples, run.test, "class"):
        table.add_row(row.group, str(row.n), f"{row.mean_epsilon:.3f}", f"{row.test_accuracy:.1%}")
    console.print(table)
    console.print(
        f"run folder      {run.path}", f"report          {report}", sep="\n", soft_wrap=True
    )


def _numbers(option: str, text: str) -> NDArray[np.float64]:
    """One number (), or several (k,) separated by commas."""
    try:
        found = np.array([float(part) for part in text.split(",")])
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a number or numbers with commas") from None
    return found if len(found) > 1 else found[0]


def _unused(stem: str) -> Path:
    """The first of stem-1, stem-2, … that is not there."""
    return next(path for k in count(1) if not (path := Path(f"{stem}-{k}")).exists())


def _print_epsilons(console: Console, epsilons: Epsilons) -> None:
    """Worst case, kind, quantiles and a histogram in characters."""
    console.print(
        f"worst case      ε = {epsilons.worst_case:.3f} at δ = {epsilons.delta:g} "
        f"(method {epsilons.method})",
        f"individual ε    {epsilons.kind} for each of {len(epsilons.values)} examples, "
        f"{epsilons.at_worst_case.mean():.1%} at the worst case",
        "quantiles       "
        + "  ".join(f"{q:.0%} ≤ {epsilons.quantile(q):.3f}" for q in (0.1, 0.3, 0.5, 0.7, 0.9)),
        sep="\n",
        soft_wrap=True,
    )
    console.print("\n".join(_histogram(epsilons)), soft_wrap=True)


def _histogram(epsilons: Epsilons, bins: int = 16, width: int = 50) -> list[str]:
    """Rows of `ε range, bar, count`."""
    counts, edges = np.histogram(epsilons.values, bins=bins, range=(0, epsilons.worst_case))
    eighths = np.ceil(counts / max(1, counts.max()) * width * 8).astype(int)
    return [
        f"  {low:5.2f}–{high:5.2f} {'█' * (bar // 8)}{_BARS[bar % 8].strip()} {count}"
        for low, high, bar, count in zip(edges[:-1], edges[1:], eighths, counts, strict=True)
    ]
