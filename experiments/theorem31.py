"""Theorem 3.1 and its remark: with K = 1 the ε is exact; and accounting changes no weight."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from epsilons import Run, rdp_epsilon, sampled_gaussian_rdp
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, scale

RUNS = ("cifar10-every-step", "cifar10", "cifar10-unaccounted")
LOOKED_AT = 20
ORDERS = 1 + np.geomspace(0.2, 4000.0, 1500)


def numbers(lab: Lab) -> dict[str, Any]:
    run = lab.runs("cifar10-every-step")[0]
    epsilons = epsilons_of(run)
    chosen, slow = by_definition(run.path)
    error = np.abs(epsilons.values[chosen] / slow - 1)
    return {
        "kind": epsilons.kind,
        "steps": run.plan.steps,
        "looked_at": LOOKED_AT,
        "worst_relative_error": float(error.max()),
        "never_below": bool((epsilons.values[chosen] >= slow * (1 - 1e-9)).all()),
        "same_weights": _same(*(lab.weights(name) for name in ("cifar10", "cifar10-unaccounted"))),
    }


@lru_cache(maxsize=1)
def by_definition(path: Path) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Some examples and their o_α + log(1/δ)/(α − 1), with o_α added up step by step."""
    run = Run.open(path)
    chosen = np.random.default_rng(0).choice(run.plan.n, LOOKED_AT, replace=False)
    total = np.zeros((len(chosen), len(ORDERS)))
    for step in run.journal.refreshes:
        norms = np.minimum(run.journal.norms(step)[chosen], run.plan.max_grad_norm)
        total += sampled_gaussian_rdp(run.plan.noise_std / norms, run.plan.sample_rate, ORDERS)
    return chosen, np.array(
        [float(rdp_epsilon(ORDERS, row, run.plan.delta, "rdp-classic")) for row in total]
    )


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    run = lab.runs("cifar10-every-step")[0]
    chosen, slow = by_definition(run.path)
    figure = Figure(figsize=(3.4, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(slow, epsilons_of(run).values[chosen], "o")
    axes.axline((0, 0), slope=1, color="black", linewidth=0.8)
    axes.set_xlabel("ε by definition, step by step")
    axes.set_ylabel("ε of the run, K = 1")
    figure.savefig(file)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(one[name], other[name]) for name in one)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    error = found["worst_relative_error"]
    digits = "0" if error == 0 else f"10^{math.ceil(math.log10(error))}"
    return [
        Row("Thm 3.1", "K = 1, no rounding: ε of every example is exact", "exact",
            f"{found['kind']}; within {digits} of the definition for {found['looked_at']} examples "
            f"and {found['steps']} steps", scale(facts["cifar10-every-step"]),
            found["kind"] == "exact" and error < 1e-3 and found["never_below"]),
        Row("Remark", "the same seed gives the same weights with accounting on and off",
            "accounting changes nothing",
            "bit-identical" if found["same_weights"] else "different", scale(facts["cifar10"]),
            found["same_weights"]),
    ]  # fmt: skip
