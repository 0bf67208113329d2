"""The course of a training: norms of groups, and what has been paid by when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.individual import METHODS, Method
from epsilons.analysis.groups import group_labels
from epsilons.analysis.replay import Replay, priced_together, random_examples, replayed
from epsilons.runs import Run

EXAMPLES = 1000
MOMENTS = 16
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
_SHOWN = METHODS[:2]


@dataclass(frozen=True)
class NormCourse:
    """Median norm of each group (refreshes,) at the steps of the refreshes.

    `max_grad_norm`: the bound that they are clipped to, at first; None if they are not. `by`: the
    columns of groups. `steps` (refreshes,): before which the norms were taken. `medians`: by group.
    """

    by: tuple[str, ...]
    steps: NDArray[np.int64]
    medians: Mapping[str, NDArray[np.float64]]
    max_grad_norm: float | None


@dataclass(frozen=True)
class EpsilonCourse:
    """Quantiles of ε, and the worst case by each method, after given numbers of steps.

    From `n` random examples and the norms of refreshes alone. `method`: of the quantiles. `steps`
    (moments,): after how many charged steps. `quantiles`: by share, (moments,). `worst_case`: by
    method, (moments,).
    """

    n: int
    method: str
    steps: NDArray[np.int64]
    quantiles: Mapping[float, NDArray[np.float64]]
    worst_case: Mapping[str, NDArray[np.float64]]


def norm_course(run: Run, by: str | Sequence[str]) -> NormCourse:
    """Median gradient norm per group over training (paper, Fig. 3).

    `run`: with recorded norms, else ValueError. `by`: the column of groups, or several.
    """
    columns = (by,) if isinstance(by, str) else tuple(by)
    labels = group_labels(run.examples, columns)
    steps = run.journal.refreshes_now()
    if not steps:
        raise ValueError("no norms were recorded in this run")
    names, index = np.unique(labels, return_inverse=True)
    members = [np.flatnonzero(index == k) for k in range(len(names))]
    table = np.empty((len(names), len(steps)))
    for column, step in enumerate(steps):
        norms = run.journal.norms(step)
        norms = np.where(np.isnan(norms), np.inf, norms)
        for row, some in enumerate(members):
            # the lower of the two middle ones: between a number and ∞ there is none
            table[row, column] = np.partition(norms[some], (len(some) - 1) // 2)[
                (len(some) - 1) // 2
            ]
    medians = dict(zip(names.tolist(), table, strict=True))
    bound = None if run.plan.clipping == "none" else run.plan.phase(0).max_grad_norm
    return NormCourse(columns, np.array(steps), medians, bound)


def epsilon_course(
    run: Run,
    method: Method = METHODS[0],
    *,
    examples: int = EXAMPLES,
    moments: int = MOMENTS,
    seed: int = 0,
) -> EpsilonCourse:
    """What had been paid after each of some numbers of steps, up to all that were charged.

    `run`: with charged steps, else ValueError. `method`: the accountant, `"tight"` (the default),
    `"rdp"` or `"rdp-classic"`. `examples`: how many at most, drawn by `seed`; by default 1000.
    `moments`: after how many numbers of steps, evenly spaced; by default 16.
    """
    every = replayed(run.journal, random_examples(run.plan.n, examples, seed), sampled=False)
    if not every.length:
        raise ValueError("no steps were charged in this run")
    ends = np.unique(np.linspace(0, every.length, moments + 1).round().astype(np.int64)[1:])
    m = every.norms.shape[1]
    at_bound = _until(replace(every, norms=every.bound[:, None], steps=every.steps[:, :1]), ends)
    paid, worst = priced_together([_until(every, ends), at_bound], method)
    found = paid.values.reshape(len(ends), m)
    return EpsilonCourse(
        n=m,
        method=method,
        steps=ends,
        quantiles={q: np.quantile(found, q, axis=1, method="higher") for q in QUANTILES},
        worst_case={
            known: worst.values if known == method else at_bound.epsilons(known).values
            for known in METHODS
            if known in (method, *_SHOWN)
        },
    )


def _until(every: Replay, ends: NDArray[np.int64]) -> Replay:
    """The examples once for each end (rows, ends · m): all priced in one go."""
    begins = np.cumsum(every.steps, axis=0) - every.steps
    parts = [np.clip(end - begins, 0, every.steps) for end in ends]
    return replace(
        every, norms=np.tile(every.norms, len(ends)), steps=np.concatenate(parts, axis=1)
    )
