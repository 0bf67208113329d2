"""Promises: what is guaranteed to one person before training, whatever their record contains.

Everyone who is offered a budget ε_i has their own promise of (ε_i, δ)-DP. It is kept in one of two
ways. Scale: the gradient is clipped to a share c_i of the common bound, under common noise, and the
steps compose tightly. Filter: bounds adapt, and a step that can't be paid for is not taken part in
(see `filters`). What a training that was observed comes to (`Epsilons`) is no promise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from epsilons.accounting import checks
from epsilons.accounting.composition import NOTHING, Releases, composed_epsilon
from epsilons.accounting.filters import NO_TIGHT, Allowance, Steps, epsilon_of
from epsilons.accounting.individual import Method

Basis = Literal["scaled", "filtered", "filtered-gaussian"]

# In the logarithm of a share: how close to the largest, and where the search ends.
_TOLERANCE = 1e-10
_LEAST_SHARE = math.log(1e-8)


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What everyone with the budget `budget` is promised: the run is (`epsilon`, `delta`)-DP.

    `epsilon`: never above `budget`. `basis`: `"scaled"` (tight: clipped to the `share` of the clip
    bound at every step), `"filtered"` (by the one Rényi `order`) or `"filtered-gaussian"` (where
    every step uses everyone). `allowance`: of a filter, what it never spends more than. `steps` and
    `releases`: what it covers: the run's steps, its clip bound, and the reserve for publications.

    Guarantee: holds for one record added or removed, whatever it and the others contain, whatever
    budgets others have, and however the training goes. Public; who has which budget is not.
    """

    epsilon: float
    delta: float
    basis: Basis
    budget: float
    share: float | None = None
    order: float | None = None
    allowance: Allowance | None = field(default=None, repr=False)
    steps: tuple[Steps, ...] = field(default=(), repr=False)
    releases: Releases = field(default=NOTHING, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """What is public of it, as plain values."""
        names = ("budget", "epsilon", "delta", "basis", "share", "order")
        return {name: getattr(self, name) for name in names}

    def at(
        self, delta: float, method: Method | None = None, *, releases: Releases | None = None
    ) -> float:
        """ε of the same promise at another `delta` in (0, 1).

        `method`: of a scaled promise the accountant, by default `"tight"`; a filter has its order
        alone, and asking for `"tight"` raises ValueError with the reason. `releases`: beside the
        steps; by default those that the promise covers.
        """
        beside = self.releases if releases is None else releases
        if self.allowance is None:
            assert self.share is not None
            return composed(self.steps, self.share, delta, method or "tight", beside)
        if method == "tight":
            raise ValueError(f"method='tight': {NO_TIGHT}")
        return epsilon_of(self.allowance, delta, beside)


def composed(
    steps: Sequence[Steps],
    share: float,
    delta: float,
    method: Method = "tight",
    releases: Releases = NOTHING,
) -> float:
    """ε at δ of all the `steps` at this share of the clip bound, and of `releases`, together."""
    some = [one for one in steps if one.count]
    return composed_epsilon(
        np.array([float(one.noise(share)) for one in some]),
        np.array([one.sample_rate for one in some]),
        np.array([one.count for one in some], dtype=np.int64),
        delta,
        method=method,
        releases=releases,
    )


def largest_share(
    epsilon: float, delta: float, steps: Sequence[Steps], releases: Releases = NOTHING
) -> float:
    """The largest share c ≤ 1 of every clip bound with which steps and releases cost at most ε.

    By the tight accountant, and from below: the ε of the returned share is never above `epsilon`.
    ValueError where the releases alone cost as much, or the share is below 1e-8.
    """
    checks.positive("epsilon", epsilon)
    checks.open_unit("delta", delta)
    return _largest_share(float(epsilon), float(delta), tuple(steps), releases)


@functools.lru_cache(256)
def _largest_share(
    epsilon: float, delta: float, steps: tuple[Steps, ...], releases: Releases
) -> float:
    alone = composed((), 1.0, delta, "tight", releases)
    if alone >= epsilon:
        raise ValueError(
            f"a budget of ε = {epsilon:g} at delta={delta:g} can't be promised: clip bound and "
            f"reserve alone cost {alone:.4g}. Raise it, or spend less on them"
        )

    def excess(log_share: float) -> float:
        return composed(steps, math.exp(log_share), delta, "tight", releases) - epsilon

    if excess(0.0) <= 0:
        return 1.0

    from scipy.optimize import brentq  # here, since it takes most of a second to load

    too_much, enough = 0.0, -math.log(2)
    while excess(enough) > 0:
        too_much, enough = enough, enough - math.log(2)
        if enough < _LEAST_SHARE:
            raise ValueError(
                f"a budget of ε = {epsilon:g} at delta={delta:g} would clip below 1e-8 of the "
                "bound; raise it, or the noise"
            )
    root = float(brentq(excess, enough, too_much, xtol=_TOLERANCE / 4, rtol=1e-14))
    back = _TOLERANCE / 4
    while excess(root) > 0:
        root -= back
        back *= 2
    return math.exp(root)


def scaled_promise(
    budget: float, delta: float, steps: Sequence[Steps], releases: Releases = NOTHING
) -> Promise:
    """The promise of `budget` at `delta` by Scale; see `largest_share`."""
    share = largest_share(budget, delta, steps, releases)
    return Promise(
        epsilon=min(budget, composed(steps, share, delta, "tight", releases)),
        delta=delta,
        basis="scaled",
        budget=budget,
        share=share,
        steps=tuple(steps),
        releases=releases,
    )


def filtered_promise(
    budget: float,
    delta: float,
    allowance: Allowance,
    steps: Sequence[Steps],
    releases: Releases = NOTHING,
) -> Promise:
    """The promise of `budget` at `delta` by a filter that never spends more than `allowance`.

    ValueError if nothing is left for training.
    """
    if not allowance.amount > 0:
        by = "the Gaussian filter" if allowance.order is None else f"order={allowance.order:g}"
        raise ValueError(
            f"a budget of ε = {budget:g} at delta={delta:g} leaves nothing for training by {by}; "
            "raise it or delta, choose another order, or spend less on clip bound and reserve"
        )
    return Promise(
        epsilon=min(budget, epsilon_of(allowance, delta, releases)),
        delta=delta,
        basis="filtered-gaussian" if allowance.order is None else "filtered",
        budget=budget,
        order=allowance.order,
        allowance=allowance,
        steps=tuple(steps),
        releases=releases,
    )
