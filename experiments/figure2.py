"""Figures 2 and 6: groups with worse accuracy have a larger ε."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import GroupSummary, group_summary
from epsilons.analysis.figures import group_bars
from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, mean, scale, spread

RUNS = ("mnist", "cifar10", "cifar10-cnn")
BY = "class"
PAPER = {"cifar10": 44.2}


def numbers(lab: Lab) -> dict[str, Any]:
    return {name: summaries(lab, name, BY) for name in RUNS}


def summaries(lab: Lab, name: str, by: str) -> dict[str, Any]:
    """Groups by ascending mean ε, the gap in %, and the rank correlation, for each seed."""
    each = [_summary(lab, name, k, by) for k in range(len(lab.recipes[name].seeds))]
    return {
        "rank_correlation": [s.rank_correlation for s in each],
        "gap_percent": [None if s.gap is None else s.gap.percent for s in each],
        "gap_interval": [None if s.gap is None else list(s.gap.interval) for s in each],
        "least_accurate": [None if s.gap is None else s.gap.least_accurate for s in each],
        "most_accurate": [None if s.gap is None else s.gap.most_accurate for s in each],
        "groups": {
            row.group: {"mean_epsilon": row.mean_epsilon, "test_accuracy": row.test_accuracy,
                        "n": row.n, "small": row.small}
            for row in each[0]
        },
    }  # fmt: skip


def _summary(lab: Lab, name: str, k: int, by: str) -> GroupSummary:
    run = lab.runs(name)[k]
    return group_summary(epsilons_of(run), run.examples, run.test, by)


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(RUNS)), RUNS, strict=True):
        group_bars(axes, _summary(lab, name, 0, BY))
        axes.set_ylabel(name)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for where, name, paper in (
        ("Fig. 2", "cifar10", "Cat over Automobile +44.2 %"),
        ("Fig. 2", "cifar10-cnn", "Cat over Automobile +44.2 %"),
        ("Fig. 6", "mnist", "worse accuracy, larger ε"),
    ):
        groups = found[name]
        gap, order = _known(groups["gap_percent"]), _known(groups["rank_correlation"])
        pair = f"{groups['least_accurate'][0]} over {groups['most_accurate'][0]}"
        result.append(
            Row(where, f"{TITLES[name]}: mean ε of the least over the most accurate class", paper,
                f"{pair} {spread(gap, 1, signed=True)} %", scale(facts[name]),
                bool(gap) and min(gap) > 0)
        )  # fmt: skip
        result.append(
            Row(where, f"{TITLES[name]}: rank correlation of accuracy and mean ε", "negative",
                spread(order, 2), scale(facts[name]), bool(order) and mean(order) < -0.6)
        )  # fmt: skip
    return result


def _known(values: list[float | None]) -> list[float]:
    return [value for value in values if value is not None]
