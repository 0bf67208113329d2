"""Beyond the paper: which norm a step is charged: the one before, the nearest, the larger of two.

Norms of all examples are refreshed early (`beyond_schedules`); norms of drawn examples are left
out. At few passes they help more than any of this.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from epsilons.accounting import HOLDS
from experiments.cost import seconds
from experiments.lab import Lab
from experiments.rows import TITLES, Row, mean, scale, spread
from experiments.schedules import refreshed

RUNS = ("mnist", "cifar10", "cifar10-cnn", "adult", "utkface-gender-imagenet")
PASSES = (2, 4, 8, 20, 60)
SHOWN = {"previous": "held until the next (the paper)", "nearest": "nearest in time",
         "cautious": "larger of both neighbours"}  # fmt: skip


def numbers(lab: Lab) -> dict[str, Any]:
    """Agreement with the exact ε by way to hold a norm, number of passes and seed."""
    return {name: {**readings(lab, name), "seconds": seconds(lab, name)} for name in RUNS}


def readings(lab: Lab, name: str) -> dict[str, Any]:
    runs = lab.runs(name)
    plan = runs[0].plan
    passes = [m for m in PASSES if m <= plan.steps]
    asked = [(m / plan.epochs, "early", hold) for hold in HOLDS for m in passes]
    each = [iter(refreshed(run, asked)) for run in runs]
    return {hold: {str(m): [asdict(next(one)) for one in each] for m in passes} for hold in HOLDS}


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(14, 4.8), layout="constrained")
    grid = figure.subplots(2, len(RUNS))
    for column, name in zip(grid.T, RUNS, strict=True):
        for axes, key in zip(column, ("mean_error", "below"), strict=True):
            for hold, mark in zip(HOLDS, "os^", strict=True):
                passes = [int(m) for m in found[name][hold]]
                values = [np.mean([e[key] for e in each]) for each in found[name][hold].values()]
                axes.plot(passes, values, marker=mark, label=SHOWN[hold])
            axes.set_xscale("log")
            axes.set_xticks(passes, [str(m) for m in passes])
            axes.minorticks_off()
        column[0].set_title(name, fontsize=9)
        column[1].set_xlabel("passes over the data")
    grid[0, 0].legend(frameon=False)
    grid[0, 0].set_ylabel("mean |error| of ε")
    grid[1, 0].set_ylabel("share > 1 % too low")
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [row for name in RUNS for row in rows_of(found[name], TITLES[name], facts[name])]


def rows_of(found: dict[str, Any], title: str, facts: dict[str, Any]) -> list[Row]:
    """Errors of each way, what share is too low, and by how much at most, in one training."""
    shown = [m for m in ("2", "8", "20", "60") if m in found["nearest"]]
    claims = (
        ("r", "pearson", 4),
        ("mean error of ε", "mean_error", 3),
        ("bias of ε", "bias", 3),
        ("% more than 1 % below the exact ε", "below", 1),
        ("furthest below the exact ε", "lowest", 2),
    )
    order = ("previous", "nearest", "cautious")
    better = sum(
        mean([e["mean_error"] for e in found["nearest"][m]])
        <= mean([e["mean_error"] for e in found["previous"][m]])
        for m in found["nearest"]
    )
    why = f"nearest is better at {better} of {len(found['nearest'])} numbers of passes"
    size, spent = scale(facts), found["seconds"]
    shares = (f"{m} passes {_share(spent, int(m)):.1f} %" for m in shown)
    result = [
        Row("Beyond", f"{title}: share of a run's time that the passes take", "–",
            "; ".join(shares), size, None)
    ]  # fmt: skip
    for claim, key, digits in claims:
        factor = 100 if key == "below" else 1
        each = {
            m: " / ".join(
                spread([e[key] for e in found[hold][m] if e[key] is not None], digits, factor,
                       signed=key == "bias")
                for hold in order
            )
            for m in shown
        }  # fmt: skip
        result.append(
            Row("Beyond", f"{title}: {claim}, norms held / nearest / larger neighbour", "–",
                "; ".join(f"{m} passes {values}" for m, values in each.items()), size, None,
                why if key == "mean_error" else "")
        )  # fmt: skip
    return result


def _share(spent: dict[str, float], passes: int) -> float:
    """In percent."""
    return 100 * passes * spent["pass"] / (passes * spent["pass"] + spent["steps"])
