"""`epsilons plan`: noise for a worst case, before there is any data."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.accounting.individual import METHODS
from epsilons.accounting.plan import Plan, Unit
from epsilons.accounting.printed import epsilon_text, percent_text
from epsilons.accounting.sums import NOT_COVERED, Sums
from epsilons.cli.show import warn_of_delta


def plan(
    n: Annotated[int, typer.Option(help="Number of training examples, or of their owners.")],
    epsilon: Annotated[float, typer.Option(help="Worst-case ε to meet.")],
    batch_size: Annotated[int, typer.Option(help="Expected batch size.")],
    epochs: Annotated[float, typer.Option(help="Passes over the data.")],
    delta: Annotated[float, typer.Option(help="δ of the guarantee.")],
    sums: Annotated[Sums, typer.Option(help="Sums over examples: float64 or float32.")] = "float64",
    unit: Annotated[
        Unit, typer.Option(help="What n and the batch size count: record or owner.")
    ] = "record",
) -> None:
    """The least noise that meets a worst-case ε, and what it gives (needs nobody's data)."""
    table = Table("calibrated with", "noise multiplier", *(f"ε by {m}" for m in METHODS))
    found = None
    for method in METHODS:
        found = Plan.for_epsilon(
            epsilon,
            method=method,
            n=n,
            batch_size=batch_size,
            epochs=epochs,
            max_grad_norm=1.0,
            delta=delta,
            sums=sums,
        )
        if not found.steps:
            raise ValueError(
                f"--epochs {epochs:g} is not one step of --batch-size {batch_size} among --n {n}; "
                f"expected at least {found.sample_rate:g}"
            )
        worst = (epsilon_text(found.worst_case(m)) for m in METHODS)
        table.add_row(method, f"{found.noise_multiplier:.5f}", *worst)
    assert found is not None
    warn_of_delta(delta, n)
    console = Console(highlight=False)
    console.print(
        f"sampling rate {found.sample_rate:.6g}, {found.steps} steps, δ = {delta:g}, "
        f"ε per {'person' if unit == 'owner' else 'record'}"
    )
    console.print(table)
    times = len(found.refresh_steps)
    console.print(
        f"gradient norms of all {'owners' if unit == 'owner' else 'examples'} are refreshed "
        f"{times} time{'' if times == 1 else 's'} "
        f"unless said otherwise (refreshes_per_epoch), which takes at most "
        f"{percent_text(found.refresh_share, 0)} of the run's time",
        soft_wrap=True,
    )
    if found.sums == "float32":
        console.print(f"with float32 sums, {NOT_COVERED}", soft_wrap=True)
