"""The intervals of steps between refreshes, and which norm holds for how many steps of each.

An interval starts at a refresh (norms of all examples), at a restart and where sample rate, noise,
clip bound or what is released beside the gradient change. Records for its steps are the refresh
before it, the norms of examples that were sampled in it, and the refresh after it;
`accounting.holding` says which of them a step is charged. Nothing holds across a restart: the steps
that it undid led to other models.

Steps are counted here as they were charged, from 0: a step that is charged again after a restart
counts again. This count is called the charged step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.holding import NEVER, Hold, norm_between, shares


class Intervals(NamedTuple):
    """Consecutive intervals of charged steps, each with one refresh and one set of constants.

    Refreshes are entries of the journal, at the charged steps before which they were made; `NEVER`
    where there is none.
    """

    entry: tuple[int | None, ...]  # the refresh before; None: none yet, so the clip bound holds
    at: NDArray[np.int64]  # (intervals,) of that refresh
    next_entry: tuple[int | None, ...]  # the refresh after; None: there is none yet, or a restart
    next_at: NDArray[np.int64]  # (intervals,) of that refresh
    start: NDArray[np.int64]  # (intervals,) first charged step of each
    sample_rate: NDArray[np.float64]  # (intervals,)
    noise_std: NDArray[np.float64]  # (intervals,)
    bound: NDArray[np.float64]  # (intervals,)
    beside: NDArray[np.float64]  # (intervals,) as in `Phase`
    steps: int  # charged steps of all intervals together

    @property
    def ends(self) -> NDArray[np.int64]:
        """One more than the last charged step (intervals,) of each interval."""
        return np.append(self.start[1:], self.steps)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Charged steps (intervals,) of each interval."""
        return self.ends - self.start

    def containing(self, charged_step: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which interval each charged step lies in."""
        return np.searchsorted(self.start, charged_step, side="right") - 1


class SampledNorms(NamedTuple):
    """Norms of sampled examples: (k,) each, sorted by example and then by charged step."""

    example: NDArray[np.int64]
    charged_step: NDArray[np.int64]
    norm: NDArray[np.float64]

    @classmethod
    def sorted(
        cls, example: NDArray[np.int64], charged_step: NDArray[np.int64], norm: NDArray[np.float64]
    ) -> SampledNorms:
        order = np.lexsort((charged_step, example))
        return cls(example[order], charged_step[order], norm[order])


def chosen_examples(n: int, only: ArrayLike | None) -> NDArray[np.int64]:
    """Ascending indices of the examples `only`, validated against n; all n for None.

    >>> chosen_examples(4, None), chosen_examples(4, [1, 3])
    (array([0, 1, 2, 3]), array([1, 3]))
    """
    if only is None:
        return np.arange(n)
    chosen = np.atleast_1d(np.asarray(only, dtype=np.int64))
    if not chosen.size or chosen[0] < 0 or chosen[-1] >= n or (np.diff(chosen) <= 0).any():
        raise ValueError(
            f"the examples {only!r} were asked for; expected one or more ascending positions "
            f"from 0 to {n - 1}"
        )
    return chosen


def row_intervals(intervals: Intervals, most: NDArray[np.int64], hold: Hold) -> NDArray[np.int64]:
    """(rows,): the interval of each row of `split_by_refreshes` or `split_by_sampled_norms`.

    `most` (intervals,): of `most_sampled_norms`; zeros for `split_by_refreshes`.
    """
    numbers, parts = np.arange(len(intervals.start)), _parts(hold)
    if not most.any():
        return np.repeat(numbers, 1 + (_refresh_shares(intervals, hold)[1] > 0))
    return np.append(np.repeat(numbers, parts), np.repeat(numbers, most * parts))


def split_by_refreshes(
    intervals: Intervals,
    norms: NDArray[np.float64],
    following: NDArray[np.float64],
    hold: Hold,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Norms (rows, m) and numbers of steps (rows,) by the refreshes alone, in order of the steps.

    `norms`, `following` (intervals, m): of the refreshes before and after each interval; where
    there is none, the clip bound before it and the same as before after it.
    """
    own, other = _refresh_shares(intervals, hold)
    rows = np.stack([norms, norm_between(norms, following, hold)], axis=1)
    steps = np.stack([own, other], axis=1)
    used = np.stack([np.ones_like(own, dtype=bool), other > 0], axis=1)
    return rows[used], steps[used]


def split_by_sampled_norms(
    intervals: Intervals,
    norms: NDArray[np.float64],
    following: NDArray[np.float64],
    sampled: SampledNorms,
    most: NDArray[np.int64],
    hold: Hold,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Norms and numbers of steps (rows, m) by refreshes and sampled norms together.

    `norms`, `following` as for `split_by_refreshes`. `sampled`: its examples are numbered from 0
    to m − 1. `most` (intervals,): for so many sampled norms each interval has rows, after those of
    all refreshes, so that they are priced with its constants.
    """
    m, parts = norms.shape[1], _parts(hold)
    interval = intervals.containing(sampled.charged_step)
    rank = _rank(sampled.example, interval)
    next_at = np.repeat(intervals.next_at[:, None], m, axis=1)
    next_norms = following.copy()
    first = rank == 0
    next_at[interval[first], sampled.example[first]] = sampled.charged_step[first]
    next_norms[interval[first], sampled.example[first]] = sampled.norm[first]
    at = np.repeat(intervals.at[:, None], m, axis=1)
    end = np.minimum(next_at, intervals.ends[:, None])
    by_refresh = _priced_rows(at, norms, next_at, next_norms, intervals.start[:, None], end, hold)
    last = np.append(rank[1:] == 0, True)
    # the refresh after the last sampled norm of an interval; without one it holds to the end
    after = intervals.next_at[interval]
    after_norm = np.where(after == NEVER, sampled.norm, following[interval, sampled.example])
    next_at = np.where(last, after, np.roll(sampled.charged_step, -1))
    next_norm = np.where(last, after_norm, np.roll(sampled.norm, -1))
    end = np.minimum(next_at, intervals.ends[interval])
    by_sampled = _priced_rows(
        sampled.charged_step, sampled.norm, next_at, next_norm, sampled.charged_step, end, hold
    )
    refreshed = parts * len(intervals.start)
    row = refreshed + parts * ((np.cumsum(most) - most)[interval] + rank)
    all_norms = np.zeros((refreshed + parts * int(most.sum()), m))
    steps = np.zeros(all_norms.shape, dtype=np.int64)
    for part in range(parts):
        all_norms[part:refreshed:parts], steps[part:refreshed:parts] = by_refresh[part]
        where = row + part, sampled.example
        all_norms[where], steps[where] = by_sampled[part]
    return all_norms, steps


def most_sampled_norms(intervals: Intervals, sampled: SampledNorms) -> NDArray[np.int64]:
    """(intervals,): how many sampled norms the example with the most has in each interval."""
    counts = np.zeros(len(intervals.start), dtype=np.int64)
    if len(sampled.example):
        interval = intervals.containing(sampled.charged_step)
        np.maximum.at(counts, interval, _rank(sampled.example, interval) + 1)
    return counts


def _refresh_shares(
    intervals: Intervals, hold: Hold
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Steps (intervals,) that the refresh before each interval holds for, and the others."""
    return shares(intervals.at, intervals.next_at, intervals.start, intervals.ends, hold)


def _priced_rows(
    at: NDArray[np.int64],
    norm: NDArray[np.float64],
    next_at: NDArray[np.int64],
    next_norm: NDArray[np.float64],
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    hold: Hold,
) -> tuple[tuple[NDArray[np.float64], NDArray[np.int64]], ...]:
    """Norms and steps of a record's own row and of the row between it and the next record."""
    own, other = shares(at, next_at, first, end, hold)
    return (norm, own), (norm_between(norm, next_norm, hold), other)


def _parts(hold: Hold) -> int:
    """Rows from one record to the next: its own, and what holds between it and the next."""
    return 1 if hold == "previous" else 2


def _rank(example: NDArray[np.int64], interval: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank, from 0, of each sampled norm among those of its example in its interval."""
    new = np.ones(len(example), dtype=bool)
    new[1:] = (example[1:] != example[:-1]) | (interval[1:] != interval[:-1])
    starts = np.flatnonzero(new)
    return np.arange(len(example)) - np.repeat(starts, np.diff(np.append(starts, len(example))))
