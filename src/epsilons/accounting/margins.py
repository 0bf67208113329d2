"""Margin: how much more than its computed norm an example can add to what a step releases.

A journal keeps its margin and adds it to every norm that is recorded: no loop can forget it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting import checks
from epsilons.accounting.plan import Phase, Plan
from epsilons.accounting.sums import NORM_ERROR, rounding_charge, sum_remainder

_MOST_PARAMETERS = 2**40  # more than any model has; costs 2.4e-4 of the noise's standard deviation


@dataclass(frozen=True, kw_only=True)
class Margin:
    """What is added to computed norms before they are charged.

        ‖g_i‖ · (1 + relative) + g·√d + remainder

    The first term covers the rounding of the norms, the second that of the released sum to the
    grid of the noise, for d `parameters`, the third that of a float64 sum itself (`sum_remainder`).

    `parameters`: how many numbers are trained by `private_step`; by default 2⁴⁰, enough for any
    model. None: the steps are another library's, whose noise is on no grid, and the first term is
    all. `relative`: how much a norm may be below the truth; 0 for norms known exactly. ValueError
    unless `relative` is in [0, 1) and `parameters` a whole number ≥ 1.

    >>> plan = Plan(n=100, batch_size=10, steps=5, noise_multiplier=1.0, max_grad_norm=1.0,
    ...             delta=1e-3)
    >>> Margin(parameters=None).charged(np.array([1.0]), plan.all_phases)
    array([1.0001])
    """

    relative: float = NORM_ERROR
    parameters: int | None = _MOST_PARAMETERS

    def __post_init__(self) -> None:
        if not 0 <= self.relative < 1:
            raise ValueError(f"relative={self.relative}; expected a number in [0, 1)")
        if self.parameters is not None:
            checks.whole("parameters", self.parameters, least=1)

    def charged(self, norms: NDArray[np.float64], phases: Iterable[Phase]) -> NDArray[np.float64]:
        """The `norms` (n,) plus the margin for steps of `phases`; without noise, as they are."""
        noisy = [phase for phase in phases if phase.noise_std > 0]
        if not noisy:
            return norms
        return norms * (1 + self.relative) + max(map(self.room, noisy))

    def room(self, phase: Plan | Phase) -> float:
        """What the rounding of the sums of one `phase` may add to a norm, whatever it is."""
        if self.parameters is None:
            return 0.0
        charge = rounding_charge(phase.noise_std, self.parameters)
        if phase.sums == "float32":
            return charge
        return charge + sum_remainder(phase.max_batch, phase.max_grad_norm)


def phases_of_norms(plan: Plan, step: int, *, before: bool = False) -> list[Phase]:
    """The phases of the steps for which norms recorded at `step` may hold: to the next refresh.

    `before`: also those after the refresh before it, since the norms of a refresh may hold there.
    """
    if plan.endless:
        return list(plan.all_phases)
    end = next((t for t in plan.refresh_steps if t > step), plan.steps)
    end = max(end, step + 1)
    earlier = [t + 1 for t in plan.refresh_steps if t < step] if before else []
    first = min(step, earlier[-1] if earlier else step)
    return [phase for phase in plan.all_phases if phase.first < end and phase.end > first]
