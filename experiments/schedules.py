"""What other refreshes would have given, from norms that were recorded at every step."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from epsilons import Epsilons, Run, individual_epsilons
from epsilons.analysis import Agreement
from experiments.recipes import METHOD


def priced(
    run: Run,
    norms: NDArray[np.float64],
    held: NDArray[np.int64],
    *,
    method: str = METHOD,
    rounding: str | None = None,
    levels: int = 256,
) -> Epsilons:
    """ε's of norms (rows, m), each row held for so many steps, at the constants of the run."""
    plan = run.plan
    return individual_epsilons(
        norms, held, sample_rate=plan.sample_rate, noise_std=plan.noise_std,
        max_grad_norm=plan.max_grad_norm, delta=plan.delta, method=method,  # type: ignore[arg-type]
        rounding=rounding, levels=levels,  # type: ignore[arg-type]
    )  # fmt: skip


def refreshed(run: Run, per_epoch: float, schedule: str = "uniform") -> Agreement:
    """Agreement with the exact ε of the followed examples, refreshed so many times per epoch.

    Both are rounded as the run's plan says, so that refreshing is all that differs.
    """
    plan = dataclasses.replace(
        run.plan, refreshes_per_epoch=per_epoch, refresh_every=None, refresh_schedule=schedule
    )
    _, norms = run.journal.followed()
    steps = np.array(plan.refresh_steps)
    rounded = dict(rounding=plan.rounding, levels=plan.levels)
    estimate = priced(run, norms[steps], np.diff(np.append(steps, len(norms))), **rounded)
    exact = priced(run, norms, np.ones(len(norms), dtype=np.int64), **rounded)
    return Agreement.of(estimate.values, exact.values)
