"""UTKFace, gender and age under 30, groups by race: runs where --data has the folder UTKFace.

Labels are balanced within each race. The paper starts from ImageNet's weights: a file
`utkface_start.pt` beside the folder, a state dict of the network, is loaded if it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import group_summary, loss_threshold_attack
from epsilons.analysis.figures import epsilon_histogram, group_bars
from experiments import figure2, figure4, figure5
from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, scale, spread

RUNS = ("utkface-gender", "utkface-age")
BY = "race"
PAPER = {"utkface-gender": "Asian over Indian +35.1 %", "utkface-age": "worse accuracy, larger ε"}


def numbers(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RUNS:
        runs = lab.runs(name)
        epsilons = [epsilons_of(run) for run in runs]
        found[name] = {
            "at_worst_case": [float(e.at_worst_case.mean()) for e in epsilons],
            "lowest": [float(e.values.min()) for e in epsilons],
            "groups": figure2.summaries(lab, name, BY),
            "agreement": figure4.agreements(lab, name),
            "relation": figure5.relations(lab, name),
            "attack": [loss_threshold_attack(r.examples, r.test).everyone.success for r in runs],
        }
    return found


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    for (left, right), name in zip(figure.subplots(2, 2), RUNS, strict=True):
        run = lab.runs(name)[0]
        epsilon_histogram(left, epsilons_of(run))
        group_bars(right, group_summary(epsilons_of(run), run.examples, run.test, BY))
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name in RUNS:
        size, part = scale(facts[name]), found[name]
        gap = [value for value in part["groups"]["gap_percent"] if value is not None]
        result += [
            Row("Fig. 1", f"{TITLES[name]}: range of ε", "0.1 … 4.5",
                f"from {spread(part['lowest'], 2)}", size, None),
            Row("Fig. 2, 6", f"{TITLES[name]}: mean ε of the least over the most accurate race",
                PAPER[name],
                f"{spread(gap, 1, signed=True)} %" if gap else "groups too small", size,
                min(gap) > 0 if gap else None),
            figure4.row(part["agreement"]["3.0"], "Fig. 4", f"{TITLES[name]}, γ = 3", size),
            figure5.row(part["relation"], "Fig. 5", TITLES[name], "> 0.9", size, figure5.PAPER),
        ]  # fmt: skip
    return result
