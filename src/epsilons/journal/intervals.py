"""Which norm held for how many of an example's charged steps.

Time runs on the clock of charges: a charge of k steps takes k ticks. A record of all examples holds
from its tick until the next one; a record of some examples holds for them until their next record
of either sort.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Rows(NamedTuple):
    """Records of all examples, in order: which entry, from which tick, under which constants."""

    entry: tuple[int | None, ...]  # None: at the clip bound
    start: NDArray[np.int64]
    sample_rate: NDArray[np.float64]
    noise_std: NDArray[np.float64]
    bound: NDArray[np.float64]
    ticks: int


class Events(NamedTuple):
    """Records of single examples: (k,) each, sorted by example and tick."""

    example: NDArray[np.int64]
    tick: NDArray[np.int64]
    norm: NDArray[np.float64]

    @classmethod
    def sorted(
        cls, index: NDArray[np.int64], tick: NDArray[np.int64], norm: NDArray[np.float64]
    ) -> Events:
        order = np.lexsort((tick, index))
        return cls(index[order], tick[order], norm[order])


def positions(n: int, only: ArrayLike | None) -> NDArray[np.int64]:
    """The examples asked for, as ascending positions among n; None: all.

    >>> positions(4, None), positions(4, [1, 3])
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


def durations(rows: Rows) -> NDArray[np.int64]:
    """Ticks (rows,) between each record of all examples and the next."""
    return np.diff(np.append(rows.start, rows.ticks))


def with_events(
    rows: Rows, norms: NDArray[np.float64], events: Events, places: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Norms and ticks (rows + extra, m) of m examples, whose `events` count from 0.

    `places` (rows,): where each row's extra rows begin, and one past the last (rows + 1,). An
    event goes to the extra rows of the record it falls under, so that it has its constants.
    """
    m = norms.shape[1]
    ticks = np.repeat(durations(rows)[:, None], m, axis=1)
    extra = int(places[-1])
    block = np.concatenate([norms, np.zeros((extra, m))])
    held = np.concatenate([ticks, np.zeros((extra, m), dtype=np.int64)])
    if not len(events.example):
        return block, held
    under = np.searchsorted(rows.start, events.tick, side="right") - 1
    ends = np.append(rows.start, rows.ticks)[under + 1]
    same = events.example[1:] == events.example[:-1]
    following = np.append(np.where(same, events.tick[1:], ends[:-1]), ends[-1])
    length = np.minimum(following, ends) - events.tick
    np.subtract.at(held, (under, events.example), length)
    row = len(rows.start) + places[under] + _rank(events.example, under)
    block[row, events.example] = events.norm
    held[row, events.example] = length
    return block, held


def extra_rows(rows: Rows, events: Events) -> NDArray[np.int64]:
    """(rows,): the most events that any one example has under each record."""
    counts = np.zeros(len(rows.start), dtype=np.int64)
    if len(events.example):
        under = np.searchsorted(rows.start, events.tick, side="right") - 1
        np.maximum.at(counts, under, _rank(events.example, under) + 1)
    return counts


def _rank(index: NDArray[np.int64], under: NDArray[np.int64]) -> NDArray[np.int64]:
    """Position of each event among those of the same example under the same record."""
    new = np.ones(len(index), dtype=bool)
    new[1:] = (index[1:] != index[:-1]) | (under[1:] != under[:-1])
    starts = np.flatnonzero(new)
    return np.arange(len(index)) - np.repeat(starts, np.diff(np.append(starts, len(index))))
