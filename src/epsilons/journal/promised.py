"""Promised: what a journal's opening says of budgets; what each example's gradient is clipped to.

Promises and prices are written before the first step, so that no later version, machine or hand
can make them others. Who has which budget is secret: the opening has it beside the ids, and its
salted digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.filters import Allowance
from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.plan import Plan
from epsilons.accounting.promises import Promise

_WRITTEN = ("epsilon", "basis", "budget", "share", "order")


@dataclass(frozen=True, eq=False, repr=False)
class Promised:
    """The promises of a run, by budget, and whose they are.

    `prices[k][b]` (levels + 1,): of a filter, what a step of phase k costs at each level with
    budget b, in units of the allowance / 2⁴⁰; None with Scale. `assigned` (n,): the position of
    each example's budget among the promises.
    """

    promises: tuple[Promise, ...]
    prices: tuple[tuple[NDArray[np.int64], ...], ...] | None
    assigned: NDArray[np.uint8]

    @property
    def budgets(self) -> NDArray[np.float64]:
        """(n,): the budget of each example."""
        return np.array([promise.budget for promise in self.promises])[self.assigned]

    @property
    def shares(self) -> NDArray[np.float64]:
        """(budgets,): what share of the clip bound a gradient is clipped to, with Scale."""
        return np.array([promise.share or 1.0 for promise in self.promises])


def assigned_budgets(plan: Plan, budgets: ArrayLike | None) -> NDArray[np.uint8]:
    """Which of the plan's budgets each example has, from its own (n,); nothing without budgets.

    ValueError if an example has none, or one that the plan does not offer. It names no example.
    """
    if not plan.budgets:
        if budgets is not None:
            raise ValueError(
                "the examples have budgets, and the plan offers none; give Plan(budgets=…) those "
                "that people could choose from"
            )
        return np.zeros(0, dtype=np.uint8)
    if budgets is None:
        if len(plan.budgets) == 1:
            return np.zeros(plan.n, dtype=np.uint8)
        raise ValueError(
            f"the plan offers budgets={plan.budgets}, and who has which is not said; give "
            "Examples(budgets=…), one for each example"
        )
    given = np.asarray(budgets)
    if given.shape != (plan.n,) or given.dtype.kind not in "fiu":
        raise ValueError(
            f"budgets have shape {given.shape} and type {given.dtype}; expected {plan.n} numbers, "
            "one per example of the plan"
        )
    offered = np.array(plan.budgets)
    at = np.clip(np.searchsorted(offered, given), 0, len(offered) - 1)
    if (offered[at] != given).any():
        raise ValueError(
            f"an example has a budget that the plan does not offer; expected one of {plan.budgets} "
            "for each. Someone without a label has made no choice: leave them out, or give them "
            "the smallest"
        )
    return at.astype(np.uint8)


def promised_facts(plan: Plan, assigned: NDArray[np.uint8], salt: str) -> dict[str, Any]:
    """What the opening of a journal says of promises; nothing for a plan without budgets."""
    if not plan.budgets:
        return {}
    promises = []
    for promise in plan.promises:
        written = {name: getattr(promise, name) for name in _WRITTEN}
        allowance = promise.allowance
        promises.append(written | {"allowance": None if allowance is None else allowance.amount})
    facts: dict[str, Any] = {"promises": promises, "assignment": assignment_digest(assigned, salt)}
    if plan.clipping == "filtered":
        facts["prices"] = [
            [
                promise.allowance.prices(steps, plan.levels).tolist()
                for promise in plan.promises
                if promise.allowance is not None
            ]
            for steps in plan.promised_steps
        ]
    return facts


def read_promised(plan: Plan, facts: Mapping[str, Any], assigned: bytes) -> Promised | None:
    """What `promised_facts` wrote; None for a plan without budgets."""
    if not plan.budgets:
        return None
    promises = tuple(
        Promise(
            delta=plan.delta,
            allowance=None if amount is None else Allowance(amount=amount, order=written["order"]),
            steps=plan.promised_steps,
            releases=plan.releases,
            **{name: written[name] for name in _WRITTEN},
        )
        for written in facts["promises"]
        for amount in [written["allowance"]]
    )
    prices = None
    if "prices" in facts:
        prices = tuple(
            tuple(np.array(of_budget, dtype=np.int64) for of_budget in of_phase)
            for of_phase in facts["prices"]
        )
    return Promised(promises, prices, np.frombuffer(assigned, dtype=np.uint8))


def assignment_digest(assigned: NDArray[np.uint8], salt: str) -> str:
    """SHA-256 of who has which budget, salted: without the salt it confirms no guess."""
    return hashlib.sha256(bytes.fromhex(salt) + assigned.tobytes()).hexdigest()


def by_share(
    promised: Promised | None, examples: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], float]]:
    """Positions among `examples` (ascending), and the share of the clip bound that is theirs.

    One part with share 1 where everyone has the same bound; no share is missing, none is empty.
    """
    if promised is None or promised.prices is not None:
        yield np.arange(len(examples)), 1.0
        return
    assigned = promised.assigned[examples]
    for k, share in enumerate(promised.shares.tolist()):
        where = np.flatnonzero(assigned == k)
        if len(where):
            yield where, share


def scaled_bounds(
    promised: Promised | None,
    examples: NDArray[np.int64],
    norms: NDArray[np.float64] | None,
    bound: float,
    levels: int,
) -> NDArray[np.float64]:
    """Clip bounds (k,) of `examples`: each one's share of the bound, or thresholds within it.

    `norms` (k,): under individual clipping, those that hold; else None.
    """
    found = np.empty(len(examples))
    for where, share in by_share(promised, examples):
        own = bound * share
        found[where] = own if norms is None else clipping_thresholds(norms[where], own, levels)
    return found
