"""`epsilons groups`: privacy and accuracy of the groups of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epsilons.analysis import GroupSummary, group_summary
from epsilons.analysis.groups import SMALL
from epsilons.cli.machine import print_json
from epsilons.cli.show import PRIVATE
from epsilons.runs import Run


def groups(
    run: Annotated[Path, typer.Argument(help="Folder of the run.")],
    by: Annotated[
        list[str] | None,
        typer.Option(help="A column, or COLUMN,COLUMN for intersections; may be repeated [all]."),
    ] = None,
    small: Annotated[
        int, typer.Option(help="Groups with fewer examples, in training or held out, are marked.")
    ] = SMALL,
    json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Who pays more, and is it who is served worse? (for the curator: the output is private)."""
    folder = Run.checked(run)
    columns = [tuple(text.split(",")) for text in by or folder.examples.groups]
    if not columns:
        raise ValueError(f"{run} has no columns of groups; give Examples(groups=…) to fit")
    epsilons = folder.epsilons()
    found = [
        group_summary(epsilons, folder.examples, folder.test, some, small=small) for some in columns
    ]
    if json:
        print_json({"epsilon": _facts(folder, epsilons.kind, epsilons.method), "by": found})
        return
    console = Console(highlight=False)
    console.print(PRIVATE)
    console.print(
        f"ε at δ = {epsilons.delta:g}, {epsilons.method}, {epsilons.kind}; 95 % intervals"
        if epsilons.kind != "none"
        else "NOT PRIVATE: trained without noise, no ε holds for anyone"
    )
    for summary in found:
        _print(console, summary, epsilons.kind != "none", small)


def _facts(folder: Run, kind: str, method: str) -> dict[str, object]:
    return {"delta": folder.plan.delta, "kind": kind, "method": method}


def _print(console: Console, summary: GroupSummary, private: bool, small: int) -> None:
    table = Table(summary.name, "n", "mean ε", "at worst", "train loss", "test accuracy")
    for row in reversed(summary.rows):
        accuracy = "–"
        if row.test_accuracy is not None and row.accuracy_interval is not None:
            low, high = (100 * end for end in row.accuracy_interval)
            accuracy = f"{row.test_accuracy:.1%} ({low:.0f}–{high:.0f})"
        table.add_row(
            f"{row.group} *" if row.small else row.group,
            str(row.n),
            f"{row.mean_epsilon:.3f} ({row.interval.low:.2f}–{row.interval.high:.2f})"
            if private
            else "not private",
            f"{row.at_worst_case:.1%}" if private else "–",
            "–" if row.train_loss is None else f"{row.train_loss:.4g}",
            accuracy,
        )
    console.print(table)
    gap = summary.gap
    if gap is not None:
        console.print(
            f"gap             {gap.percent:+.1f} % ({gap.interval.low:+.1f} to "
            f"{gap.interval.high:+.1f} %): mean ε of {gap.least_accurate}, the least accurate, "
            f"over that of {gap.most_accurate}, the most accurate",
            soft_wrap=True,
        )
    if summary.rank_correlation is not None:
        console.print(f"rank correlation of accuracy and mean ε: {summary.rank_correlation:+.3f}")
    if any(row.small for row in summary):
        console.print(
            f"* fewer than {small} examples in training or held out: too few to say much",
            soft_wrap=True,
        )
