"""Beyond the paper: the tight ε of the same norms, as a share of the ε by Rényi divergence."""

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
QUANTILES = (0.0, 0.05, 0.5, 0.95, 1.0)
MOST = 5000  # random examples


def numbers(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in RUNS:
        run = lab.runs(name)[0]
        tight = _epsilons(run, "tight")
        parts: dict[str, Any] = {"worst_case_tight": run.plan.worst_case()}
        for method in ("rdp", "rdp-classic"):
            ratio = tight / _epsilons(run, method)
            parts[method] = {str(q): float(np.quantile(ratio, q)) for q in QUANTILES}
            parts[method]["worst_case"] = run.plan.worst_case() / run.plan.worst_case(method)
        found[name] = parts
    return found


def _epsilons(run: Run, method: str) -> NDArray[np.float64]:
    """ε of random examples from the refreshes' norms, not rounded."""
    n = run.plan.n
    chosen = np.sort(np.random.default_rng(0).permutation(n)[:MOST])
    steps = np.array(run.journal.refreshes)
    norms = np.stack([run.journal.norms(int(t))[chosen] for t in steps])
    return priced(run, norms, np.diff(np.append(steps, run.plan.steps)), method=method).values


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.subplots()
    for name in RUNS:
        run = lab.runs(name)[0]
        ratio = _epsilons(run, "tight") / _epsilons(run, "rdp-classic")
        axes.hist(ratio, bins=60, histtype="step", density=True, label=name)
    axes.set_xlabel("tight ε ÷ ε by Rényi divergence (Mironov 2017)")
    axes.set_ylabel("density of examples")
    axes.legend(frameon=False)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [
        Row("Beyond", f"{TITLES[name]}: tight ε ÷ {label} ε, 5 / 50 / 95 % of examples", "–",
            " / ".join(f"{found[name][method][str(q)]:.3f}" for q in (0.05, 0.5, 0.95))
            + f"; worst case {found[name][method]['worst_case']:.3f}", scale(facts[name]), None)
        for name in RUNS
        for method, label in (("rdp-classic", "Mironov’s RDP"), ("rdp", "Balle et al.’s RDP"))
    ]  # fmt: skip
