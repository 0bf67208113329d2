"""PoissonLoader: every example enters every batch by its own coin.

The amplification that the accountant charges for holds for this sampling and for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.persons import expect_drawn_together
from epsilons.accounting.plan import Plan
from epsilons.noise.keystream import Keystream, poisson_draw
from epsilons.randomness import Source

Collate = Callable[[list[Any]], Any]
_CHOSEN = 2**48


class PoissonLoader:
    """One pass over a plan: `plan.steps` pairs (indices, batch).

    Each example is in each batch with probability `sample_rate`, independently, so batches vary in
    size. An empty draw yields `(empty, None)` and is a step like any other.

    `generator`: a `Keystream`, a `torch.Generator`, or None for secret coins from the operating
    system. Only secret sampling has the privacy that the plan computes. `dataset`: a map-style data
    set of `plan.n` examples, else ValueError, as for a plan whose unit is an owner.
    `collate_fn`: as for a `DataLoader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        *,
        generator: torch.Generator | Keystream | None = None,
        collate_fn: Collate = default_collate,
    ) -> None:
        expect_drawn_together(plan, "a PoissonLoader has a coin for each record")
        n = len(dataset)  # type: ignore[arg-type]
        if n != plan.n:
            raise ValueError(f"the data set has {n} examples; the plan says n={plan.n}")
        if plan.endless:
            raise ValueError("a loader needs a plan with steps or epochs")
        self._dataset = dataset
        self._plan = plan
        self._generator = Keystream.secret(b"sampling") if generator is None else generator
        self.collate_fn = collate_fn

    def __len__(self) -> int:
        return self._plan.steps

    @property
    def coins(self) -> Source:
        """Where the coins come from."""
        if isinstance(self._generator, Keystream):
            return "seeded" if self._generator.is_seeded else "secret"
        return torch_source(self._generator)

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for step in range(self._plan.steps):
            indices = self.draw(self._plan.phase(step).sample_rate)
            yield indices, self.batch(indices)

    def draw(self, rate: float) -> Tensor:
        """The indices of one Poisson sample, ascending, each drawn with probability `rate`."""
        if isinstance(self._generator, Keystream):
            return poisson_draw(self._generator, self._plan.n, rate)
        coins = torch.rand(
            self._plan.n,
            generator=self._generator,
            dtype=torch.float64,
            device=self._generator.device,
        )
        return (coins < rate).nonzero().flatten().cpu()

    def batch(self, indices: Tensor) -> Any:
        """The examples at `indices`, collated; None if there are none."""
        if not len(indices):
            return None
        return batch_of(self._dataset, indices, self.collate_fn)


def torch_source(generator: torch.Generator) -> Source:
    """Whether a generator of torch was given a seed, as far as that can be known.

    One that nobody seeded has a random seed of 64 bits; people choose smaller ones.
    """
    return "torch seeded" if generator.initial_seed() < _CHOSEN else "torch"


def batch_of(dataset: Dataset[Any], indices: Tensor, collate: Collate = default_collate) -> Any:
    """The examples at `indices` as one batch, by one gather where the data set is tensors."""
    if isinstance(dataset, torch.utils.data.TensorDataset) and collate is default_collate:
        return [tensor[indices] for tensor in dataset.tensors]
    return collate([dataset[int(index)] for index in indices])
