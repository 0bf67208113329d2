"""ε of the norms in a journal, and its kind: exact, bound or estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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
from epsilons.journal.intervals import chosen_examples
from epsilons.journal.norm_records import followed, histories, refresh_intervals, row_constants
from epsilons.journal.opening import Opening

_ROUNDED: dict[str | None, Kind] = {None: "exact", "up": "bound", "nearest": "estimate"}
# Norms at a time (16 MiB) bound the memory, but for so many rows that it would be few examples.
_NORMS, _FEWEST = 2**21, 1024


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
    let_out = opening.plan.clip_bound if releases is None else releases
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
    constants = row_constants(chain, plan, sampled=sampled, only=only, hold=hold)
    chunk = max(_FEWEST, _NORMS // max(1, len(constants.bound)))
    return composed_epsilons(
        histories(chain, opening, chunk=chunk, sampled=sampled, only=only, hold=hold),
        sample_rate=constants.sample_rate,
        noise_std=constants.noise_std,
        max_grad_norm=constants.bound,
        beside=constants.beside,
        delta=plan.delta if delta is None else delta,
        method=method,
        levels=plan.levels,
        rounding=plan.rounding,
        clipping=plan.clipping,
        releases=releases,
        most=lambda d: worst_case(chain, plan, method, delta=d, releases=releases.gaussian),
        progress=progress,
        processes=processes,
    )


def followed_epsilons(
    chain: Chain, opening: Opening, delta: float | None, method: Method
) -> Epsilons:
    """ε of followed examples from their norms at every step; see `Journal.followed_epsilons`."""
    plan, intervals = opening.plan, refresh_intervals(chain, opening.plan)
    row = np.repeat(np.arange(len(intervals.entry)), intervals.lengths)
    _, norms = followed(chain, plan)
    let_out = plan.clip_bound
    priced = composed_epsilons(
        [(norms, np.ones(len(norms), dtype=np.int64))],
        sample_rate=intervals.sample_rate[row],
        noise_std=intervals.noise_std[row],
        max_grad_norm=intervals.bound[row],
        beside=intervals.beside[row],
        delta=plan.delta if delta is None else delta,
        method=method,
        levels=plan.levels,
        rounding=plan.rounding,
        releases=let_out,
        most=lambda d: worst_case(chain, plan, method, delta=d, releases=let_out.gaussian),
    )
    random = random_draws(chain, opening)
    return dataclasses.replace(priced, kind="estimate") if random else priced
