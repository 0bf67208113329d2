"""Convolutions: every way of taking the norm, whatever the cost model would choose."""

import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_agrees, in_float64
from torch import nn
from walks import SAME, slowly, walks

from epsilons.gradients.norms import batch_norms
from epsilons.gradients.rules import conv
from epsilons.gradients.rules.contractions import (
    Geometry,
    by_groups,
    by_patches,
    patch_gram,
    shifted_gram,
    symmetric,
)
from epsilons.gradients.rules.derived import Standardised

METHODS = ("patches", "groups", "patch grams", "shifted grams")
CONVS = [name for name in HAZARDS if "conv" in name or "standard" in name]


def prefer(monkeypatch, method):
    """Make the cost model choose a method wherever it applies at all."""
    costs = conv._costs

    def biased(*shapes):
        found = costs(*shapes)
        return {n: c if math.isinf(c) or n != method else -1.0 for n, c in found.items()}

    monkeypatch.setattr(conv, "_costs", biased)
    monkeypatch.setattr(conv, "_cheapest", conv._cheapest.__wrapped__)  # no cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", CONVS)
def test_every_method_agrees_with_the_loop(name, method, dtype, monkeypatch):
    torch.manual_seed(0)
    prefer(monkeypatch, method)
    model, loss_fn, batch = HAZARDS[name]()
    if dtype == torch.float64:
        model, batch = model.double(), in_float64(batch)
    assert_agrees(model, loss_fn, batch)


@pytest.mark.parametrize("method", METHODS)
def test_the_method_that_is_preferred_is_the_one_that_runs(method, monkeypatch):
    prefer(monkeypatch, method)
    runs = []
    parts = {
        "by_patches": "patches",
        "by_groups": "groups",
        "patch_gram": "patch grams",
        "shifted_gram": "shifted grams",
    }
    for function, name in parts.items():
        original = getattr(conv, function)
        monkeypatch.setattr(conv, function, lambda *a, n=name, f=original: runs.append(n) or f(*a))
    batch_norms(*HAZARDS["conv_zeros_padding"]())
    assert set(runs) == {method}


class StandardisedConv(nn.Module):
    """timm's and De et al.'s layer, by layer_norm, with or without an activation in place."""

    def __init__(self, *, in_place, scale):
        super().__init__()
        self.conv = nn.Conv2d(12, 16, 3, padding=1)
        self.gain = nn.Parameter(torch.rand(16, 1) + 0.5)
        self.in_place, self.scale = in_place, scale

    def forward(self, x):
        flat = F.layer_norm(self.conv.weight.flatten(1), (108,), eps=1e-4)
        weight = (flat * (self.gain * self.scale)).view_as(self.conv.weight)
        return F.relu(F.conv2d(x, weight, self.conv.bias, padding=1), inplace=self.in_place)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("method", ["patches", "groups", "shifted grams"])
@pytest.mark.parametrize("size", [4, 8])  # operands kept for the sum, and gradients
def test_standardised_weights_in_closed_form_agree_with_the_loop(
    size, method, in_place, monkeypatch
):
    torch.manual_seed(0)
    prefer(monkeypatch, method)
    calls = []
    original = Standardised.closed_form
    monkeypatch.setattr(
        Standardised, "closed_form", lambda *a: calls.append(original(*a)) or calls[-1]
    )
    model = StandardisedConv(in_place=in_place, scale=0.1)
    assert_agrees(model, HAZARDS["conv_depthwise"]()[1], torch.randn(5, 12, size, size))
    assert calls
    assert not calls[0].cancelled.any(), "the closed form gave up"


def test_a_convolution_of_no_channels_has_no_gradient():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about weights without entries
        model = nn.Conv2d(0, 4, 3, bias=False)
    norms = batch_norms(model, lambda model, x: model(x).sum((1, 2, 3)), torch.zeros(2, 0, 5, 5))
    assert norms.tolist() == [0, 0]


