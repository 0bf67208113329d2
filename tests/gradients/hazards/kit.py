"""What hazards are made of: sizes, inputs, a loss, and a module from a function."""

import torch
from torch import nn

B, T, D, V = 5, 6, 8, 11  # examples, sequence length, width, vocabulary


def squared(model, batch):
    """A loss that every output entry takes part in, unequally."""
    out = model(batch)
    weights = torch.linspace(0.5, 1.5, out[0].numel(), dtype=out.dtype, device=out.device)
    return ((out - 0.3).square().flatten(1) * weights).sum(1)


HAZARDS = {}


def hazard(build):
    """Register `build() → (model, loss_fn, batch)` under its name."""
    HAZARDS[build.__name__] = build
    return build


def images(channels=3, size=9):
    return torch.randn(B, channels, size, size)


def sequences():
    return torch.randn(B, T, D)


def tokens():
    ids = torch.randint(0, V, (B, T))
    ids[:, 1] = ids[:, 0]  # repeated within an example
    ids[:, -1] = 0  # padding
    return ids


class Net(nn.Module):
    """A module whose forward pass is given as a function of itself and the input."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def parameter(*shape):
    return nn.Parameter(torch.randn(*shape) / 2)
