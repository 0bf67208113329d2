"""The paper's networks, ResNet20-GN and WRN16-4: they train, and point in the same direction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis.figures import epsilon_histogram
from experiments import figure2, figure5
from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, scale

RUNS = ("resnet20", "wrn16-4")
BY = "class"
LEARNT = 0.2  # below so much accuracy classes can't be ranked by it


def numbers(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RUNS:
        run = lab.runs(name)[0]
        epsilons = epsilons_of(run)
        found[name] = {
            "parameters": lab.facts(name)["found"][0]["parameters"],
            "accuracy": lab.facts(name)["found"][0]["accuracy"],
            "at_worst_case": float(epsilons.at_worst_case.mean()),
            "lowest": float(epsilons.values.min()),
            "relation": figure5.relations(lab, name),
            "groups": figure2.summaries(lab, name, BY),
        }
    return found


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), RUNS, strict=True):
        epsilon_histogram(axes, epsilons_of(lab.runs(name)[0]))
        axes.set_ylabel(name)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name in RUNS:
        part, size = found[name], scale(facts[name])
        (r,) = part["relation"]["spearman"] or [None]
        (order,) = part["groups"]["rank_correlation"]
        result += [
            Row("Networks", f"{TITLES[name]} trains with individual accounting", "–",
                f"{part['parameters']:,} parameters, accuracy {100 * part['accuracy']:.1f} %, "
                f"{100 * part['at_worst_case']:.0f} % at the worst case", size, None),
            Row("Networks", f"{TITLES[name]}: rank correlation of ε and loss", "positive",
                "none: all ε are equal" if r is None else f"{r:.2f}", size,
                r is not None and r > 0.3,
                "" if r is not None else "every norm is above C in so short a training"),
            Row("Networks", f"{TITLES[name]}: rank correlation of accuracy and mean ε of classes",
                "negative", "none: all ε are equal" if order is None else f"{order:.2f}", size,
                None if order is None or part["accuracy"] < LEARNT else order < 0),
        ]  # fmt: skip
    return result
