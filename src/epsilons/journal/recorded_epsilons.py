"""ε of the norms in a journal, and its kind: exact, bound or estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.composition import Releases, composed_epsilons
from epsilons.accounting.holding import Hold
from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal.assumptions import expect_separate, random_draws
from epsilons.journal.chain import Chain
from epsilons.journal.charges import charged_counts
from epsilons.journal.filtered import filtered_constants, filtered_histories
from epsilons.journal.intervals import chosen_examples
from epsilons.journal.norm_records import (
    Constants,
    followed,
    histories,
    refresh_intervals,
    row_constants,
)
from epsilons.journal.opening import Opening
from epsilons.journal.promised import by_share

_ROUNDED: dict[str | None, Kind] = {None: "exact", "up": "bound", "nearest": "estimate"}
# Norms at a time (16 MiB) bound the memory; examples at a time are not so few that reading them
# takes long, nor so many that processes have nothing to share.
_NORMS, _FEWEST, _MOST = 2**21, 1024, 65_536


def worst_case(
    chain: Chain,
    plan: Plan,
    method: Method,
    *,
    until: int | None = None,
    delta: float | None = None,
    releases: Releases | None = None,
) -> float:
    """ε of an example at the clip bound in every charged step; see `Journal.worst_case`."""
    expect_separate(chain)
    return plan.worst_case(
        method, steps=charged_counts(chain, plan, until), delta=delta, releases=releases
    )


def kind(chain: Chain, opening: Opening, *, sampled: bool) -> Kind:
    """The kind of the individual ε's, with or without sampled norms; see `Journal.kind`."""
    expect_separate(chain)
    plan, intervals = opening.plan, refresh_intervals(chain, opening.plan)
    if plan.clipping != "max":
        return plan.kind
    at_bound = [entry is None for entry in intervals.entry]
    some = sampled and chain.last("sampled") is not None
    if all(at_bound) and not some:
        return "bound"
    # For steps after its own a norm is an estimate. The clip bound is none, whatever the step, but
    # sampled norms may hold in the same interval.
    lengths = zip(intervals.lengths, at_bound, strict=True)
    older = any(length > 1 for length, bound in lengths if some or not bound)
    random = random_draws(chain, opening)
    if older or random or "estimate" in (plan.kind, _ROUNDED[plan.rounding]):
        return "estimate"
    return "bound" if any(at_bound) else _ROUNDED[plan.rounding]


def epsilons(
    chain: Chain,
    opening: Opening,
    delta: float | None,
    method: Method,
    *,
    sampled: bool,
    only: ArrayLike | None,
    releases: Releases | None,
    hold: Hold,
    progress: Callable[[int], None] | None,
    processes: int,
) -> Epsilons:
    """ε of every example, or of the examples `only`; see `Journal.epsilons`."""
    chosen = chosen_examples(opening.plan.n, only)
    let_out = opening.plan.releases if releases is None else releases
    worth = kind(chain, opening, sampled=sampled)
    readings: tuple[Hold, ...] = (hold,)
    if worth == "estimate" and hold == "nearest":
        readings = ("nearest", "cautious")
    priced = [
        _priced(
            chain,
            opening,
            delta,
            method,
            sampled=sampled,
            only=chosen,
            releases=let_out,
            hold=reading,
            progress=_share(progress, k * len(chosen), len(readings)),
            processes=processes,
        )
        for k, reading in enumerate(readings)
    ]
    found = dataclasses.replace(priced[0], kind=worth)
    if len(readings) == 1:
        return found
    # larger norms cost more, but for what the accountant adds for its own approximations
    cautious = np.maximum(priced[1].values, found.values)
    return dataclasses.replace(found, cautious=cautious)


