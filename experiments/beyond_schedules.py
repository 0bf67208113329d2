"""Beyond the paper: refreshing more often early, against the paper's uniform refreshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from epsilons.accounting import Hold
from experiments.lab import Lab
from experiments.rows import TITLES, Row, mean, scale, spread
from experiments.schedules import refreshed

RUNS = ("mnist", "cifar10", "cifar10-cnn", "adult")
PASSES = (2, 3, 5, 8, 12, 20, 30)
SCHEDULES = ("early", "uniform")
PREVIOUS: Hold = "previous"  # norms hold until the next refresh, as in the paper


def numbers(lab: Lab) -> dict[str, Any]:
    """Mean and worst absolute error against the number of passes over the data, by seed."""
    return {name: _errors(lab, name) for name in RUNS}


def _errors(lab: Lab, name: str) -> dict[str, Any]:
    runs = lab.runs(name)
    plan = runs[0].plan
    passes = [m for m in PASSES if m <= plan.steps]
    asked = [(m / plan.epochs, schedule, PREVIOUS) for schedule in SCHEDULES for m in passes]
    each = [iter(refreshed(run, asked)) for run in runs]
    return {
        schedule: {
            str(m): [
                {"mean": a.mean_error, "worst": a.worst_error, "bias": a.bias}
                for a in map(next, each)
            ]
            for m in passes
        }
        for schedule in SCHEDULES
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(RUNS)), RUNS, strict=True):
        for schedule, mark in zip(SCHEDULES, "os", strict=True):
            passes = [int(m) for m in found[name][schedule]]
            errors = np.array(
                [[e["mean"] for e in each] for each in found[name][schedule].values()]
            )
            spans = [errors.mean(1) - errors.min(1), errors.max(1) - errors.mean(1)]
            axes.errorbar(passes, errors.mean(1), spans, marker=mark, capsize=2, label=schedule)
        axes.set_xscale("log")
        axes.set_xticks(passes, [str(m) for m in passes])
        axes.minorticks_off()
        if errors.min() > 0:
            axes.set_yscale("log")
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("passes over the data")
        axes.set_ylabel("mean |error| of ε")
        axes.legend(frameon=False)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name in RUNS:
        both = {
            schedule: {m: [e["mean"] for e in each] for m, each in found[name][schedule].items()}
            for schedule in SCHEDULES
        }
        shown = [m for m in ("3", "8", "30") if m in both["early"]]
        better = sum(mean(both["early"][m]) <= mean(both["uniform"][m]) for m in both["early"])
        result.append(
            Row("Beyond", f"{TITLES[name]}: mean error of ε, early / uniform refreshes", "–",
                "; ".join(f"{m} passes {spread(both['early'][m], 4)} / "
                          f"{spread(both['uniform'][m], 4)}" for m in shown), scale(facts[name]),
                None, f"early is better at {better} of {len(both['early'])} numbers of passes")
        )  # fmt: skip
    return result
