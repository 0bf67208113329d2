"""What other refreshes would have given, from norms that were recorded at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from epsilons import Epsilons, Run, individual_epsilons
from epsilons.accounting import Hold, held
from epsilons.analysis import Agreement
from experiments.recipes import METHOD


def priced(
    run: Run,
    norms: NDArray[np.float64],
    lengths: NDArray[np.int64],
    *,
    method: str = METHOD,
    rounding: str | None = None,
    levels: int = 256,
) -> Epsilons:
    """ε's of norms (rows, m), which hold for `lengths` steps, at the constants of the run."""
    plan = run.plan
    return individual_epsilons(
        norms, lengths, sample_rate=plan.sample_rate, noise_std=plan.noise_std,
        max_grad_norm=plan.max_grad_norm, delta=plan.delta, method=method,  # type: ignore[arg-type]
        rounding=rounding, levels=levels,  # type: ignore[arg-type]
    )  # fmt: skip


def refreshed(run: Run, asked: Sequence[tuple[float, str, Hold]]) -> list[Agreement]:
    """Agreement with the exact ε of the followed examples, for each (γ, schedule, hold) asked for.

    All are rounded as the run's plan says, so that refreshing is all that differs; and priced in
    one go, since a table of prices is what takes time.
    """
    plan = run.plan
    _, norms = run.journal.followed()
    parts = [(norms, np.ones(len(norms), dtype=np.int64))]
    for per_epoch, schedule, hold in asked:
        other = dataclasses.replace(
            plan,
            refreshes_per_epoch=per_epoch,
            refresh_every=None,
            refresh_schedule=schedule,  # type: ignore[arg-type]
        )
        at = np.array(other.refresh_steps)
        parts.append(held(norms[at], at, len(norms), hold))
    rows, m = norms.shape
    table = np.zeros((rows, len(parts) * m))
    lengths = np.zeros((rows, len(parts) * m), dtype=np.int64)
    for k, (some, steps) in enumerate(parts):
        table[: len(some), k * m : (k + 1) * m] = some
        lengths[: len(some), k * m : (k + 1) * m] = steps[:, None]
    together = priced(run, table, lengths, rounding=plan.rounding, levels=plan.levels)
    exact, *others = np.split(together.values, len(parts))
    return [Agreement.of(estimate, exact) for estimate in others]