def _share(
    progress: Callable[[int], None] | None, before: int, readings: int
) -> Callable[[int], None] | None:
    """What to call in one of several `readings`, so that `progress` counts each example once."""
    return None if progress is None else lambda done: progress((before + done) // readings)


def _priced(
    chain: Chain,
    opening: Opening,
    delta: float | None,
    method: Method,
    *,
    sampled: bool,
    only: NDArray[np.int64],
    releases: Releases,
    hold: Hold,
    progress: Callable[[int], None] | None,
    processes: int,
) -> Epsilons:
    """ε of the norms by one way to hold them; its kind is not the journal's yet."""
    plan = opening.plan
    how = {**_how(chain, plan, delta, method, releases), "processes": processes}
    if plan.clipping == "filtered":
        constants = filtered_constants(chain, plan)
        found = composed_epsilons(
            filtered_histories(chain, opening, chunk=_chunk(constants), only=only),
            sample_rate=constants.sample_rate,
            noise_std=constants.noise_std,
            max_grad_norm=constants.bound,
            rounding="up",  # bounds are levels, and 0 is no level that anything is charged for
            progress=progress,
            **how,
        )
        return _within_promises(opening, found, only, releases, partial(_worst, chain, plan, how))

    def part(where: NDArray[np.int64], share: float, before: int) -> Epsilons:
        some = only[where]
        constants = row_constants(chain, plan, sampled=sampled, only=some, hold=hold)
        chunk = _chunk(constants)
        return composed_epsilons(
            histories(chain, opening, chunk=chunk, sampled=sampled, only=some, hold=hold),
            sample_rate=constants.sample_rate,
            noise_std=constants.noise_std,
            max_grad_norm=constants.bound * share,
            beside=constants.beside,
            rounding=plan.rounding,
            clipping=plan.clipping,
            progress=_after(progress, before),
            **how,
        )

    return _joined(opening, only, part, partial(_worst, chain, plan, how))


def _chunk(constants: Constants) -> int:
    """How many examples at a time bound the memory."""
    return min(_MOST, max(_FEWEST, _NORMS // max(1, len(constants.bound))))


def _after(progress: Callable[[int], None] | None, before: int) -> Callable[[int], None] | None:
    """What to call after so many examples of other parts."""
    return None if progress is None else lambda done: progress(before + done)


def _how(
    chain: Chain, plan: Plan, delta: float | None, method: Method, releases: Releases
) -> dict[str, Any]:
    """What is the same for all examples."""
    return {
        "delta": plan.delta if delta is None else delta,
        "method": method,
        "levels": plan.levels,
        "releases": releases,
        "most": lambda d: worst_case(chain, plan, method, delta=d, releases=releases.gaussian),
    }


def _joined(
    opening: Opening,
    examples: NDArray[np.int64],
    part: Callable[[NDArray[np.int64], float, int], Epsilons],
    worst: Callable[[], float],
) -> Epsilons:
    """ε of all `examples` from those of each part, which has levels of its own bound."""
    parts: list[tuple[NDArray[np.int64], Epsilons]] = []
    for where, share in by_share(opening.promised, examples):
        parts.append((where, part(where, share, sum(len(w) for w, _ in parts))))
    if opening.promised is None:
        return parts[0][1]
    values = np.empty(len(examples))
    for where, found in parts:
        values[where] = found.values
    return dataclasses.replace(parts[0][1], values=values, cautious=values, worst_case=worst())


def _within_promises(
    opening: Opening,
    found: Epsilons,
    examples: NDArray[np.int64],
    releases: Releases,
    worst: Callable[[], float],
) -> Epsilons:
    """The ε's of a filter, none above what its owner was promised."""
    assert opening.promised is not None
    most = [p.at(found.delta, releases=releases) for p in opening.promised.promises]
    values = np.minimum(found.values, np.array(most)[opening.promised.assigned[examples]])
    return dataclasses.replace(found, values=values, cautious=values, worst_case=worst())


def followed_epsilons(
    chain: Chain, opening: Opening, delta: float | None, method: Method
) -> Epsilons:
    """ε of followed examples from their norms at every step; see `Journal.followed_epsilons`."""
    plan, intervals = opening.plan, refresh_intervals(chain, opening.plan)
    row = np.repeat(np.arange(len(intervals.entry)), intervals.lengths)
    chosen, norms = followed(chain, plan)
    how = _how(chain, plan, delta, method, plan.releases)

    def part(where: NDArray[np.int64], share: float, _before: int) -> Epsilons:
        return composed_epsilons(
            [(norms[:, where], np.ones(len(norms), dtype=np.int64))],
            sample_rate=intervals.sample_rate[row],
            noise_std=intervals.noise_std[row],
            max_grad_norm=intervals.bound[row] * share,
            beside=intervals.beside[row],
            rounding=plan.rounding,
            **how,
        )

    worst = partial(_worst, chain, plan, how)
    priced = _joined(opening, chosen, part, worst)
    if plan.clipping == "filtered":
        priced = _within_promises(opening, priced, chosen, plan.releases, worst)
    random = random_draws(chain, opening)
    return dataclasses.replace(priced, kind="estimate") if random else priced


def _worst(chain: Chain, plan: Plan, how: Mapping[str, Any]) -> float:
    """The worst case by the same method, at the same δ, with the same releases."""
    return worst_case(chain, plan, how["method"], delta=how["delta"], releases=how["releases"])