@settings(max_examples=200, deadline=None)
@given(walks(), st.sampled_from([1, 2, 3, 8, 19]), st.integers(1, 9), st.integers(0, 2**31))
def test_gradients_of_any_walk_agree_with_taps_one_by_one(walk, channels, outputs, seed):
    geometry, size, out = walk
    if min(out) < 1:
        return
    draws = torch.Generator().manual_seed(seed)
    source = torch.randn(3, channels * geometry.groups, *size, generator=draws)
    grads = torch.randn(3, outputs * geometry.groups, *out, generator=draws)
    expected = slowly(source, grads, geometry)
    scale = slowly(source.abs(), grads.abs(), geometry)  # what rounding is relative to
    methods = [by_patches]
    if symmetric(source.shape, grads.shape, geometry):
        methods.append(by_groups)
    for method in methods:
        found = method(source, grads, geometry)
        assert found.shape == expected.shape
        assert ((found - expected).abs() <= 2e-6 * scale + 1e-30).all(), method


@settings(max_examples=200, deadline=None)
@given(walks(stride=1, groups=1), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_products_of_patches_agree_with_taps_one_by_one(walk, channels, outputs, seed):
    geometry, size, out = walk
    if min(out) < 1:
        return
    draws = torch.Generator().manual_seed(seed)
    source = torch.randn(3, channels, *size, generator=draws)
    grads = torch.randn(3, outputs, *out, generator=draws)
    expected = slowly(source, grads, geometry).square().sum((1, 2, 3, 4))
    slack = 2e-6 * slowly(source.abs(), grads.abs(), geometry).square().sum((1, 2, 3, 4)) + 1e-30
    g = grads.flatten(2).mT
    for patches in (patch_gram, shifted_gram):
        found = (patches(source, grads, geometry) * (g @ g.mT)).sum((1, 2))
        assert ((found - expected).abs() <= slack).all(), patches


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["source", "grads"])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_stays_with_its_example(method, where, bad, monkeypatch):
    prefer(monkeypatch, method)
    torch.manual_seed(0)
    tensors = {"source": torch.randn(4, 2, 6, 6), "grads": torch.randn(4, 5, 6, 6)}

    def norms():
        return conv.Conv(tensors["source"], SAME).square_norms(tensors["grads"])

    clean = norms()
    tensors[where][2, 1, 3, 3] = bad
    dirty = norms()
    assert not dirty[2].isfinite()
    torch.testing.assert_close(dirty[[0, 1, 3]], clean[[0, 1, 3]])


@pytest.mark.parametrize("geometry", [((1, 1), (1, 10), (0, 2)), ((3, 1), (1, 10), (0, 2))])
def test_a_filter_that_sees_nothing_but_padding_has_no_gradient(geometry):
    seen = Geometry(*geometry, (1, 1), 1)
    grads = torch.ones(2, 4, 6 - geometry[0][0], 1)
    squares = conv.Conv(torch.ones(2, 1, 5, 3), seen).square_norms(grads)
    assert torch.equal(squares, torch.zeros(2))


def test_no_images_have_no_gradients():
    source, grads = torch.empty(0, 2, 6, 6), torch.empty(0, 4, 6, 6)
    assert by_patches(source, grads, SAME).shape == (0, 4, 2, 3, 3)


def test_squares_of_a_million_numbers_are_not_summed_too_coarsely():
    torch.manual_seed(0)
    source, grads = torch.randn(2, 512, 3, 3), torch.randn(2, 512, 3, 3)
    rule = conv.Conv(source, SAME)
    exact = slowly(source, grads, SAME).square().sum((1, 2, 3, 4))
    torch.testing.assert_close(rule.square_norms(grads).double(), exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_a_standardised_filter_is_told_from_gradients_in_any_order_in_memory(order):
    torch.manual_seed(0)
    sizes = (2, 3, 4, 2, 5)
    r = torch.randn([sizes[d] for d in order]).permute([order.index(d) for d in range(5)])
    _check_by_filter(r)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_a_standardised_filter_is_told_from_gradients_that_repeat_in_memory(dim):
    torch.manual_seed(0)
    r = torch.randn(2, 3, 4, 2, 5)
    _check_by_filter(r.narrow(dim, 0, 1).expand_as(r))


def _check_by_filter(r):
    rows, ones = torch.randn(3, 40), torch.ones(3, 1)
    found = Standardised(None, rows, ones, ones, ones)._by_filter(r)
    flat = r.reshape(2, 3, 40)
    expected = flat.square().sum(2), (flat * rows).sum(2), flat.sum(2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
