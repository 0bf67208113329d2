"""`epsilons account`: ε per example from norms measured elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from epsilons.accounting.individual import METHODS
from epsilons.cli.show import print_epsilons, warn_of_delta
from epsilons.measured import account as price
from epsilons.measured import read_norms, steps_of_rows
from epsilons.tables import expect_table
from epsilons.terminal import counting


def account(
    norms: Annotated[Path, typer.Argument(help="Norms (rows, n): .npy, .npz or .parquet.")],
    *,
    noise_std: Annotated[
        str,
        typer.Option(
            help="Standard deviation of the noise on the sum, in units of the gradient: "
            "noise multiplier times clip bound."
        ),
    ],
    sample_rate: Annotated[str, typer.Option(help="Sampling probability p.")],
    max_grad_norm: Annotated[str, typer.Option(help="Clip bound C.")],
    steps: Annotated[
        str | None,
        typer.Option(
            help="For how many training steps each row of norms held, until the next was measured: "
            "one number for all rows, or one per row. Every step of the training counts, for "
            "everyone, drawn or not; the numbers add up to its length. In an .npz: its `steps`."
        ),
    ] = None,
    delta: Annotated[float, typer.Option(help="δ of the ε's.")],
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = METHODS[0],
    clipping: Annotated[str, typer.Option(help="max or individual.")] = "max",
    rounding: Annotated[str | None, typer.Option(help="up or nearest [none].")] = None,
    levels: Annotated[int | None, typer.Option(help="Levels of the histogram of norms.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="File to write: .csv, .parquet or .json [NORMS.epsilons.parquet]."),
    ] = None,
) -> None:
    """ε per example from norms measured elsewhere (for the curator: the output is private).

    Steps, rate, noise and bound: one number, or one per row separated by commas.
    """
    measured = read_norms(norms)
    target = expect_table(norms.with_suffix(".epsilons.parquet") if out is None else out)
    each = steps_of_rows(measured, None if steps is None else _numbers("--steps", steps))
    with counting("examples", measured.norms.shape[1]) as advance:
        epsilons = price(
            measured,
            each,
            noise_std=_numbers("--noise-std", noise_std),
            sample_rate=_numbers("--sample-rate", sample_rate),
            max_grad_norm=_numbers("--max-grad-norm", max_grad_norm),
            delta=delta,
            method=method,  # type: ignore[arg-type]  # checked where it is used
            levels=levels,
            rounding=rounding,  # type: ignore[arg-type]
            clipping=clipping,  # type: ignore[arg-type]
            progress=advance,
        )
    epsilons.save(target, ids=None if measured.ids is None else measured.ids.tolist())
    warn_of_delta(delta, len(epsilons))
    console = Console(highlight=False)
    console.print(f"steps           {each.sum():g} in all, for {len(each)} rows of norms")
    print_epsilons(console, epsilons)
    console.print(f"written         {target} (private: mode 0600)", soft_wrap=True)


def _numbers(option: str, text: str) -> NDArray[np.float64]:
    """One number (), or several (k,) separated by commas."""
    try:
        found = np.array([float(part) for part in text.split(",")])
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a number or numbers with commas") from None
    return found if len(found) > 1 else found[0]
