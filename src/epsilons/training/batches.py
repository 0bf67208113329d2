"""Batches: the Poisson batches of a run, fetched by this process or ahead of time by others.

Coins of a step have a fixed place in the stream, so that those of later steps can be read without
taking them. What a data set draws at random for a batch comes from a seed of the step: the same
examples come out whoever fetches them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.gradients.isolation import seed_generators
from epsilons.noise.keystream import COIN_BYTES, Keystream, poisson_draw
from epsilons.training.keys import Streams
from epsilons.training.sampling import Collate, batch_of
from epsilons.training.shards import Shards


class Drawn(NamedTuple):
    """What a step drew from one shard: indices (k,) and their batch, None if there are none."""

    shard: int
    indices: Tensor
    batch: Any


class Batches:
    """The batches of the steps in order; `num_workers` processes fetch those of the next steps."""

    def __init__(
        self,
        train: Dataset[Any],
        plan: Plan,
        shards: Shards,
        *,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
    ) -> None:
        self._train, self._plan, self._shards = train, plan, shards
        self._collate_fn, self._num_workers = collate_fn, num_workers
        self._fetched: Iterator[Any] | None = None
        self._drawn: deque[Tensor] = deque()  # indices of the batches that are being fetched
        self._next: tuple[Streams, int] | None = None

    def take(self, streams: Streams, step: int) -> list[Drawn]:
        """What `step` draws from each of this process's shards.

        The coins of `step` are next in `streams.sampling`, and are taken. Torch's, NumPy's and
        Python's generators are seeded where the examples are fetched.
        """
        if not self._num_workers:
            found = [self._fetch(streams, step, *part) for part in self._shards.parts()]
        else:
            if self._fetched is None or self._next is None or self._next != (streams, step):
                self._start(streams, step)
            assert self._fetched is not None
            batches = [(shard, next(self._fetched)) for shard in self._shards.own]
            found = [Drawn(shard, self._drawn.popleft(), batch) for shard, batch in batches]
            self._next = (streams, step + 1)
        streams.sampling.skip(COIN_BYTES * self._plan.n)
        return found

    def close(self) -> None:
        """End the processes, if there are any; what they fetched ahead is dropped."""
        self._fetched, self._next = None, None
        self._drawn.clear()

    def _fetch(self, streams: Streams, step: int, shard: int, first: int, last: int) -> Drawn:
        indices = self._coins(streams.sampling, step, first, last)
        seed_generators(streams.data_seed(step, shard))
        batch = batch_of(self._train, indices, self._collate_fn) if len(indices) else None
        return Drawn(shard, indices, batch)

    def _start(self, streams: Streams, step: int) -> None:
        self.close()
        loader: DataLoader[Any] = DataLoader(
            _Seeded(self._train),
            batch_sampler=self._ahead(streams, step),
            num_workers=self._num_workers,
            collate_fn=_Collated(self._collate_fn),
            generator=torch.Generator().manual_seed(0),  # else it draws from the global one
        )
        self._fetched = iter(loader)

    def _ahead(self, streams: Streams, step: int) -> Iterator[list[int]]:
        """For each step from `step` on and each shard the seed of its data, and who is drawn."""
        stream, begin = streams.sampling, streams.sampling.position
        for number in range(step, self._plan.steps):
            for shard, first, last in self._shards.parts():
                here = stream.position
                stream.seek(begin + COIN_BYTES * self._plan.n * (number - step))
                indices = self._coins(stream, number, first, last)
                stream.seek(here)
                self._drawn.append(indices)
                yield [streams.data_seed(number, shard), *indices.tolist()]

    def _coins(self, stream: Keystream, step: int, first: int, last: int) -> Tensor:
        """Who of some examples is drawn; the stream stays where it is."""
        here, rate = stream.position, self._plan.phase(step).sample_rate
        indices = poisson_draw(stream, self._plan.n, rate, first=first, last=last)
        stream.seek(here)
        return indices


class _Seeded(Dataset[Any]):
    """A data set whose batches are named by a seed and then their indices."""

    def __init__(self, train: Dataset[Any]) -> None:
        self._train = train

    def __getitems__(self, named: list[int]) -> list[Any]:
        seed_generators(named[0])
        return [self._train[index] for index in named[1:]]


class _Collated:
    """A collate function that knows of empty batches."""

    def __init__(self, collate_fn: Collate) -> None:
        self._collate_fn = collate_fn

    def __call__(self, examples: list[Any]) -> Any:
        return self._collate_fn(examples) if examples else None
