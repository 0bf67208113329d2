"""CIFAR-10 at the paper's accuracy: a linear model on features that ImageNet trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import group_summary
from epsilons.analysis.figures import epsilon_histogram, group_bars
from experiments import figure2, figure4, figure5
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, mean, scale, spread

COMMON, INDIVIDUAL = RUNS = ("cifar10-imagenet", "cifar10-imagenet-individual")
BY = "class"
TITLE = "CIFAR-10, ImageNet’s features"


def numbers(lab: Lab) -> dict[str, Any]:
    epsilons = [epsilons_of(run) for run in lab.runs(COMMON)]
    return {
        "accuracy": {name: _accuracies(lab, name) for name in RUNS},
        "at_worst_case": [float(e.at_worst_case.mean()) for e in epsilons],
        "lowest": [float(e.values.min()) for e in epsilons],
        "groups": figure2.summaries(lab, COMMON, BY),
        "agreement": figure4.agreements(lab, COMMON),
        "relation": {name: figure5.relations(lab, name) for name in RUNS},
    }


def _accuracies(lab: Lab, name: str) -> list[float]:
    return [entry["accuracy"] for entry in lab.facts(name)["found"]]


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    run = lab.runs(COMMON)[0]
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    epsilon_histogram(left, epsilons_of(run))
    group_bars(right, group_summary(epsilons_of(run), run.examples, run.test, BY))
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    size, groups = scale(facts[COMMON]), found["groups"]
    common, individual = (found["accuracy"][name] for name in RUNS)
    gap = [value for value in groups["gap_percent"] if value is not None]
    order = [value for value in groups["rank_correlation"] if value is not None]
    pair = f"{groups['least_accurate'][0]} over {groups['most_accurate'][0]}"
    difference = 100 * (mean(individual) - mean(common))
    return [
        Row("Fig. 1", f"{TITLE}: share of examples at the worst case", "~35 %",
            f"{spread(found['at_worst_case'], 1, 100)} %", size,
            0.2 <= mean(found["at_worst_case"]) <= 0.5),
        Row("Fig. 1", f"{TITLE}: lowest ε", "1.0", spread(found["lowest"], 2), size,
            mean(found["lowest"]) < 3.9),
        Row("Fig. 2", f"{TITLE}: mean ε of the least over the most accurate class",
            "Cat over Automobile +44.2 %", f"{pair} {spread(gap, 1, signed=True)} %", size,
            bool(gap) and min(gap) > 0),
        Row("Fig. 2", f"{TITLE}: rank correlation of accuracy and mean ε", "negative",
            spread(order, 2), size, bool(order) and mean(order) < -0.6),
        figure4.row(found["agreement"]["3.0"], "Fig. 4", f"{TITLE}, γ = 3", size),
        figure5.row(found["relation"][COMMON], "Fig. 5", TITLE, "> 0.9", size, figure5.PAPER),
        Row("Table 3", f"{TITLE}: accuracy, individual / common clipping",
            "74.0 ± 0.19 / 74.1 ± 0.24",
            f"{spread(individual, 2, 100)} / {spread(common, 2, 100)}", size,
            abs(difference) < 1, f"difference {difference:+.2f} points"),
        figure5.row(found["relation"][INDIVIDUAL], "Fig. 7", f"{TITLE}, individual clipping",
                    "> 0.9", scale(facts[INDIVIDUAL]), figure5.PAPER),
    ]  # fmt: skip
