"""Figures 7 and 8: under individual clipping, where ε is exact, the observations stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from epsilons.analysis import compare
from experiments import figure2, figure5
from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, scale, spread
from experiments.table3 import NAMES, RUNS

__all__ = ["RUNS", "numbers", "picture", "rows"]
BY = "class"


def numbers(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in NAMES:
        individual, common = f"{name}-individual", f"{name}-common"
        pairs = list(zip(lab.runs(individual), lab.runs(common), strict=True))
        found[name] = {
            "individual": figure5.relations(lab, individual),
            "groups": figure2.summaries(lab, individual, BY),
            "common_groups": figure2.summaries(lab, common, BY),
            "kind": [epsilons_of(run).kind for run, _ in pairs],
            "rank_correlation_of_examples": [
                compare(a, b, method="rdp-classic").rank_correlation for a, b in pairs
            ],
        }
    return found


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), NAMES, strict=True):
        own, common = (found[name][key]["groups"] for key in ("groups", "common_groups"))
        order = sorted(own, key=lambda group: own[group]["mean_epsilon"])
        for label, groups in (("individual clipping", own), ("common clipping", common)):
            axes.plot(order, [groups[group]["mean_epsilon"] for group in order], "o", label=label)
        axes.set_ylabel(f"mean ε, {name}")
        axes.tick_params(axis="x", rotation=60)
        axes.legend(frameon=False)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name in NAMES:
        size = scale(facts[f"{name}-individual"])
        result.append(
            figure5.row(found[name]["individual"], "Fig. 7", f"{TITLES[name]}, individual clipping",
                        "> 0.9", size, figure5.PAPER)
        )  # fmt: skip
        means = [
            [groups[group]["mean_epsilon"] for group in sorted(groups)]
            for groups in (found[name][key]["groups"] for key in ("groups", "common_groups"))
        ]
        ranks = [np.argsort(np.argsort(m)) for m in means]
        same = int((ranks[0] == ranks[1]).sum())
        alike = float(np.corrcoef(*ranks)[0, 1])
        order = found[name]["groups"]["rank_correlation"]
        result.append(
            Row("Fig. 8", f"{TITLES[name]}: order of groups as under common clipping",
                "exactly the same",
                f"{same} of {len(ranks[0])} in the same place, rank correlation {alike:.3f}", size,
                alike > 0.95,
                "" if same == len(ranks[0]) else "neighbours whose means differ by little swap")
        )  # fmt: skip
        result.append(
            Row("Fig. 8", f"{TITLES[name]}: rank correlation of accuracy and mean ε", "negative",
                spread(order, 2), size, max(order) < -0.5)
        )  # fmt: skip
    return result
