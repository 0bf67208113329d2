"""Batches: the Poisson batches of a run, fetched by this process or ahead of time by others.

Coins of a step have a fixed place in the stream, so that those of later steps can be read without
taking them. What a data set draws at random for a batch comes from a seed of the step: the same
examples come out whoever fetches them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.gradients.isolation import seed_generators
from epsilons.noise.keystream import Keystream, poisson_draw
from epsilons.training.keys import Streams
from epsilons.training.sampling import Collate, batch_of

_COIN = 8  # bytes that each example's coin takes


class Batches:
    """The batches of the steps in order; `num_workers` processes fetch those of the next steps."""

    def __init__(
        self,
        train: Dataset[Any],
        plan: Plan,
        *,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
    ) -> None:
        self._train, self._plan = train, plan
        self._collate_fn, self._num_workers = collate_fn, num_workers
        self._fetched: Iterator[Any] | None = None
        self._drawn: deque[Tensor] = deque()  # indices of the batches that are being fetched
        self._next: tuple[Streams, int] | None = None

    def take(self, streams: Streams, step: int) -> tuple[Tensor, Any]:
        """Indices (k,) of the examples drawn at `step`, and their batch; None if there are none.

        The coins of `step` are next in `streams.sampling`, and are taken. Torch's, NumPy's and
        Python's generators are seeded where the examples are fetched.
        """
        if not self._num_workers:
            indices = self._coins(streams.sampling, step)
            seed_generators(streams.data_seed(step))
            if not len(indices):
                return indices, None
            return indices, batch_of(self._train, indices, self._collate_fn)
        if self._fetched is None or self._next is None or self._next != (streams, step):
            self._start(streams, step)
        assert self._fetched is not None
        batch = next(self._fetched)
        indices = self._drawn.popleft()
        streams.sampling.skip(_COIN * self._plan.n)
        self._next = (streams, step + 1)
        return indices, batch

    def close(self) -> None:
        """End the processes, if there are any; what they fetched ahead is dropped."""
        self._fetched, self._next = None, None
        self._drawn.clear()

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
        """For each step from `step` on the seed of its data, and the indices drawn."""
        stream, first = streams.sampling, streams.sampling.position
        for number in range(step, self._plan.steps):
            here = stream.position
            stream.seek(first + _COIN * self._plan.n * (number - step))
            indices = self._coins(stream, number)
            stream.seek(here)
            self._drawn.append(indices)
            yield [streams.data_seed(number), *indices.tolist()]

    def _coins(self, stream: Keystream, step: int) -> Tensor:
        return poisson_draw(stream, self._plan.n, self._plan.phase(step).sample_rate)


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
