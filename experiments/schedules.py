"""What other refreshes would have given, from norms that were recorded at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from epsilons import Epsilons, Run, individual_epsilons
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


def refreshed(run: Run, asked: Sequence[tuple[float, str]]) -> list[Agreement]:
    """Agreement with the exact ε of the followed examples, for each (γ, schedule) asked for.

    All are rounded as the run's plan says, so that refreshing is all that differs; and priced in
    one go, since a table of prices is what takes time.
    """
    plan = run.plan
    _, norms = run.journal.followed()
    lengths = np.zeros((len(norms), 1 + len(asked)), dtype=np.int64)
    lengths[:, 0] = 1
    for column, (per_epoch, schedule) in enumerate(asked, start=1):
        other = dataclasses.replace(
            plan,
            refreshes_per_epoch=per_epoch,
            refresh_every=None,
            refresh_schedule=schedule,  # type: ignore[arg-type]
        )
        steps = np.array(other.refresh_steps)
        lengths[steps, column] = np.diff(np.append(steps, len(norms)))
    m = norms.shape[1]
    table = np.tile(norms, lengths.shape[1])
    together = priced(
        run, table, np.repeat(lengths, m, axis=1), rounding=plan.rounding, levels=plan.levels
    )
    exact, *others = np.split(together.values, lengths.shape[1])
    return [Agreement.of(estimate, exact) for estimate in others]
