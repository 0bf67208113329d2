"""Figure 4: ε from refreshed norms against the exact ε of random examples, γ = 0.5, 1, 3.

A norm holds until the next refresh, as in the paper; `beyond_nearest` has other ways.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, mean, scale, spread
from experiments.schedules import priced, refreshed

RUNS = ("mnist", "cifar10", "cifar10-cnn")
GAMMAS = (0.5, 1.0, 3.0)
PAPER = 0.99


def numbers(lab: Lab) -> dict[str, Any]:
    return {name: agreements(lab, name) for name in RUNS}


def agreements(lab: Lab, name: str) -> dict[str, list[dict[str, Any]]]:
    """For each γ and seed: Pearson's r, mean and worst absolute error."""
    each = [refreshed(run, [(g, "uniform", "previous") for g in GAMMAS]) for run in lab.runs(name)]
    return {str(g): [asdict(found[k]) for found in each] for k, g in enumerate(GAMMAS)}


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(RUNS)), RUNS, strict=True):
        run = lab.runs(name)[0]
        chosen, norms = run.journal.followed()
        exact = priced(run, norms, np.ones(len(norms), dtype=np.int64))
        axes.plot(exact.values, epsilons_of(run).values[chosen], ".", markersize=3, alpha=0.5)
        axes.axline((0, 0), slope=1, color="black", linewidth=0.8, linestyle="--")
        axes.axhline(exact.worst_case, color="tab:orange")
        axes.set_title(f"{name}, γ = 3", fontsize=9)
        axes.set_xlabel("exact ε")
        axes.set_ylabel("estimated ε")
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [
        row(found[name][str(gamma)], "Fig. 4", f"{TITLES[name]}, γ = {gamma:g}", scale(facts[name]))
        for name in RUNS
        for gamma in GAMMAS
    ]


def row(each: list[dict[str, Any]], where: str, what: str, size: str) -> Row:
    """Estimated against exact ε of the followed examples of each seed."""
    r, error, worst = (
        [e[key] for e in each if e[key] is not None]
        for key in ("pearson", "mean_error", "worst_error")
    )
    return Row(where, f"{what}: Pearson’s r of estimated and exact ε", "> 0.99",
               f"{spread(r, 4)} (mean error {mean(error):.3f}, worst {max(worst):.2f})", size,
               bool(r) and min(r) > PAPER)  # fmt: skip
