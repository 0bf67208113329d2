"""What a larger or smaller clip bound would have done (paper, Appendix C)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.results import Epsilons
from epsilons.analysis.groups import group_labels
from epsilons.analysis.replay import priced_together, random_examples, replayed
from epsilons.runs import Run

FACTORS = (0.5, 1.0, 2.0)
EXAMPLES = 2000


@dataclass(frozen=True)
class BoundRow:
    """One clip bound: ε's, mean ε by group, and the share of steps at which norms exceed it.

    `max_grad_norm`: the bound. `epsilons`: under it; private. `group_means`: by group, empty if
    none was asked for. `clipped`: that share, of replayed norms only. `test_accuracy`: of a run
    that was trained with the bound. `name`: what figures call it.
    """

    max_grad_norm: float
    epsilons: Epsilons
    group_means: Mapping[str, float]
    test_accuracy: float | None = None
    clipped: float | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """Its name in figures: `name`, or the bound."""
        return self.name or f"C = {self.max_grad_norm:.3g}"

    @property
    def at_worst_case(self) -> float:
        """The share of examples at the worst case."""
        return float(self.epsilons.at_worst_case.mean())


def other_clip_bounds(
    run: Run,
    by: str | Sequence[str] | None = None,
    method: Method = METHODS[0],
    *,
    factors: Sequence[float] = FACTORS,
    examples: int = EXAMPLES,
    seed: int = 0,
) -> list[BoundRow]:
    """The run's norms priced under other clip bounds at the same worst case.

    The noise multiplier stays, so that noise grows with the bound. Along the observed models: a
    training with another bound would see others. Of at most `examples` random examples. `run`: with
    recorded norms. `by`: a column of groups, or several. `method`: the accountant, `"tight"` (the
    default), `"rdp"` or `"rdp-classic"`. `factors`: the bounds, as multiples of the run's own.
    `seed` draws the examples.
    """
    chosen = random_examples(run.plan.n, examples, seed)
    every = replayed(run.journal, chosen)
    labels = None
    if by is not None:
        labels = group_labels(run.examples, (by,) if isinstance(by, str) else tuple(by))[chosen]
    others = [every.with_bound(factor) for factor in factors]
    rows = []
    for factor, other, priced in zip(factors, others, priced_together(others, method), strict=True):
        above = ~(other.norms < other.bound[:, None])  # not a number: clipped
        rows.append(
            BoundRow(
                max_grad_norm=factor * run.plan.max_grad_norm,
                epsilons=priced,
                group_means=_means(priced, labels),
                clipped=float((above * other.steps).sum() / max(1, other.steps.sum())),
            )
        )
    return rows


def bounds_of_runs(runs: Sequence[Run], by: str | Sequence[str] | None = None) -> list[BoundRow]:
    """The figures of `runs` trained with different clip bounds, by ascending bound.

    `by`: a column of groups, or several, for their mean ε's.
    """
    rows = []
    for run in runs:
        labels = None
        if by is not None:
            labels = group_labels(run.examples, (by,) if isinstance(by, str) else tuple(by))
        epsilons = run.epsilons()
        right = None if run.test is None else run.test.correct
        rows.append(
            BoundRow(
                max_grad_norm=run.plan.max_grad_norm,
                epsilons=epsilons,
                group_means=_means(epsilons, labels),
                test_accuracy=None if right is None else float(right.mean()),
            )
        )
    return sorted(rows, key=lambda row: row.max_grad_norm)


def _means(epsilons: Epsilons, labels: NDArray[np.str_] | None) -> dict[str, float]:
    if labels is None:
        return {}
    return {
        name: float(epsilons.values[labels == name].mean()) for name in np.unique(labels).tolist()
    }
