"""Figure 3 by the paper's own network: ResNet20-GN on CIFAR-10, half the median norm as C."""

from __future__ import annotations

from typing import Any

from experiments import figure3
from experiments.lab import Lab

RUNS = ("cifar10-0.5M",)
picture, rows = figure3.picture, figure3.rows


def numbers(lab: Lab) -> dict[str, Any]:
    return figure3.numbers(lab, RUNS)
