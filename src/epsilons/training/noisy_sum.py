"""The noisy sum of one step, over shards and processes, in whole multiples of the noise's grid.

Each shard's clipped sum is rounded once, each process makes its part of the noise, and one
all-reduce of whole numbers adds everything up: exactly, in whatever order. Who has an example in
one shard moves one rounded sum, so the sensitivity is that of a single sum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting.plan import Phase
from epsilons.gradients.compile import Clipped
from epsilons.noise.grid import GridNoise, add_rounded, from_units
from epsilons.training.adaptive_bound import UNCLIPPED, with_count
from epsilons.training.distributed import Ranks
from epsilons.training.shards import Shards


class Report(NamedTuple):
    """What a process says of its part of a step, beside the sums.

    `failed`: it has no part, and an error instead. `larger`: an example may have added more than
    was charged for it just before. `reshaped`: its passes had another shape than those of the
    refresh. `uncovered`: they are no longer batch invariant. `micro_batch`: the most examples in a
    pass, 0 if there is no limit. `digest`: of its last release, 63 bits.
    """

    failed: int = 0
    larger: int = 0
    reshaped: int = 0
    uncovered: int = 0
    micro_batch: int = 0
    digest: int = 0


class NoisySum:
    """A step's sum on its way to be released; `parameters` by name, `phase` of the step.

    Where the phase has the number of unclipped examples released, it is one more coordinate.
    """

    def __init__(self, parameters: dict[str, Tensor], phase: Phase, shards: Shards) -> None:
        self._phase, self._shards, self._dtype = phase, shards, _dtype(parameters, phase)
        self._shapes = {name: p.shape for name, p in parameters.items()}
        if phase.unclipped_num_std is not None:
            self._shapes[UNCLIPPED] = torch.Size()
        self._sizes = tuple(shape.numel() for shape in self._shapes.values())
        count, words = sum(self._sizes), len(Report._fields) * shards.ranks
        self._words = np.zeros(count + words + 2 * shards.count, np.int64)
        self._units = self._words[:count]
        self._reports = self._words[count : count + words].reshape(shards.ranks, -1)
        self._losses = self._words[count + words :].reshape(shards.count, 2)
        self._plain: dict[str, Tensor] | None = None  # where there is no noise, and so no grid

    def add(self, shard: int, found: Clipped) -> None:
        """Add a shard's clipped sum; ValueError if it does not fit the grid."""
        if self._phase.noise_std == 0:
            self._plain = found.sums
        else:
            sums = with_count(found.sums, found.norms, self._phase)
            add_rounded(self._units, sums, self._phase.noise_std, self._shards.count)
        if len(found.losses):
            mean = np.float64(found.losses.mean().item())
            self._losses[shard] = len(found.losses), mean.view(np.int64)

    def clear(self) -> None:
        """Begin anew."""
        self._words[:] = 0

    def over(self, ranks: Ranks, noise: GridNoise, report: Report, where: torch.device) -> None:
        """Add this process's part of the noise, and all up; nobody has the sum before all have."""
        if self._plain is None:
            part = self._shards.rank, self._shards.ranks
            noise.add_units(self._units, self._sizes, self._phase.noise_std, *part)
        self._reports[self._shards.rank] = report
        ranks.add_up(self._words, where)

    def reports(self) -> list[Report]:
        """What all processes said."""
        return [Report(*map(int, words)) for words in self._reports]

    def micro_batch(self) -> int | None:
        """The most examples in a pass that no process has too little memory for; None: all."""
        return min((each.micro_batch for each in self.reports() if each.micro_batch), default=None)

    def expect_one_model(self) -> None:
        """ValueError unless all processes released the same at the step before."""
        digests = [each.digest for each in self.reports()]
        other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if other:
            raise ValueError(
                f"rank {other[0]} has not released what rank 0 has: memory or network have changed "
                "something. The run is as it was at its last checkpoint; go on from there"
            )

    def released(self) -> dict[str, Tensor]:
        """The noisy sum over the expected batch size, by parameter."""
        if self._plain is not None:
            return {name: sums / self._phase.batch_size for name, sums in self._plain.items()}
        std = self._phase.noise_std
        parts = np.split(self._units, np.cumsum(self._sizes)[:-1])
        values = [torch.from_numpy(from_units(u, std, self._phase.batch_size)) for u in parts]
        return {
            name: value.to(self._dtype).view(shape)
            for (name, shape), value in zip(self._shapes.items(), values, strict=True)
        }

    def loss(self) -> float:
        """Mean loss of the batch before the step; NaN of an empty one."""
        counts, means = self._losses[:, 0], self._losses[:, 1].view(np.float64)
        drawn: NDArray[np.bool_] = counts > 0
        if not drawn.any():
            return float("nan")
        if drawn.sum() == 1:
            return float(means[drawn][0])
        return float(np.average(means[drawn], weights=counts[drawn]))


def _dtype(parameters: dict[str, Tensor], phase: Phase) -> torch.dtype:
    wide = phase.sums == "float64" or torch.float64 in {p.dtype for p in parameters.values()}
    return torch.float64 if wide else torch.float32
