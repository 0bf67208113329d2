"""Layer norm: sequences of any length, and values that are not finite."""

import math

import pytest
import torch
from torch import nn

from epsilons.gradients.norms import batch_norms


def loss_fn(model, x):
    return model(x).pow(3).sum((1, 2))


@pytest.mark.parametrize("positions", [1, 128, 129])
def test_sequences_of_any_length_have_the_norms_of_autograd(positions):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    nn.init.normal_(model[1].weight)
    x = torch.randn(3, positions, 4)
    norms = batch_norms(model, loss_fn, x)
    model = model.double()
    for norm, rows in zip(norms, x.double(), strict=True):
        gradients = torch.autograd.grad(model(rows).pow(3).sum(), list(model.parameters()))
        exact = torch.cat([g.flatten() for g in gradients]).norm()
        assert abs(norm - exact) <= 1e-5 * exact


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_its_example(bad):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 20), nn.LayerNorm(20)), torch.randn(3, 5, 4)
    clean = batch_norms(model, loss_fn, x)
    x[1, 2, 3] = bad
    dirty = batch_norms(model, loss_fn, x)
    assert not dirty[1].isfinite()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
