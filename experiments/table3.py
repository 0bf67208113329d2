"""Table 3: individual clipping thresholds do not change the accuracy; four seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.lab import Lab
from experiments.rows import TITLES, Row, scale, spread

NAMES = ("cifar10", "mnist")
CLIPPINGS = ("individual", "common")
RUNS = tuple(f"{name}-{clipping}" for name in NAMES for clipping in CLIPPINGS)
PAPER = {"cifar10": "74.0 ± 0.19 / 74.1 ± 0.24", "mnist": "97.17 ± 0.12 / 97.26 ± 0.11"}
NEGLIGIBLE = 0.005


def numbers(lab: Lab) -> dict[str, Any]:
    for name in RUNS:
        lab.runs(name)
    return {
        name: {"accuracy": [entry["accuracy"] for entry in lab.facts(name)["found"]]}
        for name in RUNS
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), NAMES, strict=True):
        for k, clipping in enumerate(CLIPPINGS):
            shares = 100 * np.array(found[f"{name}-{clipping}"]["accuracy"])
            axes.plot(shares, np.full(len(shares), k), "o")
        axes.set_yticks([0, 1], CLIPPINGS)
        axes.set_ylim(-0.5, 1.5)
        axes.set_xlabel(f"test accuracy in %, {name}")
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name in NAMES:
        own, common = (np.array(found[f"{name}-{c}"]["accuracy"]) for c in CLIPPINGS)
        error = np.sqrt(own.var(ddof=1) / len(own) + common.var(ddof=1) / len(common))
        gap = own.mean() - common.mean()
        result.append(
            Row("Table 3", f"{TITLES[name]}: accuracy, individual / common clipping", PAPER[name],
                f"{spread(own, 2, 100)} / {spread(common, 2, 100)}",
                scale(facts[f"{name}-common"]), bool(abs(gap) < max(NEGLIGIBLE, 2 * error)),
                f"difference {100 * gap:+.2f} points")
        )  # fmt: skip
    return result
