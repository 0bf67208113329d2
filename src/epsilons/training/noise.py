"""Gaussian noise on the clipped sum."""

from __future__ import annotations

import torch
from torch import Tensor


class SeededNoise:
    """Noise from a generator of its own: the same seed gives the same noise.

    For experiments. Whoever knows the seed can take the noise away.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def added_to(self, sums: dict[str, Tensor], std: float) -> dict[str, Tensor]:
        """Every sum plus independent N(0, std²) in each coordinate."""
        return {name: total + std * self._like(total) for name, total in sums.items()}

    def _like(self, total: Tensor) -> Tensor:
        drawn = torch.randn(total.shape, generator=self._generator, device=self._generator.device)
        return drawn.to(total)
