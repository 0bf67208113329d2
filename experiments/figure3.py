"""Figure 3: median gradient norm of each class over training. The classes separate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import norm_course
from epsilons.analysis.figures import course_of_norms
from experiments.lab import Lab
from experiments.rows import TITLES, Row, scale

RUNS = ("cifar10-cnn", "mnist")
BY = "class"


def numbers(lab: Lab, runs: Sequence[str] = RUNS) -> dict[str, Any]:
    found = {}
    for name in runs:
        course = norm_course(lab.runs(name)[0], BY)
        first, last = ({c: float(m[at]) for c, m in course.medians.items()} for at in (0, -1))
        found[name] = {
            "clip_bound": course.max_grad_norm,
            "first": first,
            "last": last,
            "ratio_first": max(first.values()) / min(first.values()),
            "ratio_last": max(last.values()) / min(last.values()),
        }
    return found


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(4.5 * len(found), 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        course_of_norms(axes, norm_course(lab.runs(name)[0], BY))
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [
        Row("Fig. 3", f"{TITLES[name]}: median norms of classes separate", "they do",
            f"largest ÷ smallest median: {f['ratio_first']:.2f} at first, "
            f"{f['ratio_last']:.2f} at the end", scale(facts[name]),
            f["ratio_last"] > max(1.2, f["ratio_first"]))
        for name, f in found.items()
    ]  # fmt: skip
