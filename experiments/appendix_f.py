"""Appendix F: another loss (multi-class hinge) and another network (two convolutions, tanh)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import group_summary
from epsilons.analysis.figures import group_bars
from experiments import figure2, figure4
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, mean, scale

NAMES = ("cifar10-hinge", "cifar10-cnn")
RUNS = (*NAMES, "cifar10", "cifar10-cnn-C1")
BY = "class"
GROUP = "cat"


def numbers(lab: Lab) -> dict[str, Any]:
    return {
        name: {
            "agreement": figure4.agreements(lab, name),
            "groups": figure2.summaries(lab, name, BY),
        }
        for name in RUNS
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), NAMES, strict=True):
        run = lab.runs(name)[0]
        group_bars(axes, group_summary(epsilons_of(run), run.examples, run.test, BY))
        axes.set_ylabel(name)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name, what in zip(NAMES, ("hinge loss", "tanh CNN"), strict=True):
        size = scale(facts[name])
        each = found[name]["agreement"]["3.0"]
        result.append(figure4.row(each, "App. F", f"{what}, γ = 3", size))
        order = [r for r in found[name]["groups"]["rank_correlation"] if r is not None]
        result.append(
            Row("App. F", f"{what}: rank correlation of accuracy and mean ε", "negative",
                f"{mean(order):.2f}", size, mean(order) < -0.5)
        )  # fmt: skip
    means = [found[name]["groups"]["groups"] for name in ("cifar10", "cifar10-cnn-C1")]
    group = GROUP if GROUP in means[0] else next(iter(means[0]))
    before, after = (m[group]["mean_epsilon"] for m in means)
    result.append(
        Row("App. F", f"{group}: mean ε from the main network to the tanh CNN, both with C = 1",
            "7.3 → 7.7", f"{before:.2f} → {after:.2f}", scale(facts["cifar10-cnn-C1"]),
            after > before, "our main network is a linear model on features")
    )  # fmt: skip
    return result
