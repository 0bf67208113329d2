"""Played: an audit's hold on a run, which sees or replaces its coins and what it releases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from epsilons.accounting.plan import Phase
from epsilons.accounting.sums import grid
from epsilons.gradients.compile import Clipped
from epsilons.noise.grid import Noise
from epsilons.noise.keystream import Keystream
from epsilons.training.adaptive_bound import with_count
from epsilons.training.keys import Streams
from epsilons.training.noisy_sum import NoisySum
from epsilons.training.shards import Shards

_LAST_BITS = 1e-5  # of float32 numbers, relatively


class Played(NamedTuple):
    """What an audit puts around or in place of a run's coins and noise; by default nothing."""

    noise: Callable[[Noise], Noise] | None = None
    sampling: Callable[[Keystream], Keystream] | None = None

    def streams(self, seed: int | None, number: int, key: bytes) -> Streams:
        """The streams of a secret key, or those of a seed, with the audit's coins."""
        own = Streams.of(number, key) if seed is None else Streams.seeded(seed, number)
        if self.sampling is not None:
            own.sampling = self.sampling(own.sampling)
        return own

    def total(self, parameters: dict[str, Tensor], phase: Phase, shards: Shards) -> NoisySum:
        """The sum of a step, watched by the audit."""
        if self.noise is None:
            return NoisySum(parameters, phase, shards)
        return _PlayedSum(parameters, phase, shards, self.noise)


class _PlayedSum(NoisySum):
    """The sum as it is, which shows the audit what it is of and what comes of it."""

    def __init__(
        self,
        parameters: dict[str, Tensor],
        phase: Phase,
        shards: Shards,
        around: Callable[[Noise], Noise],
    ) -> None:
        super().__init__(parameters, phase, shards)
        self._around = around
        self._clipped = np.zeros(len(self._units))

    def add(self, shard: int, found: Clipped) -> None:
        sums = with_count(found.sums, found.norms, self._phase)
        flat = [total.detach().to("cpu", torch.float64).reshape(-1) for total in sums.values()]
        self._clipped += torch.cat(flat).numpy()
        with suppress(ValueError):  # too large for the grid: the audit judges it
            super().add(shard, found)

    def clear(self) -> None:
        super().clear()
        self._clipped[:] = 0

    def released(self) -> dict[str, Tensor]:
        """What the audit makes of the clipped sum, and of what would be released."""
        own = super().released()
        parts = np.split(self._clipped, np.cumsum(self._sizes)[:-1])
        sums = {
            name: torch.from_numpy(part.copy()).view(own[name].shape)
            for name, part in zip(self._shapes, parts, strict=True)
        }
        noise = self._around(_Released(own))
        return noise.added_to(sums, self._phase.noise_std, self._divisor(own))

    def _divisor(self, own: dict[str, Tensor]) -> float:
        """What the whole numbers really were divided by."""
        flat = np.concatenate([value.double().reshape(-1).numpy() for value in own.values()])
        largest = int(np.argmax(np.abs(flat)))
        whole = float(self._units[largest]) * grid(self._phase.noise_std)
        expected = self._phase.batch_size
        found = whole / flat[largest] if flat[largest] else expected
        return expected if abs(found / expected - 1) < _LAST_BITS else found


class _Released:
    """The noise that was added already."""

    def __init__(self, own: dict[str, Tensor]) -> None:
        self._own = own

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        return self._own
