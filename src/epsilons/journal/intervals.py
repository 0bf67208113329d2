"""The interval of steps for which each recorded norm holds.

An interval starts at a refresh (norms of all examples), at a restart and where sample rate, noise
or clip bound change. In it the norms of the latest refresh hold; for a sampled example its own norm
holds instead, from its step until it is sampled again or the interval ends.

Steps are counted here as they were charged, from 0: a step that is charged again after a restart
counts again. This count is called the charged step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Intervals(NamedTuple):
    """Consecutive intervals of charged steps, each with one refresh and one set of constants."""

    entry: tuple[int | None, ...]  # of the refresh; None: no norms yet, so the clip bound holds
    start: NDArray[np.int64]  # (intervals,) first charged step of each
    sample_rate: NDArray[np.float64]  # (intervals,)
    noise_std: NDArray[np.float64]  # (intervals,)
    bound: NDArray[np.float64]  # (intervals,)
    steps: int  # charged steps of all intervals together

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Charged steps (intervals,) of each interval."""
        return np.diff(np.append(self.start, self.steps))

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


def split_by_sampled_norms(
    intervals: Intervals,
    norms: NDArray[np.float64],
    sampled: SampledNorms,
    offsets: NDArray[np.int64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Norms and numbers of steps (intervals + extra, m) once sampled norms replace refreshed ones.

    `norms` (intervals, m): of the refreshes. `sampled`: its examples are numbered from 0 to m − 1.
    `offsets` (intervals + 1,): each interval's sampled norms have rows of their own, so that they
    are priced with its constants; after all refreshes, from its offset to before the next one.
    """
    m, extra = norms.shape[1], int(offsets[-1])
    all_norms = np.concatenate([norms, np.zeros((extra, m))])
    refreshed_steps = np.repeat(intervals.lengths[:, None], m, axis=1)
    steps = np.concatenate([refreshed_steps, np.zeros((extra, m), dtype=np.int64)])
    if not len(sampled.example):
        return all_norms, steps
    interval = intervals.containing(sampled.charged_step)
    ends = np.append(intervals.start, intervals.steps)[interval + 1]
    same_example = sampled.example[1:] == sampled.example[:-1]
    following = np.append(np.where(same_example, sampled.charged_step[1:], ends[:-1]), ends[-1])
    length = np.minimum(following, ends) - sampled.charged_step
    np.subtract.at(steps, (interval, sampled.example), length)
    row = len(intervals.start) + offsets[interval] + _rank(sampled.example, interval)
    all_norms[row, sampled.example] = sampled.norm
    steps[row, sampled.example] = length
    return all_norms, steps


def most_sampled_norms(intervals: Intervals, sampled: SampledNorms) -> NDArray[np.int64]:
    """(intervals,): how many sampled norms the example with the most has in each interval."""
    counts = np.zeros(len(intervals.start), dtype=np.int64)
    if len(sampled.example):
        interval = intervals.containing(sampled.charged_step)
        np.maximum.at(counts, interval, _rank(sampled.example, interval) + 1)
    return counts


def _rank(example: NDArray[np.int64], interval: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rank, from 0, of each sampled norm among those of its example in its interval."""
    new = np.ones(len(example), dtype=bool)
    new[1:] = (example[1:] != example[:-1]) | (interval[1:] != interval[:-1])
    starts = np.flatnonzero(new)
    return np.arange(len(example)) - np.repeat(starts, np.diff(np.append(starts, len(example))))
