"""The compiled way back through layer norm: any sizes, any number of threads."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from epsilons.training.norms import batch_norms
from epsilons.training.rules.layernorm import layer_norm_back
from epsilons.training.rules.outer import MOST_PLACES


def back(x, g, weight):
    """By torch's own autograd in double precision, example by example."""
    results = []
    for rows, its in zip(x.double(), g.double(), strict=True):
        rows.requires_grad_()
        scale = torch.ones(x.shape[2]).double() if weight is None else weight.double()
        scale, shift = scale.requires_grad_(), torch.zeros_like(scale).requires_grad_()
        out = F.layer_norm(rows, x.shape[2:], scale, shift)
        results.append(torch.autograd.grad(out, (rows, scale, shift), its))
    return [torch.stack(column) for column in zip(*results, strict=True)]


def compiled(x, g, weight):
    _, mean, rstd = torch.native_layer_norm(x, x.shape[2:], weight, None, 1e-5)
    return layer_norm_back(x, g, mean.squeeze(2), rstd.squeeze(2), weight)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(2, 150), st.booleans(), st.integers(0, 2**31))
def test_any_sizes_agree_with_autograd_in_double_precision(places, d, weighted, seed):
    draws = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(3, places, d, generator=draws) for _ in range(2))
    weight = torch.randn(d, generator=draws) if weighted else None
    deviation = x.std(2, correction=0).min()
    terms = g.norm() / deviation * (1.0 if weight is None else weight.abs().max())
    slack = 1e-6 * (1 + x.abs().max() / deviation)  # where numbers are nearly equal, all cancels
    for found, expected in zip(compiled(x, g, weight), back(x, g, weight), strict=True):
        assert (found - expected).norm() <= 2e-6 * expected.norm() + slack * terms


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    x, g, weight = torch.randn(5, 9, 33), torch.randn(5, 9, 33), torch.randn(33)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count] = compiled(x, g, weight)
    finally:
        torch.set_num_threads(threads)
    for count in (2, 8):
        assert all(map(torch.equal, found[1], found[count]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_and_stays_with_its_example(bad):
    torch.manual_seed(0)
    x, g = torch.randn(3, 4, 20), torch.randn(3, 4, 20)
    clean = compiled(x, g, None)
    g[1, 2, 3] = bad
    for dirty, its in zip(compiled(x, g, None), clean, strict=True):
        assert not dirty[1].isfinite().all()
        assert torch.equal(dirty[[0, 2]], its[[0, 2]])


@pytest.mark.parametrize("places", [1, MOST_PLACES, MOST_PLACES + 1])  # compiled, and torch's own
def test_sequences_of_any_length_have_the_norms_of_autograd(places):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
    nn.init.normal_(model[1].weight)
    x = torch.randn(3, places, 4)
    norms = batch_norms(model, lambda model, x: model(x).pow(3).sum((1, 2)), x)
    model = model.double()
    for norm, rows in zip(norms, x.double(), strict=True):
        gradients = torch.autograd.grad(model(rows).pow(3).sum(), list(model.parameters()))
        exact = torch.cat([g.flatten() for g in gradients]).norm()
        assert abs(norm - exact) <= 1e-5 * exact
