"""What all records of one owner cost together, for every owner of a run.

Unless the plan's unit is an owner, a worst case and an individual ε are per record. Someone with
several records is protected by as much less, and per person is what `chain_rule` makes of the
records' ε's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.composition import Releases
from epsilons.accounting.results import Epsilons
from epsilons.release.budget import releases_of
from epsilons.release.owner import LEAST_DELTA, chain_rule
from epsilons.runs import Run

Array = NDArray[np.float64]
# Distances in log 1/δ between the δ's at which every record is priced, from just above the first
# share of δ on: the bound from them is within 0.3 % of pricing each record at its own δ.
_SPACING = (0.0, 0.6, 2.0, 4.0, 8.0, 16.0, 32.0)
# Share of δ set aside for the distance of the releases' noise from a Gaussian.
_ASIDE = 1e-6


@dataclass(frozen=True, eq=False, repr=False)
class Persons:
    """The owners of a run, by ascending combined ε; all of it is private, so `repr` shows nothing.

    `records` (m,): how many each has. `epsilons` (m,): ε of all records of each together at
    `delta`, along the training observed, estimates the cautious ones; never below what
    `owner_statement` says, and above it by what RDP is above the tight ε for owners of several
    records (by 7 to 9 % at usual settings). `worst_case`: ε of the owner with the most records,
    whatever these contain.
    """

    records: NDArray[np.int64]
    epsilons: Array
    worst_case: float
    delta: float

    def __len__(self) -> int:
        return len(self.records)

    def quantile(self, q: float) -> float:
        """The quantile of the combined ε's at `q` in [0, 1]; private."""
        return float(np.quantile(self.epsilons, q, method="higher"))


def person_worst_case(
    run: Run,
    records: int,
    releases: Releases,
    *,
    delta: float | None = None,
    until: int | None = None,
) -> float:
    """ε at δ of several records of one person, whatever they contain: the guarantee per person.

    `run`; `records`: how many, at least 1; `releases`: everything let out beside the training.
    `delta`: by default the plan's. Of the run as it is, or as it will be before step `until`. Where
    the plan's unit is an owner it is the run's worst case.
    """
    at = run.plan.delta if delta is None else delta
    worst = run.journal.worst_case
    if run.plan.unit == "owner":
        return worst(until=until, delta=at, releases=releases)
    return chain_rule([lambda d: worst(until=until, delta=d, releases=releases)] * records, at)


def persons(run: Run, epsilons: Epsilons) -> Persons | None:
    """Combined ε's of all owners of `run`, with everything let out so far.

    `epsilons`: `run.epsilons(delta)` for the δ in question. None if the run has no owners, or its
    examples are owners.
    """
    if run.examples.owners is None:
        return None
    delta, releases = epsilons.delta, releases_of(run)
    alone = epsilons.cautious
    if releases != run.plan.releases:
        alone = run.epsilons(delta, releases=releases, hold="cautious").values
    _, owner, counts = np.unique(run.examples.owners, return_inverse=True, return_counts=True)
    worst = person_worst_case(run, int(counts.max()), releases, delta=delta)
    combined = np.zeros(len(counts))
    single = counts[owner] == 1
    combined[owner[single]] = alone[single]
    several = np.flatnonzero(~single)
    # small ε's first, as in a statement
    several = several[np.lexsort((alone[several], owner[several]))]
    if len(several):
        above = _curves(run, several, delta, releases)
        mine = owner[several]
        rank = np.arange(len(several)) - np.searchsorted(mine, mine)
        for k in range(int(counts.max())):
            now = np.flatnonzero(rank == k)
            who = mine[now]
            combined[who] += above(now, np.exp(-combined[who]) * delta / counts[who])
    order = np.argsort(combined, kind="stable")
    return Persons(counts[order], np.minimum(combined[order], worst), worst, delta)


def _curves(
    run: Run, rows: NDArray[np.int64], delta: float, releases: Releases
) -> Callable[[NDArray[np.int64], Array], Array]:
    """ε of some records, each at its own δ of at most half of `delta`, never too small.

    The RDP ε is a minimum of lines in x = log 1/δ, hence concave: beyond two points it is below
    the line through them. So a few prices for everyone are enough.
    """
    points = -np.log(delta) + np.array(_SPACING)
    chosen, row = np.unique(rows, return_inverse=True)
    gaussian = releases.gaussian
    table = np.stack(
        [
            run.epsilons(
                float(np.exp(-x)), "rdp", only=chosen, releases=gaussian, hold="cautious"
            ).values[row]
            for x in points
        ]
    )
    with np.errstate(invalid="ignore"):  # ∞ − ∞
        slope = np.diff(table, axis=0) / np.diff(points)[:, None]
    # An ε of 0 was cut off there, and the line through it may be too flat.
    slope[table[:-1] == 0] = np.inf
    ceiling = np.append(table, np.full((1, len(rows)), np.inf), axis=0)

    def above(which: NDArray[np.int64], share: Array) -> Array:
        left = (1 - _ASIDE) * share if releases.distance else share
        x = -np.log(np.maximum(left, LEAST_DELTA))
        j = np.clip(np.searchsorted(points, x), 2, len(points))
        with np.errstate(invalid="ignore"):  # ∞ · 0
            rise = np.nan_to_num(slope[j - 2, which] * (x - points[j - 1]), nan=np.inf)
        found = np.minimum(table[j - 1, which] + rise, ceiling[j, which])
        aside = (1 + np.exp(np.minimum(found, 700.0))) * releases.distance
        return np.where((share < LEAST_DELTA) | (aside > share - left), np.inf, found)

    return above
