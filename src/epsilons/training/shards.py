"""Shards: the contiguous parts that a run cuts its data set into, and who goes through them.

How many there are belongs to the run and stands in its checkpoints; by how many processes it is
trained may change. Floating point stays within a shard, and what crosses shards is whole numbers:
so the bits are the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.plan import Plan
from epsilons.training.distributed import Ranks


@dataclass(frozen=True)
class Shards:
    """The shards of a run. Shard k has the examples from edge k to before edge k + 1.

    `edges` (shards + 1,). `rank`: of `ranks` processes, the one whose shards are `own`.
    """

    edges: NDArray[np.int64]
    rank: int = 0
    ranks: int = 1

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.edges) - 1

    @property
    def own(self) -> range:
        """Those of this process, in order."""
        return range(*self.rank_numbers[self.rank : self.rank + 2])

    @property
    def rank_numbers(self) -> list[int]:
        """The first shard of each process, and how many there are (ranks + 1)."""
        return [self.count * rank // self.ranks for rank in range(self.ranks + 1)]

    @property
    def first(self) -> int:
        """The first example of this process."""
        return int(self.edges[self.own.start])

    @property
    def rank_edges(self) -> NDArray[np.int64]:
        """The edges between the processes (ranks + 1,)."""
        return self.edges[self.rank_numbers]

    def of(self, n: int) -> Shards:
        """As many of another data set, of n examples."""
        return Shards(shard_edges(n, self.count), self.rank, self.ranks)

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Of each own shard its number, its first example and the one after its last."""
        for shard in self.own:
            yield shard, int(self.edges[shard]), int(self.edges[shard + 1])

    def among(self, indices: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Of each own shard its number, and those of ascending `indices` that are in it."""
        for shard, first, last in self.parts():
            begin, end = np.searchsorted(indices, (first, last))
            yield shard, indices[begin:end]


def shard_edges(n: int, count: int, owners: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """Edges (count + 1,) of `count` shards of n examples, ⌊nk/count⌋.

    With `owners` (n,) an edge moves on to the next place where it cuts nobody's records apart.
    ValueError if a shard would lose all its examples by that.

    >>> shard_edges(10, 3), shard_edges(6, 2, np.array(["a", "b", "b", "b", "c", "c"]))
    (array([ 0,  3,  6, 10]), array([0, 4, 6]))
    """
    edges = np.array([n * k // count for k in range(count + 1)], dtype=np.int64)
    if owners is None or count == 1:
        return edges
    _, which = np.unique(owners, return_inverse=True)
    last = np.zeros(which.max() + 1, dtype=np.int64)
    np.maximum.at(last, which, np.arange(n))
    reach = np.maximum.accumulate(last[which])  # the last record of anyone met so far
    uncut = np.append(np.flatnonzero(np.append(-1, reach[:-1]) < np.arange(n)), n)
    moved = uncut[np.searchsorted(uncut, edges)]
    if ((np.diff(moved) == 0) & (np.diff(edges) > 0)).any():
        raise ValueError(
            f"{count} shards would cut the records of an owner apart: they are spread over the "
            "data set. Sort the examples by owner, or train with fewer shards"
        )
    return moved


def shards_of(plan: Plan, count: int, owners: NDArray[Any] | None, ranks: Ranks) -> Shards:
    """The shards of a run that began with `count`; with more processes, as many as these."""
    edges = shard_edges(plan.n, max(count, ranks.count), owners)
    return Shards(edges, ranks.rank, ranks.count)


def given_shards(shards: int | None, ranks: int, plan: Plan) -> int:
    """How many shards a run begins with: by default as many as there are processes."""
    count = ranks if shards is None else shards
    if ranks > 1 and plan.budgets:
        raise ValueError(
            f"budgets={plan.budgets} are kept by the process that has the journal, and there are "
            f"{ranks} processes; train in one"
        )
    if max(count, ranks) > 1 and plan.noise_std == 0:
        raise ValueError(
            "clipping='none' has no noise, and so no grid on which shards are added; train in one "
            "process"
        )
    return count
