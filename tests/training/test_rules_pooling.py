"""Max pooling by a compiled loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from epsilons.training import clipped_gradients
from epsilons.training.rules import pooling
from epsilons.training.rules.pooling import fits, max_pool, max_pool_back


def by_torch(x, g, kernel, stride):
    x = x.detach().requires_grad_()
    value = F.max_pool2d(x, kernel, stride)
    return value.detach(), torch.autograd.grad(value, x, g)[0]


def by_loops(x, g, kernel, stride):
    value, which = max_pool(x, kernel, stride)
    return value, max_pool_back(g, which, x.shape, kernel, stride)


@settings(deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    more=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    numbers=st.integers(1, 6),
    seed=st.integers(0, 2**32),
)
def test_values_and_slopes_are_those_of_torch_also_where_numbers_are_equal(
    kernel, stride, more, numbers, seed
):
    generator = torch.Generator().manual_seed(seed)
    size = [k + m for k, m in zip(kernel, more, strict=True)]
    x = torch.randint(0, numbers, (2, 3, *size), generator=generator).float()
    places = F.max_pool2d(x, kernel, stride).shape
    g = torch.randint(-9, 9, places, generator=generator).float()  # whose sums are exact
    for ours, theirs in zip(
        by_loops(x, g, kernel, stride), by_torch(x, g, kernel, stride), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_treated_as_torch_does(bad):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 6)
    x[1, 0, 2:4, 3] = bad
    g = torch.randn(3, 2, 5, 5)
    ours, theirs = (run(x, g, (2, 2), (1, 1)) for run in (by_loops, by_torch))
    assert torch.equal(ours[0].nan_to_num(7.5), theirs[0].nan_to_num(7.5))
    assert torch.allclose(ours[1], theirs[1], atol=1e-6)


def test_a_gradient_in_any_order_in_memory_is_read_as_it_is():
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 4, 3).permute(0, 3, 1, 2)
    ours, theirs = (run(x, g, (2, 2), (2, 2)) for run in (by_loops, by_torch))
    assert torch.equal(ours[1], theirs[1])


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    x, g = torch.randn(5, 3, 11, 9), torch.randn(5, 3, 10, 8)
    before, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found.append(by_loops(x, g, (2, 2), (1, 1)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(
    ("pool", "ours"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d((3, 2), 1), True),
        (nn.MaxPool2d([2, 3], [1, 2]), True),
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, dilation=2), False),
        (nn.MaxPool2d(2, ceil_mode=True), False),
    ],
)
def test_a_pass_takes_the_loop_where_it_says_the_same(pool, ours, monkeypatch):
    calls = []
    monkeypatch.setattr(pooling, "max_pool", lambda *args: calls.append(1) or max_pool(*args))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), pool, nn.Flatten(), nn.LazyLinear(1))
    x = torch.randn(5, 2, 9, 9)
    model(x)
    sums, _ = clipped_gradients(model, lambda model, x: model(x).squeeze(1), x, math.inf)
    assert bool(calls) == ours
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(sums[name], p.grad, rtol=1e-4, atol=1e-5)


def test_pictures_that_loops_do_not_take_are_left_to_torch():
    x = torch.randn(2, 3, 8, 8)
    assert fits(x, (2, 2))
    assert not fits(x.double(), (2, 2))
    assert not fits(x.contiguous(memory_format=torch.channels_last), (2, 2))
    assert not fits(x[0], (2, 2))
    assert not fits(x, (9, 2))
    assert not fits(torch.randn(1, 1, 20, 20), (17, 17))
    with pytest.raises(RuntimeError):
        clipped_gradients(
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.MaxPool2d(9)),
            lambda model, x: model(x).sum((1, 2, 3)), x, 1.0,
        )  # fmt: skip
