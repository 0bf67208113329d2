"""ε's of the norms that a journal recorded, and what they are worth."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike

from epsilons.accounting.composition import Releases, composed_epsilons
from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal.assumptions import expect_separate, random_draws
from epsilons.journal.chain import Chain
from epsilons.journal.charges import charged_counts
from epsilons.journal.intervals import durations, positions
from epsilons.journal.norm_records import followed, histories, recorded_rows, row_constants
from epsilons.journal.opening import Opening

_ROUNDED: dict[str | None, Kind] = {None: "exact", "up": "bound", "nearest": "estimate"}
_CHUNK = 4096


def worst_case(
    chain: Chain,
    plan: Plan,
    method: Method,
    *,
    until: int | None = None,
    delta: float | None = None,
    releases: Releases | None = None,
) -> float:
    """ε of an example at the clip bound in every step charged: `Journal.worst_case`."""
    expect_separate(chain)
    return plan.worst_case(
        method, steps=charged_counts(chain, plan, until), delta=delta, releases=releases
    )


def kind(chain: Chain, opening: Opening, *, sampled: bool) -> Kind:
    """What an individual ε is worth: `Journal.kind`, with or without norms of sampled examples."""
    expect_separate(chain)
    plan, rows = opening.plan, recorded_rows(chain, opening.plan)
    if plan.clipping != "max":
        return plan.kind
    at_bound = [entry is None for entry in rows.entry]
    some = sampled and chain.last("sampled") is not None
    if all(at_bound) and not some:
        return "bound"
    # where single norms were recorded, those go on holding too
    older = any(k > 1 for k, c in zip(durations(rows), at_bound, strict=True) if some or not c)
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
) -> Epsilons:
    """ε of every example, or of `only` some: `Journal.epsilons`."""
    plan = opening.plan
    chosen = positions(plan.n, only)
    held = row_constants(chain, plan, sampled=sampled, only=chosen)
    let_out = plan.clip_bound if releases is None else releases
    priced = composed_epsilons(
        histories(chain, plan, chunk=_CHUNK, sampled=sampled, only=chosen),
        sample_rate=held.sample_rate,
        noise_std=held.noise_std,
        max_grad_norm=held.bound,
        delta=plan.delta if delta is None else delta,
        method=method,
        levels=plan.levels,
        rounding=plan.rounding,
        clipping=plan.clipping,
        releases=let_out,
        most=lambda d: worst_case(chain, plan, method, delta=d, releases=let_out.gaussian),
    )
    return dataclasses.replace(priced, kind=kind(chain, opening, sampled=sampled))


def followed_epsilons(
    chain: Chain, opening: Opening, delta: float | None, method: Method
) -> Epsilons:
    """ε of the followed examples from their norms at every step: `Journal.followed_epsilons`."""
    plan, rows = opening.plan, recorded_rows(chain, opening.plan)
    row = np.repeat(np.arange(len(rows.entry)), durations(rows))
    _, norms = followed(chain, plan)
    let_out = plan.clip_bound
    priced = composed_epsilons(
        [(norms, np.ones(len(norms), dtype=np.int64))],
        sample_rate=rows.sample_rate[row],
        noise_std=rows.noise_std[row],
        max_grad_norm=rows.bound[row],
        delta=plan.delta if delta is None else delta,
        method=method,
        levels=plan.levels,
        rounding=plan.rounding,
        releases=let_out,
        most=lambda d: worst_case(chain, plan, method, delta=d, releases=let_out.gaussian),
    )
    random = random_draws(chain, opening)
    return dataclasses.replace(priced, kind="estimate") if random else priced
