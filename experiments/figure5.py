"""Figure 5: ε grows with the logarithm of the final training loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import loss_relation
from epsilons.analysis.figures import loss_scatter
from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, mean, scale, spread

RUNS = ("mnist", "cifar10", "cifar10-cnn")
PAPER = 0.9


def numbers(lab: Lab) -> dict[str, Any]:
    return {name: relations(lab, name) for name in RUNS}


def relations(lab: Lab, name: str) -> dict[str, list[float | None]]:
    """Correlation of ε and log loss for each seed, also without those at the worst case."""
    each = [loss_relation(epsilons_of(run), run.examples.losses) for run in lab.runs(name)]
    return {
        "pearson": [r.pearson for r in each],
        "pearson_below_worst": [r.pearson_below_worst for r in each],
        "spearman": [r.spearman for r in each],
        "slope": [r.slope for r in each],
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    draw(lab, RUNS, file)


def draw(lab: Lab, names: tuple[str, ...], file: Path) -> None:
    figure = Figure(figsize=(3.3 * len(names), 3), layout="constrained", dpi=90)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        run = lab.runs(name)[0]
        loss_scatter(axes, loss_relation(epsilons_of(run), run.examples.losses))
        axes.set_ylabel(f"ε, {name}")
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [
        row(found[name], "Fig. 5", TITLES[name], "> 0.9", scale(facts[name]), PAPER)
        for name in RUNS
    ]


def row(
    found: dict[str, Any], where: str, what: str, paper: str, size: str, least: float, why: str = ""
) -> Row:
    r = [value for value in found["pearson"] if value is not None]
    ranks = [value for value in found["spearman"] if value is not None]
    agrees = bool(r) and mean(r) > least
    return Row(where, f"{what}: Pearson’s r of ε and log loss", paper,
               f"{spread(r, 3)} (of ranks {spread(ranks, 3)})", size, agrees,
               "" if agrees else why)  # fmt: skip
