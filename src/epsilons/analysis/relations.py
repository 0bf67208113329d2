"""ε against final training loss: the paper's logarithmic relation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.results import Epsilons
from epsilons.analysis.correlation import pearson, spearman


@dataclass(frozen=True, eq=False)
class LossRelation:
    """How ε goes with loss: ε ≈ `intercept` + `slope` · log loss.

    `pearson` is that of ε and log loss (the paper's), `pearson_below_worst` leaves out the examples
    at the worst case, `spearman` needs no shape. None: not defined, because all are equal.
    `left_out`: examples whose loss has no logarithm. `epsilons` and `losses` are private. `n`: how
    many examples are in it. `worst_case`: of an example at the clip bound.
    """

    n: int
    left_out: int
    slope: float | None
    intercept: float | None
    pearson: float | None
    pearson_below_worst: float | None
    spearman: float | None
    worst_case: float
    epsilons: NDArray[np.float64] = field(repr=False)
    losses: NDArray[np.float64] = field(repr=False)

    def predicted(self, losses: ArrayLike) -> NDArray[np.float64]:
        """ε on the fitted line, for `losses` > 0; ValueError if there is no line."""
        if self.slope is None or self.intercept is None:
            raise ValueError("all losses are equal, hence there is no fitted line")
        return np.asarray(self.intercept + self.slope * np.log(losses))


def loss_relation(epsilons: Epsilons, losses: ArrayLike | None) -> LossRelation:
    """Relation of `epsilons` and final training `losses` (n,): least squares on log loss.

    ValueError for a run that is not private, and without losses.

    >>> loss = np.exp([0.0, 1.0, 2.0])
    >>> found = Epsilons(values=np.array([1.0, 3.0, 5.0]), delta=1e-5, method="rdp", kind="exact",
    ...                  worst_case=9.0)
    >>> relation = loss_relation(found, loss)
    >>> round(relation.slope, 9), round(relation.intercept, 9), round(relation.pearson, 9)
    (2.0, 1.0, 1.0)
    """
    if epsilons.kind == "none":
        raise ValueError("the run is not private, so that there is no ε to relate to losses")
    if losses is None:
        raise ValueError("the run has no final losses of its training examples")
    loss = np.asarray(losses, dtype=np.float64)
    if loss.shape != epsilons.values.shape:
        raise ValueError(f"losses of shape {loss.shape} for {len(epsilons)} examples")
    usable = np.isfinite(loss) & (loss > 0) & np.isfinite(epsilons.values)
    x, y = np.log(loss[usable]), epsilons.values[usable]
    below = ~epsilons.at_worst_case[usable]
    fit = _line(x, y)
    return LossRelation(
        n=len(x),
        left_out=len(loss) - len(x),
        slope=fit[0] if fit else None,
        intercept=fit[1] if fit else None,
        pearson=pearson(x, y),
        pearson_below_worst=pearson(x[below], y[below]),
        spearman=spearman(x, y),
        worst_case=epsilons.worst_case,
        epsilons=y,
        losses=loss[usable],
    )


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float] | None:
    """Slope and intercept by least squares; None if no line is determined."""
    if len(x) < 2 or np.ptp(x) == 0:
        return None
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return slope, float(y.mean() - slope * x.mean())
