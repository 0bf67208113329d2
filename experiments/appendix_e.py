"""Appendix E: ε and log loss under clip bounds five and ten times as large."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import figure5
from experiments.lab import Lab, epsilons_of
from experiments.presets import BOUNDS
from experiments.rows import Row, scale

RUNS = tuple(f"cifar10-C{x}" for x in BOUNDS)
PAPER = {5: 0.89, 10: 0.9}


def numbers(lab: Lab) -> dict[str, Any]:
    return {
        name: {
            **figure5.relations(lab, name),
            "at_worst_case": float(epsilons_of(lab.runs(name)[0]).at_worst_case.mean()),
        }
        for name in RUNS
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure5.draw(lab, RUNS, file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [
        figure5.row(found[name], "App. E", f"CIFAR-10, C = {x}", f"{PAPER[x]}", scale(facts[name]),
                    PAPER[x] - 0.1)
        for x, name in zip(BOUNDS, RUNS, strict=True)
    ]  # fmt: skip
