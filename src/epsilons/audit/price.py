"""Is the price that of the norms that the steps got? Priced again, by FFT instead of a contour."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from epsilons.accounting.composition import NOTHING
from epsilons.audit.checks import Check, at_most
from epsilons.audit.curve import History, epsilon_below
from epsilons.audit.fresh import charged_history, worst_history
from epsilons.runs import Run

_PRICE = "price"
_FEW = 8  # different ratios, for which a fine grid takes little time
_POINTS, _FEWER_POINTS = 2**19, 2**16
_LEVELS = 40  # different ratios of a history that are priced; others go down to one of these


def check_price(history: History, claim: float, delta: float, *, name: str = "price") -> Check:
    """Whether the `claim` is at least the ε of what the steps really got.

    `history`: their norms over the noise, sample rates and numbers of steps. `claim`: the ε that is
    stated at `delta`. `name`: of the check. The ε compared is by FFT, with losses rounded down:
    never above the exact one, and about 1e-4 below.
    """
    points = _POINTS if history.ratios.size <= _FEW else _FEWER_POINTS
    found = epsilon_below(_coarser(history), delta, points=points)
    reason = f"the steps cost at least {found:.4g}" if found > claim else ""
    return at_most(_PRICE, name, found, claim, reason)


def check_run_price(run: Run, *, most: int = 6) -> tuple[Check, ...]:
    """The price of a run's worst case and, if they are claims, of its cheapest and some examples.

    `run`: with steps charged. `most`: how many examples.
    """
    journal, plan = run.journal, run.plan
    claim = journal.worst_case(releases=NOTHING)
    found = [check_price(worst_history(run), claim, plan.delta, name="worst case")]
    if journal.kind in ("exact", "bound") and journal.refreshes_now():
        stated = journal.epsilons(releases=NOTHING).values
        order = np.argsort(stated, kind="stable")
        ranks = np.unique(np.round(np.linspace(0, 1, most) ** 2 * (len(order) - 1)).astype(int))
        found += [
            check_price(
                charged_history(run, int(index)), float(stated[index]), plan.delta,
                name=f"example at rank {rank} of {len(order)}",
            )
            for rank, index in zip(ranks, order[ranks], strict=True)
        ]  # fmt: skip
    return tuple(found)


def check_added(
    added: ArrayLike, sample_rates: ArrayLike, claim: float, delta: float, *, name: str
) -> Check:
    """The price of what was seen to enter the sums.

    `added` (steps,): norms over the noise. `sample_rates` (steps,) or one. `claim`, `delta`,
    `name`: as for `check_price`.
    """
    return check_price(History(added, sample_rates, 1), claim, delta, name=name)


def _coarser(history: History) -> History:
    """At most so many different ratios for each sample rate, each rounded down: never dearer."""
    if history.ratios.size <= _LEVELS:
        return history
    grid = np.unique(np.quantile(history.ratios, np.linspace(0, 1, _LEVELS), method="lower"))
    down = grid[np.maximum(np.searchsorted(grid, history.ratios, side="right") - 1, 0)]
    return History(down, history.sample_rates, history.steps)
