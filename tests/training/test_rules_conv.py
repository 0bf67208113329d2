"""Convolutions: every way of taking the norm, whatever the cost model would choose."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hazards import HAZARDS
from oracle import assert_agrees, in_float64
from torch import nn

from epsilons.training import UnsupportedLayer
from epsilons.training.norms import batch_norms
from epsilons.training.rules import conv
from epsilons.training.standardisation import Standardised

METHODS = ("compiled", "patches", "groups", "patch grams", "shifted grams")
CONVS = [name for name in HAZARDS if "conv" in name or "standard" in name]


def prefer(monkeypatch, method):
    """Make the cost model choose a method wherever it applies at all."""
    costs = conv._costs

    def biased(*shapes):
        found = costs(*shapes)
        return {n: c if math.isinf(c) or n != method else -1.0 for n, c in found.items()}

    monkeypatch.setattr(conv, "_costs", biased)
    monkeypatch.setattr(conv, "_cheapest", conv._cheapest.__wrapped__)  # nothing is remembered


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
        "filter_squares": "compiled",
        "filter_gradients": "compiled",
        "by_patches": "patches",
        "by_groups": "groups",
        "patch_gram": "patch grams",
        "shifted_gram": "shifted grams",
        "shifted_squares": "shifted grams",
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
@pytest.mark.parametrize("method", ["patches", "compiled", "shifted grams"])
@pytest.mark.parametrize("size", [4, 8])  # operands kept for the sum, and gradients
def test_standardised_weights_in_closed_form_agree_with_the_loop(
    size, method, in_place, monkeypatch
):
    torch.manual_seed(0)
    prefer(monkeypatch, method)
    calls = []
    original = Standardised.square_norms
    monkeypatch.setattr(
        Standardised, "square_norms", lambda *a: calls.append(original(*a)) or calls[-1]
    )
    model = StandardisedConv(in_place=in_place, scale=0.1)
    assert_agrees(model, HAZARDS["conv_depthwise"]()[1], torch.randn(5, 12, size, size))
    assert calls
    assert not calls[0][1].any(), "the closed form gave up"


@pytest.mark.parametrize("ask", ["square_norms", "formed"])
def test_the_bias_of_a_compiled_convolution_has_its_gradients_from_it(ask, monkeypatch):
    torch.manual_seed(0)
    prefer(monkeypatch, "compiled")
    layer, x, g = nn.Conv2d(3, 5, 3), torch.randn(4, 1, 3, 20, 20), torch.randn(4, 1, 5, 18, 18)
    (_, term), (_, shift) = conv.conv(x, layer.weight, layer.bias)
    getattr(term, ask)(g)
    assert shift.sums is not None
    expected = g.double().sum((1, 3, 4))
    assert torch.allclose(shift.gradients(g).double(), expected, rtol=0, atol=1e-4)
    some = torch.tensor([2, 0])
    assert torch.allclose(shift.rows(some).gradients(g[some]).double(), expected[some], atol=1e-4)
    getattr(term.rows(some), ask)(g[some])
    assert len(shift.sums) == 4  # part of the batch leaves them alone


def test_a_convolution_of_no_channels_is_refused_by_name():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about weights without entries
        model = nn.Conv2d(0, 4, 3, bias=False)
    with pytest.raises(UnsupportedLayer, match="weight"):
        batch_norms(model, lambda model, x: model(x).sum((1, 2, 3)), torch.zeros(2, 0, 5, 5))
