"""Sums over many positions or long patches of equal numbers, where float32 errs most."""

import copy

import pytest
import torch
from torch import nn

from epsilons.gradients import clipped_gradients
from epsilons.gradients.norms import batch_norms
from epsilons.models.wide_resnet import StandardisedConv2d


class Negative(nn.Module):
    """The right half of a picture negative, or a standardised filter would see nothing of it."""

    def forward(self, x):
        left, right = x.chunk(2, -1)
        return torch.cat([left, -right], -1)


CASES = {
    "bias of a large black picture": (lambda: nn.Conv2d(1, 16, 3), (1, 512, 512)),
    "filters over a large picture": (lambda: nn.Conv2d(3, 16, 3, bias=False), (3, 512, 512)),
    "one pixel at a time": (lambda: nn.Conv2d(3, 16, 1, bias=False), (3, 384, 384)),
    "a filter as large as the picture": (lambda: nn.Conv2d(64, 8, 64, bias=False), (64, 64, 64)),
    "large filters side by side": (lambda: nn.Conv2d(64, 64, 32, 32, bias=False), (64, 64, 64)),
    "large standardised filters": (
        lambda: nn.Sequential(Negative(), StandardisedConv2d(64, 4, 32)),
        (64, 48, 48),
    ),
    "a long filter in one dimension": (lambda: nn.Conv1d(1, 4, 16_000, bias=False), (1, 16_000)),
    "a long sequence": (lambda: nn.Linear(3, 2), (100_000, 3)),
    "wide rows of a short sequence": (lambda: nn.Linear(100_000, 8, bias=False), (4, 100_000)),
}


def scaled(model, batch):
    """A loss whose gradient is the same number at every position of an example's output."""
    x, slope = batch
    return model(x).flatten(1).sum(1) * slope


@pytest.mark.parametrize("name", CASES)
def test_norms_are_right_to_1e_5_and_no_bound_is_exceeded(name):
    torch.manual_seed(0)
    build, shape = CASES[name]
    model = build()
    values = 0.5 + torch.tensor([5.0, 15.0, 23.0]) / 47
    shades = values * 0 if "black" in name else values
    x, slope = shades.view(-1, *[1] * len(shape)).expand(-1, *shape), values.flip(0)
    exact = batch_norms(copy.deepcopy(model).double(), scaled, (x.double(), slope.double()))
    assert (batch_norms(model, scaled, (x, slope)) / exact - 1).abs().max() <= 1e-5
    for i in range(len(x)):
        part = slice(i, i + 1)
        sums, norms = clipped_gradients(model, scaled, (x[part], slope[part]), 1.0)
        assert abs(norms.item() / exact[i] - 1) <= 1e-5
        length = torch.stack([s.double().square().sum() for s in sums.values()]).sum().sqrt()
        assert 1 - 1.2e-4 <= length <= 1
