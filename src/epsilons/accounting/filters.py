"""Filters: what an example may still spend, so that it never spends more than was promised.

A promise of ε is turned into an allowance B of Rényi divergence at one order α. A step at which an
example is clipped to Z costs it ρ_α(Z/σ), drawn or not; at each refresh its bound for the steps to
come is the largest that it can pay for. What it has spent is never above B, on any path of the
training, and therefore the whole run is (α, B)-RDP for it (Feldman & Zrnic 2021), in both
directions. With p = 1 in every step the same holds of μ-GDP, tightly (Koskela et al. 2023).

No tight or PLD promise is made: those δ's are not ordered under composition, so that a choice
between two continuations, each within the promise, can exceed it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting import checks
from epsilons.accounting.composition import NOTHING, Releases, gaussian_epsilon, gaussian_mu
from epsilons.accounting.histories import level_norms
from epsilons.accounting.rdp import DEFAULT_ORDERS, sampled_gaussian_rdp
from epsilons.accounting.sums import delta_within_cap

ALL = 2**40
"""An allowance in whole numbers, in which prices are charged and what is spent adds up exactly."""

NO_TIGHT = (
    "a filter has no tight or PLD promise: the δ of an adaptive choice between two continuations "
    "can exceed the δ of both. Its promise is by its one Rényi order"
)

# More than ρ and its sums err, relatively; and than ε − cost errs, relative to its terms.
_UP = 1 + 1e-12
_ERROR = 4e-15
_TOLERANCE = 1e-12  # of a share, in its logarithm
_LEAST_SHARE = 1e-30


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps with the same constants: all that a promise and a price table need to know of a phase.

    `count`: how many, None where the length is unknown. `sample_rate`: probability of being drawn.
    `noise_multiplier`: standard deviation of the noise over the clip bound.
    """

    count: int | None
    sample_rate: float
    noise_multiplier: float

    def noise(self, share: ArrayLike) -> NDArray[np.float64]:
        """Noise over norm of examples that are clipped to these shares of the clip bound."""
        with np.errstate(divide="ignore"):
            return self.noise_multiplier / np.asarray(share, dtype=np.float64)

    def rdp(self, share: ArrayLike, order: float) -> NDArray[np.float64]:
        """ρ of one step at `order` for examples clipped to these shares of the clip bound."""
        return sampled_gaussian_rdp(self.noise(share), self.sample_rate, [order])[..., 0]


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What a budget of ε at δ leaves for training: `amount` B at the Rényi order `order`.

    With `order` None it is μ², of the Gaussian filter.
    """

    amount: float
    order: float | None

    def cost(self, steps: Steps, share: ArrayLike) -> NDArray[np.float64]:
        """What one of the `steps` costs at these shares of the clip bound, not rounded."""
        if self.order is None:
            found: NDArray[np.float64] = steps.noise(share) ** -2.0
            return found
        return steps.rdp(share, self.order)

    def share(self, steps: Sequence[Steps]) -> float:
        """The largest share of the clip bound, also above 1, that all the `steps` together allow.

        Rounded down. Of a whole run: its pace. Of one step: what a partial last step may use.
        """
        from scipy.optimize import brentq  # here, since it takes most of a second to load

        def excess(log_share: float) -> float:
            share = math.exp(log_share)
            costs = [one.count * float(self.cost(one, share)) for one in steps if one.count]
            spent = sum(costs) * _UP
            return math.log(spent / self.amount) if spent > 0 else -math.inf

        if self.amount <= 0 or not any(one.count and one.sample_rate for one in steps):
            return 0.0 if self.amount <= 0 else math.inf
        low = high = 0.0
        while excess(low) > 0:
            low -= math.log(4)
            if low < math.log(_LEAST_SHARE):
                return 0.0
        while excess(high) <= 0:
            high += math.log(4)
        if not math.isfinite(excess(high)):
            high = low + math.log(4)
        root = float(brentq(excess, low, high, xtol=_TOLERANCE / 4, rtol=1e-14))
        back = _TOLERANCE / 4
        while excess(root) > 0:
            root -= back
            back *= 2
        return math.exp(root)

    def prices(self, steps: Steps, levels: int) -> NDArray[np.int64]:
        """What one step costs at each level (levels + 1,), in whole numbers of the allowance / 2⁴⁰.

        Rounded up and strictly rising; level 0 costs nothing, as who is there is out. A level that
        costs more than the whole allowance has a price above 2⁴⁰.
        """
        costs = self.cost(steps, level_norms(1.0, levels))
        with np.errstate(over="ignore"):
            units = np.ceil(costs * _UP / (self.amount / ALL))
        whole = np.minimum(units, ALL + 1).astype(np.int64)
        index = np.arange(levels + 1)
        found: NDArray[np.int64] = np.maximum.accumulate(np.maximum(whole, index) - index) + index
        return found


def conversion_cost(order: float, delta: float) -> float:
    """What (α, ρ)-RDP adds to ρ at δ: log(1−1/α) − log(δα)/(α−1) (Balle et al. 2020, Thm 21)."""
    alpha = float(checks.orders_above_one(order))
    checks.open_unit("delta", delta)
    return math.log1p(-1 / alpha) - (math.log(delta) + math.log(alpha)) / (alpha - 1)


def rdp_allowance(
    epsilon: float, delta: float, order: float, releases: Releases = NOTHING
) -> Allowance:
    """B = ε − cost − αμ²/2, rounded down: what steps may cost at `order`; ≤ 0 if nothing is left.

    `releases`: what is paid beside the steps, before them or reserved for later.
    """
    left = _delta_left(epsilon, delta, releases)
    if left <= 0:
        return Allowance(amount=-math.inf, order=order)
    parts = epsilon, conversion_cost(order, left), order * releases.mu**2 / 2
    amount = parts[0] - parts[1] - parts[2]
    return Allowance(amount=amount - _ERROR * sum(map(abs, parts)), order=order)


def gaussian_allowance(epsilon: float, delta: float, releases: Releases = NOTHING) -> Allowance:
    """μ(ε, δ)² less that of `releases`: what steps that use everyone may cost; ≤ 0 if none is."""
    left = _delta_left(epsilon, delta, releases)
    if left <= 0:
        return Allowance(amount=-math.inf, order=None)
    mu = gaussian_mu(epsilon, left)
    amount = mu**2 - releases.mu**2
    return Allowance(amount=amount - _ERROR * mu**2, order=None)


def choose_order(
    epsilon: float, delta: float, steps: Sequence[Steps], releases: Releases = NOTHING
) -> float:
    """The Rényi order at which the largest share of the clip bound lasts for all the `steps`.

    Of `DEFAULT_ORDERS`; from public constants only, and before training: an order chosen by what
    was spent keeps no promise. `epsilon`, `delta`: the budget. `releases`: what is paid beside.
    ValueError for steps of unknown length, and where no order leaves anything for them.
    """
    return _chosen(float(epsilon), float(delta), tuple(steps), releases)


@functools.lru_cache(256)
def _chosen(epsilon: float, delta: float, steps: tuple[Steps, ...], releases: Releases) -> float:
    if any(one.count is None for one in steps):
        raise ValueError("a run of unknown length needs its Rényi order: order=…")
    found = {}
    for order in DEFAULT_ORDERS.tolist():
        allowance = rdp_allowance(epsilon, delta, order, releases)
        if allowance.amount > 0:
            found[order] = allowance.share(steps)
    if not found or not max(found.values()) > 0:
        raise ValueError(
            f"a budget of ε = {epsilon:g} at delta={delta:g} leaves nothing for training by Rényi "
            "divergence. Raise it or delta, or use Scale (clipping='max' or 'individual')"
        )
    best: float = max(found, key=lambda order: found[order])
    return best


def epsilon_of(allowance: Allowance, delta: float, releases: Releases = NOTHING) -> float:
    """ε at δ of a run that never spends more than the `allowance`, and of `releases` beside it."""
    inside = delta_within_cap(delta)
    if allowance.order is None:
        mu = math.hypot(math.sqrt(allowance.amount), releases.mu)
        return gaussian_epsilon(mu, inside, releases.distance)
    rdp = allowance.amount + allowance.order * releases.mu**2 / 2
    epsilon = max(0.0, rdp + conversion_cost(allowance.order, inside))
    if releases.distance == 0:
        return epsilon
    # ε at a smaller δ is larger, and so is what the distance then takes of δ
    for _ in range(64):
        left = inside - (1 + math.exp(min(epsilon, 700.0))) * releases.distance
        if left <= 0:
            return math.inf
        more = max(0.0, rdp + conversion_cost(allowance.order, left))
        if more <= epsilon * (1 + 1e-15):
            return more
        epsilon = more * (1 + 1e-15)
    return math.inf


def spendable(pace: float, end: int, steps: int | None) -> int:
    """How much may be spent before step `end` of so many `steps`, in units of the allowance / 2⁴⁰.

    With pace 1 (Feldman & Zrnic) all of it, at any time; with pace 0 in proportion to the steps.
    """
    if steps is None or pace == 1:
        return ALL
    return min(ALL, math.floor(ALL * (pace + (1 - pace) * min(1.0, end / steps))))


def affordable_levels(
    norms: NDArray[np.float64],
    spent: NDArray[np.int64],
    prices: NDArray[np.int64],
    grid: NDArray[np.float64],
    *,
    steps: int,
    limit: int,
    least: int = 1,
    slack: float = 1.0,
) -> NDArray[np.int64]:
    """The levels (m,) that examples are clipped to for the next `steps`; 0: out for these.

    The level that covers `slack` times the norm, or the largest with which what is `spent` (m,),
    steps times `prices` (levels + 1,) and all stay within `limit`, if that is lower. `grid`
    (levels + 1,): the norms of the levels. Levels below `least` are no thresholds: out. NaN is
    covered by the highest level alone.
    """
    top = len(grid) - 1
    wanted = np.clip(np.searchsorted(grid, slack * norms, side="left"), max(1, least), top)
    each = np.maximum(limit - spent, 0) // max(1, steps)
    paid = np.searchsorted(prices, each, side="right") - 1
    chosen = np.minimum(wanted, paid)
    found: NDArray[np.int64] = np.where(chosen < least, 0, chosen)
    return found


def _delta_left(epsilon: float, delta: float, releases: Releases) -> float:
    checks.positive("epsilon", epsilon)
    inside = delta_within_cap(float(checks.open_unit("delta", delta)))
    return inside - (1 + math.exp(min(epsilon, 700.0))) * releases.distance
