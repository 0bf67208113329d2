"""Table 2: mean and quantiles of ε published under (0.1, 10⁻⁵)-DP; and the clip bound likewise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from epsilons.release import Limit, publish
from experiments.lab import Lab
from experiments.rows import DATA, TITLES, Row, scale

RUNS = ("mnist", "cifar10")
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
PAPER = {
    "mnist": {"true": [0.686, 0.236, 0.318, 0.431, 0.697, 1.682],
              "private": [0.681, 0.238, 0.317, 0.436, 0.708, 1.647], "error": 1.13},
    "cifar10": {"true": [5.942, 2.713, 4.892, 6.730, 7.692, 7.815],
                "private": [5.939, 2.801, 4.876, 6.744, 7.672, 7.923], "error": 0.91},
}  # fmt: skip
# Few examples take a larger ε, or the noise would drown them.
COST = {"smoke": dict(epsilon=2.0), "cpu": dict(epsilon=0.1), "paper": dict(epsilon=0.1)}


def numbers(lab: Lab) -> dict[str, Any]:
    found = {}
    for name in RUNS:
        run = lab.runs(name)[0]
        answer = publish(run, **COST[lab.preset], delta=1e-5, limit=_limit(lab)).everyone
        values = run.epsilons(hold="cautious").values  # what is published
        true = [float(values.mean()), *(float(np.quantile(values, q)) for q in QUANTILES)]
        assert answer.mean is not None
        private = [answer.mean.value, *(answer.quantiles[q].value for q in QUANTILES)]
        errors = 100 * np.abs(np.array(private) / np.array(true) - 1)
        found[name] = {
            "true": true,
            "private": private,
            "error_percent": float(errors.mean()),
            "median_norm": lab.facts(name)["found"][0].get("median"),
        }
    return found


def _limit(lab: Lab) -> Limit | None:
    return Limit(epsilon=4.0, delta=1e-4) if lab.preset == "smoke" else None


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), RUNS, strict=True):
        axes.plot(found[name]["true"], "o-", label="true")
        axes.plot(found[name]["private"], "x", label="published")
        axes.set_xticks(range(6), ["mean", *(f"{q:g}" for q in QUANTILES)])
        axes.set_title(DATA.get(name, name), fontsize=9)
        axes.set_ylabel("ε")
        axes.legend(frameon=False)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name in RUNS:
        ours, paper = found[name], PAPER[name]
        for kind in ("true", "private"):
            result.append(
                Row("Table 2", f"{TITLES[name]}: mean and 10, 30, 50, 70, 90 % of tight ε, {kind}",
                    _listed(paper[kind]), _listed(ours[kind]), scale(facts[name]), None)
            )  # fmt: skip
        result.append(
            Row("Table 2", f"{TITLES[name]}: mean error of what is published",
                f"{paper['error']} %", f"{ours['error_percent']:.2f} %", scale(facts[name]),
                ours["error_percent"] <= 2 * paper["error"])
        )  # fmt: skip
        median = ours["median_norm"]
        if median is not None:
            private = median["private"]["value"]
            result.append(
                Row("footnote", "the clip bound as a private median", "15.73 → 15.82 (0.6 %)",
                    f"{median['true']:.4f} → {private:.4f} "
                    f"({100 * abs(private / median['true'] - 1):.2f} %), charged",
                    scale(facts[name]), abs(private / median["true"] - 1) < 0.02)
            )  # fmt: skip
    return result


def _listed(values: Any) -> str:
    return " / ".join(f"{value:.3f}" for value in values)
