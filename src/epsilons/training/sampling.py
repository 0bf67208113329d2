"""PoissonLoader: every example enters every batch by its own coin.

The amplification that the accountant charges for holds for this sampling and for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.plan import Plan


class PoissonLoader:
    """One pass over a plan: `plan.steps` pairs (indices, batch).

    Each example is in each batch with probability `plan.sample_rate`, independently, so batches
    vary in size. An empty draw yields `(empty, None)` and is a step like any other.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: Plan,
        *,
        generator: torch.Generator,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        n = len(dataset)  # type: ignore[arg-type]
        if n != plan.n:
            raise ValueError(f"the data set has {n} examples; the plan says n={plan.n}")
        self._dataset = dataset
        self._plan = plan
        self._generator = generator
        self._collate = collate_fn

    def __len__(self) -> int:
        return self._plan.steps

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for _ in range(self._plan.steps):
            indices = self.draw()
            yield indices, self.batch(indices)

    def draw(self) -> Tensor:
        """The indices of one Poisson sample, ascending."""
        # float64: a float32 coin could not tell rates apart that differ by less than 2⁻²⁴
        coins = torch.rand(
            self._plan.n,
            generator=self._generator,
            dtype=torch.float64,
            device=self._generator.device,
        )
        return (coins < self._plan.sample_rate).nonzero().flatten().cpu()

    def batch(self, indices: Tensor) -> Any:
        """The examples at `indices`, collated; None if there are none."""
        if not len(indices):
            return None
        return batch_of(self._dataset, indices, self._collate)


def batch_of(
    dataset: Dataset[Any], indices: Tensor, collate: Callable[[list[Any]], Any] = default_collate
) -> Any:
    """The examples at `indices` as one batch, by one gather where the data set is tensors."""
    if isinstance(dataset, torch.utils.data.TensorDataset) and collate is default_collate:
        return [tensor[indices] for tensor in dataset.tensors]
    return collate([dataset[int(index)] for index in indices])
