"""Figure 1: histograms of ε. The easier the task, the fewer examples are at the worst case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis.figures import epsilon_histogram
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, mean, scale, spread

RUNS = ("mnist", "cifar10", "cifar10-cnn")
PAPER = {"mnist": 0.03, "cifar10": 0.35, "lowest": 1.0, "worst case": 7.8}


def numbers(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RUNS:
        each = [epsilons_of(run) for run in lab.runs(name)]
        found[name] = {
            "worst_case": [e.worst_case for e in each],
            "at_worst_case": [float(e.at_worst_case.mean()) for e in each],
            "lowest": [float(e.values.min()) for e in each],
            "quantiles_30_50_70": [[float(e.quantile(q)) for q in (0.3, 0.5, 0.7)] for e in each],
        }
    return found


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(RUNS)), RUNS, strict=True):
        epsilon_histogram(axes, epsilons_of(lab.runs(name)[0]))
        axes.set_title(name, loc="left", fontsize=9)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    easy, hard, deep = (found[name]["at_worst_case"] for name in RUNS)
    lowest = found["cifar10"]["lowest"]
    worst = mean(found["cifar10"]["worst_case"])
    return [
        Row("Fig. 1", "CIFAR-10: share of examples at the worst case", "~35 %",
            f"{spread(hard, 1, 100)} %", scale(facts["cifar10"]), 0.2 <= mean(hard) <= 0.5,
            "" if 0.2 <= mean(hard) <= 0.5 else
            "a linear model keeps a higher loss than WRN16-4, so that more gradients stay above C"),
        Row("Fig. 1", "CIFAR-10, convolutions: share at the worst case", "~35 %",
            f"{spread(deep, 1, 100)} %", scale(facts["cifar10-cnn"]), 0.2 <= mean(deep) <= 0.5),
        Row("Fig. 1", "MNIST: share at the worst case", "~3 %", f"{spread(easy, 1, 100)} %",
            scale(facts["mnist"]), mean(easy) <= 0.1),
        Row("Fig. 1", "fewer are at the worst case in the easy task", "3 % < 35 %",
            f"{100 * mean(easy):.1f} % < {100 * mean(hard):.1f} %", scale(facts["mnist"]),
            mean(easy) < mean(hard)),
        Row("Fig. 1", "CIFAR-10: range of ε", "1.0 … 7.8",
            f"{spread(lowest, 2)} … {worst:.1f}", scale(facts["cifar10"]),
            mean(lowest) < 0.5 * worst),
    ]  # fmt: skip
