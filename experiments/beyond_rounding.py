"""Beyond the paper: norms rounded to nearest (the paper's), rounded up, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from epsilons import Run
from experiments.lab import Lab
from experiments.rows import TITLES, Row, scale
from experiments.schedules import priced

RUNS = ("mnist", "cifar10", "adult")
LEVELS = 100


def numbers(lab: Lab) -> dict[str, Any]:
    return {
        name: {
            rounding: {
                "mean_percent": float(100 * (ratio - 1).mean()),
                "lowest_percent": float(100 * (ratio.min() - 1)),
                "highest_percent": float(100 * (ratio.max() - 1)),
                "share_below": float((ratio < 1 - 1e-9).mean()),
            }
            for rounding, ratio in _ratios(lab.runs(name)[0]).items()
        }
        for name in RUNS
    }


def _ratios(run: Run) -> dict[str, NDArray[np.float64]]:
    """ε of the followed examples from every step, rounded ÷ not rounded."""
    _, norms = run.journal.followed()
    once = np.ones(len(norms), dtype=np.int64)
    exact = priced(run, norms, once).values
    return {
        rounding: priced(run, norms, once, rounding=rounding, levels=LEVELS).values / exact
        for rounding in ("nearest", "up")
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(RUNS)), RUNS, strict=True):
        for rounding, ratio in _ratios(lab.runs(name)[0]).items():
            axes.hist(100 * (ratio - 1), bins=50, histtype="step", label=rounding)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("change of ε by rounding in %")
        axes.legend(frameon=False)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [
        Row("Beyond", f"{TITLES[name]}: ε with norms rounded {rounding} ÷ not rounded", "–",
            f"mean {part['mean_percent']:+.2f} %, from {part['lowest_percent']:+.2f} to "
            f"{part['highest_percent']:+.2f} %; {100 * part['share_below']:.0f} % undercharged",
            scale(facts[name]), part["share_below"] == 0 if rounding == "up" else None,
            "" if rounding == "nearest" else "never below")
        for name in RUNS
        for rounding, part in found[name].items()
    ]  # fmt: skip
