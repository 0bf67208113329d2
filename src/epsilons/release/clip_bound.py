"""The clip bound as a differentially private median of gradient norms at initialisation.

The paper takes the median and leaves its cost out; here it is charged like a publication.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.release.budget import Budget, Cost
from epsilons.release.mechanisms import Size
from epsilons.release.quantiles import CELLS, two_stage_draws, two_stage_noise, two_stage_quantiles

# Norms have no upper bound, so the range is public and wide: 12 orders of magnitude in cells of
# 1.4 %, between which the median is interpolated. A norm outside counts at the end of the range.
SMALLEST, LARGEST = 1e-6, 1e6
_LEAST_IN_NOISE = 20.0


@dataclass(frozen=True)
class ClipBound:
    """A private median norm, its 95 % interval, and what it cost.

    `value`: the bound, in units of the gradient. `low`, `high`: the interval. `cost`: for a plan's
    `clip_bound_mu` and `clip_bound_distance`, as `cost.releases`.
    """

    value: float
    low: float
    high: float
    cost: Cost

    def charge(self, budget: Budget) -> None:
        """Enter the clip bound into a run's `budget`; once, however often it is called.

        `OverBudget` where less is left; ValueError if it has another clip bound of the same cost.
        """
        answer = {"value": self.value, "low": self.low, "high": self.high}
        stored = budget.ask(_question(self.cost), self.cost, lambda: answer)
        if stored != answer:
            raise ValueError("this run's budget holds another clip bound of the same cost")


def median_cost(epsilon: float, delta: float) -> Cost:
    """What the median costs that is (`epsilon`, `delta`)-DP.

    To know the plan's worst case before the median is drawn.
    """
    return Cost.of(epsilon, delta, two_stage_draws(1))


def release_median_norm(
    norms: ArrayLike, *, epsilon: float = 0.1, delta: float = 1e-5, budget: Budget | None = None
) -> ClipBound:
    """The median of the n norms, (ε, δ)-DP for one record added or removed, n public.

    `norms` (n,), `epsilon` (by default 0.1), `delta` (by default 1e-5). ValueError where n is too
    small for the noise.

    NaN and ∞ count as large. With a `budget` it is charged there first, and asked again it is the
    same. Without one (the run is not there yet), `ClipBound.charge` enters it; until then the
    value must not leave, and training with it comes after.
    """
    values = np.asarray(norms, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"norms of shape {values.shape} must be (n,)")
    cost = median_cost(epsilon, delta)
    least = _LEAST_IN_NOISE * two_stage_noise(1, cost.mu)
    if len(values) < least:
        raise ValueError(
            f"n={len(values)} norms are too few for ε = {epsilon:g} at δ = {delta:g}: the noise "
            f"would drown them below {least:.0f}. Use a larger ε, or set max_grad_norm yourself."
        )
    inside = np.clip(np.nan_to_num(values, nan=LARGEST), SMALLEST, LARGEST)

    def answer() -> dict[str, float]:
        (found,) = two_stage_quantiles(inside, [0.5], norm_grid(), Size(len(values)), cost.mu)
        return asdict(found)

    if budget is None:
        return ClipBound(**answer(), cost=cost)
    return ClipBound(**budget.ask(_question(cost), cost, answer), cost=cost)


def _question(cost: Cost) -> dict[str, object]:
    return {
        "statistics": "median of initial gradient norms",
        "epsilon": cost.epsilon,
        "delta": cost.delta,
    }


def norm_grid(cells: int = CELLS) -> NDArray[np.float64]:
    """Points from the smallest to the largest norm, each by the same factor above the last."""
    return np.geomspace(SMALLEST, LARGEST, cells + 1)
