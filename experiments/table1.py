"""Table 1: what individual accounting costs, with and without rounding norms to 100 values.

200 epochs with one refresh each are 10⁷ norms of CIFAR-10. The paper evaluates the Rényi divergence
by Opacus once per distinct value. Here both columns are measured: Opacus's evaluations (all of the
rounded ones, and a sample of the others, times their number) and ours (all of them).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp

from epsilons import Run, individual_epsilons
from experiments.lab import Lab
from experiments.rows import Row, scale

RUNS = ("cifar10",)
PAPER = {"with": 3.0, "without": 2.6e4}
EPOCHS = {"smoke": 2, "cpu": 200, "paper": 200}
SAMPLE = {"smoke": 3, "cpu": 100, "paper": 1000}
ORDERS = RDPAccountant.DEFAULT_ALPHAS


def numbers(lab: Lab) -> dict[str, Any]:
    run = lab.runs("cifar10")[0]
    rows = EPOCHS[lab.preset]
    norms = _norms(run, rows)
    lengths = np.ones(rows, dtype=np.int64)
    plan = run.plan
    constants = dict(
        sample_rate=plan.sample_rate, noise_std=plan.noise_std, max_grad_norm=plan.max_grad_norm,
        delta=plan.delta,
    )  # fmt: skip
    seconds = {}
    for name, options in (
        ("rounded, RDP", dict(method="rdp-classic", rounding="nearest", levels=100)),
        ("not rounded, RDP", dict(method="rdp-classic")),
        ("not rounded, tight", dict(method="tight")),
    ):
        began = time.process_time()
        individual_epsilons(norms, lengths, **constants, **options)  # type: ignore[arg-type]
        seconds[name] = time.process_time() - began
    levels = plan.noise_std / (plan.max_grad_norm * np.arange(1, 101) / 100)
    some = plan.noise_std / np.random.default_rng(0).choice(norms.ravel(), SAMPLE[lab.preset])
    taken = min(100, SAMPLE[lab.preset])
    return {
        "norms": int(norms.size),
        "seconds": seconds,
        "opacus_levels": _opacus_seconds(levels[:taken], plan.sample_rate) * 100 / taken,
        "opacus_each": _opacus_seconds(some, plan.sample_rate) / len(some),
        "opacus_sample": len(some),
        "refresh_seconds": lab.facts("cifar10")["found"][0]["refresh_seconds"],
        "train_seconds": lab.facts("cifar10")["found"][0]["seconds"],
    }


def _norms(run: Run, rows: int) -> np.ndarray:
    """Norms (rows, n) of the run's refreshes, again from the first after the last."""
    steps = run.journal.refreshes
    table = [np.minimum(run.journal.norms(t), run.plan.max_grad_norm) for t in steps[:rows]]
    return np.stack([table[k % len(table)] for k in range(rows)])


def _opacus_seconds(noise: np.ndarray, sample_rate: float) -> float:
    began = time.process_time()
    for sigma in noise:
        compute_rdp(q=sample_rate, noise_multiplier=float(sigma), steps=1, orders=ORDERS)
    return time.process_time() - began


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(7, 2.2), layout="constrained")
    axes = figure.subplots()
    bars = {
        "Opacus, every norm (from a sample)": found["opacus_each"] * found["norms"],
        "Opacus, 100 rounded norms": found["opacus_levels"],
        **{f"epsilons, {name}": value for name, value in found["seconds"].items()},
    }
    axes.barh(list(bars), list(bars.values()))
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(f"core seconds for {found['norms']:,} norms")
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    size, n = scale(facts["cifar10"]), found["norms"]
    seconds = found["seconds"]
    without = found["opacus_each"] * n
    return [
        Row("Table 1", "with rounding: 10² evaluations of the divergence", "< 3 s (5 cores)",
            f"Opacus {found['opacus_levels']:.1f} core seconds", size,
            found["opacus_levels"] < 5 * PAPER["with"]),
        Row("Table 1", "without rounding: 10⁷ evaluations", "2.6·10⁴ s (5 cores)",
            f"Opacus {without:.1e} core seconds, from {found['opacus_sample']} of {n:,}", size,
            without > PAPER["without"]),
        Row("Table 1", "ours: all norms to ε's, rounded", "< 3 s",
            f"{seconds['rounded, RDP']:.1f} core seconds for {n:,} norms", size,
            seconds["rounded, RDP"] < 10 * PAPER["with"]),
        Row("Table 1", "ours: all norms to ε's, **not** rounded", "2.6·10⁴ s",
            f"{seconds['not rounded, RDP']:.1f} core seconds RDP, "
            f"{seconds['not rounded, tight']:.1f} tight",
            size, None),
        Row("Table 1", "norm passes beside training", "–",
            f"{100 * found['refresh_seconds'] / found['train_seconds']:.0f} % of the run’s time "
            "at γ = 3", size, None),
    ]  # fmt: skip
