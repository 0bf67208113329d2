"""`epsilons publish`: statistics of the individual ε's, for everyone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.accounting.printed import epsilon_text
from epsilons.cli.show import parts_line
from epsilons.release import Budget, Estimate, Limit, Statistics, releases_of
from epsilons.release import publish as release
from epsilons.release.statistics import METHODS, QUANTILES
from epsilons.runs import Run


def publish(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    epsilon: Annotated[float, typer.Option(help="ε of everything asked for, together.")] = 0.1,
    delta: Annotated[float, typer.Option(help="δ of everything asked for, together.")] = 1e-5,
    quantiles: Annotated[str, typer.Option(help="Shares, separated by commas.")] = ",".join(
        map(str, QUANTILES)
    ),
    mean: Annotated[bool, typer.Option(help="Publish the mean.")] = True,
    groups: Annotated[
        list[str] | None, typer.Option(help="A column, or COLUMN=LABEL,LABEL; may be repeated.")
    ] = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = METHODS[0],
    limit_epsilon: Annotated[
        float | None, typer.Option(help="ε that all publications may cost; fixed by the first [1].")
    ] = None,
    limit_delta: Annotated[float, typer.Option(help="δ of that limit.")] = 1e-5,
) -> None:
    """Publish mean and quantiles of ε under differential privacy (for everyone to read).

    The cost is charged to the run's budget first. The same question again is free.
    """
    limit = None if limit_epsilon is None else Limit(limit_epsilon, limit_delta)
    folder = Run.checked(run)
    found = release(
        folder,
        epsilon=epsilon,
        delta=delta,
        mean=mean,
        quantiles=_shares(quantiles),
        groups=dict(_column(text) for text in groups or ()),
        method=method,  # type: ignore[arg-type]  # checked where it is used
        limit=limit,
    )
    table = Table("examples", "statistic", "ε", "95 % interval")
    _add(table, "all", found.everyone)
    for column, parts in found.groups.items():
        if not parts:
            table.add_row(column, "no group is large enough for this noise", "", "")
        for label, part in parts.items():
            if part is None:
                table.add_row(f"{column}={label}", "too few to publish", "", "")
            else:
                _add(table, f"{column}={label}", part)
    with Budget.of_run(folder.path) as budget:
        spent, left, fixed = budget.spent, budget.left(delta), budget.limit
    total = folder.journal.worst_case(until=folder.plan.steps, releases=releases_of(folder))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"releases        ε = {epsilon_text(spent.epsilon(fixed.delta))} of {fixed.epsilon:g} at "
        f"δ = {fixed.delta:g}; a further question may cost ε = {left:g} at δ = {delta:g}",
        f"worst case      ε = {epsilon_text(total)} at δ = {folder.plan.delta:g} "
        f"per {folder.plan.per}, everything included",
        *parts_line(folder, until=folder.plan.steps),
        f"written         {folder.path / 'public'}",
        sep="\n",
        soft_wrap=True,
    )


def _add(table: Table, name: str, part: Statistics) -> None:
    rows: list[tuple[str, Estimate | None, str]] = [("examples", part.size, ".0f")]
    rows.append(("mean", part.mean, ".4f"))
    rows += [(f"{share:.4g} quantile", found, ".4f") for share, found in part.quantiles.items()]
    for what, found, form in rows:
        if found is not None:
            table.add_row(
                name, what, f"{found.value:{form}}", f"{found.low:{form}} – {found.high:{form}}"
            )


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--quantiles {text!r} is not numbers with commas") from None


def _column(text: str) -> tuple[str, list[str] | None]:
    column, named, labels = text.partition("=")
    return column, labels.split(",") if named else None
