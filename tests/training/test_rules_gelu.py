"""GELU with its slope by a compiled loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

from epsilons.training import clipped_gradients
from epsilons.training.rules import gelu as gelus
from epsilons.training.rules.gelu import fits, gelu


def slowly(x):
    exact = x.detach().double().requires_grad_()
    value = F.gelu(exact)
    return value.detach(), torch.autograd.grad(value.sum(), exact)[0]


@pytest.mark.parametrize("count", [1, 4095, 4096, 4097, 100_000])
def test_value_and_slope_agree_with_float64(count):
    x = torch.linspace(-14, 14, count)
    for found, exact in zip(gelu(x), slowly(x), strict=True):
        assert ((found - exact).abs() <= 2.5e-7 * (1 + x.abs() / 4)).all()


def test_far_from_zero_it_is_nothing_or_the_number_itself():
    value, slope = gelu(torch.tensor([-1e38, -100.0, 0.0, 100.0, 1e38]))
    assert value.tolist() == [0.0, 0.0, 0.0, 100.0, pytest.approx(1e38)]
    assert slope.tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_alone(bad):
    x = torch.linspace(-3, 3, 9)
    clean = torch.stack(gelu(x))
    x[4] = bad
    dirty = torch.stack(gelu(x))
    assert not dirty[:, 4].isfinite().any() or bad == math.inf
    assert not dirty[:, 4].isfinite().all()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(dirty[:, others], clean[:, others])


def test_any_number_of_threads_gives_the_same_bits():
    x = torch.linspace(-9, 9, 3 * 4096 + 5)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count] = torch.stack(gelu(x))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[1], found[2])
    assert torch.equal(found[1], found[8])


@pytest.mark.parametrize(("approximate", "ours"), [("none", True), ("tanh", False)])
def test_a_pass_takes_the_loop_where_it_says_the_same(approximate, ours, monkeypatch):
    calls = []
    monkeypatch.setattr(gelus, "gelu", lambda x: calls.append(1) or gelu(x))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 2000), nn.GELU(approximate), nn.Linear(2000, 1))
    x = torch.randn(20, 20)
    assert fits(torch.empty(20, 2000))
    sums, _ = clipped_gradients(model, lambda model, x: model(x).squeeze(1), x, math.inf)
    assert bool(calls) == ours
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(sums[name], p.grad, rtol=1e-4, atol=1e-5)


def into_a_buffer(x):
    return F.gelu(x.detach(), out=torch.empty_like(x)) * x


def by_another_library(x):
    return F.gelu(x.to_mkldnn()).to_dense()


def with_a_derivative_on_the_way(x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(F.gelu(dual)).tangent


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own use of it
@pytest.mark.parametrize(
    "function", [into_a_buffer, by_another_library, with_a_derivative_on_the_way]
)
def test_what_the_loop_does_not_take_is_left_to_torch(function):
    torch.manual_seed(0)
    layer, x = nn.Linear(20, 2000), torch.randn(20, 20)

    def loss_fn(layer, x):
        return function(layer(x)).sum(1)

    sums, _ = clipped_gradients(layer, loss_fn, x, math.inf)
    loss_fn(layer, x).sum().backward()
    for name, p in layer.named_parameters():
        assert torch.allclose(sums[name], p.grad, rtol=1e-4, atol=1e-5)
