"""Side-car canaries: planted examples whose gradients are orthogonal and exactly as prescribed.

Each canary has one weight of its own, and its loss is its norm times that weight: its gradient has
that norm and no other coordinate. So the noise and the coins it meets are its own, and thousands
are judged in one training. Sampler, clipping, noise, journal and price are those of the training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Array = NDArray[np.float64]


class SideCar(nn.Module):
    """One weight for each of `m` canaries, all of the same norm until `set_norms`.

    `m`: how many there are, members or not. `norms` (m,): of each one's gradient, float64.
    """

    def __init__(self, m: int) -> None:
        super().__init__()
        if m < 1:
            raise ValueError(f"m={m}; expected at least one canary")
        self.weight = nn.Embedding(m, 1)
        nn.init.zeros_(self.weight.weight)
        self.register_buffer("norms", torch.ones(m, dtype=torch.float64))
        self.norms: Tensor

    def set_norms(self, norms: ArrayLike) -> None:
        """Give the gradients of the canaries these `norms` (m,) from now on."""
        self.norms.copy_(torch.as_tensor(np.asarray(norms, dtype=np.float64)))

    def forward(self, slots: Tensor) -> Tensor:
        """The losses (B,) of the canaries in these `slots` (B,)."""
        scale = self.norms[slots].to(self.weight.weight.dtype)
        loss: Tensor = self.weight(slots).squeeze(1) * scale
        return loss

    @property
    def gradient(self) -> Array:
        """(m,): what the last step released for each canary, as the optimizer got it."""
        released = self.weight.weight.grad
        assert released is not None
        found: Array = released.detach().double().cpu().reshape(-1).numpy()
        return found


def sidecar_loss(model: nn.Module, batch: Any) -> Tensor:
    """One loss per canary, for batches of their slots."""
    losses: Tensor = model(batch[0])
    return losses


def canary_data(members: NDArray[np.bool_]) -> TensorDataset:
    """The canaries that are `members` (m,), by their slots; the others are absent."""
    return TensorDataset(torch.from_numpy(np.flatnonzero(members)))


def log_likelihood_ratios(x: Array, s: ArrayLike, sample_rate: float) -> Array:
    """What one step says for membership: log(1 − q + q·exp(s·x − s²/2)) of each canary.

    `x` (m,): released over σ. `s` (m,): norms over σ.
    """
    ratio = np.asarray(s, dtype=np.float64)
    odds = np.clip(ratio * x - ratio**2 / 2, -700, 700)
    found: Array = np.log1p(sample_rate * np.expm1(odds))
    return found
