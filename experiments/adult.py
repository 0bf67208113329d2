"""Adult by race and sex: the demographic experiment that everyone can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import group_summary, loss_threshold_attack
from epsilons.analysis.figures import epsilon_histogram, group_bars
from experiments import figure2, figure4, figure5
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, mean, scale, spread

RUNS = ("adult",)
COLUMNS = ("race", "sex", "class")


def numbers(lab: Lab) -> dict[str, Any]:
    runs = lab.runs("adult")
    epsilons = [epsilons_of(run) for run in runs]
    return {
        "accuracy": [entry["accuracy"] for entry in lab.facts("adult")["found"]],
        "at_worst_case": [float(e.at_worst_case.mean()) for e in epsilons],
        "lowest": [float(e.values.min()) for e in epsilons],
        "groups": {by: figure2.summaries(lab, "adult", by) for by in COLUMNS},
        "agreement": figure4.agreements(lab, "adult"),
        "relation": figure5.relations(lab, "adult"),
        "attack": [loss_threshold_attack(r.examples, r.test).everyone.success for r in runs],
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    run = lab.runs("adult")[0]
    figure = Figure(figsize=(10, 2.8), layout="constrained")
    first, *others = figure.subplots(1, 3)
    epsilon_histogram(first, epsilons_of(run))
    for axes, by in zip(others, COLUMNS, strict=False):
        group_bars(axes, group_summary(epsilons_of(run), run.examples, run.test, by))
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    size = scale(facts["adult"])
    result = [
        Row("Adult", "share at the worst case, and lowest ε", "UTK-gender: 0.1 … 4.5",
            f"{spread(found['at_worst_case'], 1, 100)} %, {spread(found['lowest'], 2)}", size,
            None),
    ]  # fmt: skip
    for by in COLUMNS:
        groups = found["groups"][by]
        gap = [value for value in groups["gap_percent"] if value is not None]
        if not gap:
            continue
        pair = f"{groups['least_accurate'][0]} over {groups['most_accurate'][0]}"
        result.append(
            Row("Adult", f"{by}: mean ε of the least over the most accurate group",
                "UTK-gender: Asian over Indian +35.1 %",
                f"{pair} {spread(gap, 1, signed=True)} %", size, min(gap) > 0)
        )  # fmt: skip
    result += [
        figure4.row(each, "Adult", f"γ = {gamma}", size)
        for gamma, each in found["agreement"].items()
    ]
    result.append(figure5.row(found["relation"], "Adult", "Adult", "> 0.9", size, figure5.PAPER))
    attack = mean(found["attack"])
    result.append(
        Row("Adult", "with DP: success of the loss-threshold attack", "≈ 50 %",
            f"{spread(found['attack'], 1, 100)} %", size, abs(attack - 0.5) < 0.03)
    )  # fmt: skip
    return result
