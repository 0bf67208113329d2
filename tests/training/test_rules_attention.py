"""Compiled attention: any sizes, any layout in memory, any number of threads."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from epsilons.training import clipped_gradients
from epsilons.training.rules import attention as attentions
from epsilons.training.rules.attention import MOST, attention, attention_back, fits


def slowly(q, k, v, scale, causal, g):
    """The output, and the gradients of q, k and v, by autograd in float64."""
    operands = [t.detach().double().requires_grad_() for t in (q, k, v)]
    scores = operands[0] @ operands[1].mT * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    out = scores.softmax(-1) @ operands[2]
    return out.detach(), torch.autograd.grad(out, operands, g.double())


def heads(batch, number, places, width, draws, kept_apart):
    """Heads that lie side by side in memory, as a linear map leaves them, or each by itself."""
    if kept_apart:
        return torch.randn(batch, number, places, width, generator=draws)
    return torch.randn(batch, places, number, width, generator=draws).transpose(1, 2)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 36),
    st.integers(1, 36),
    st.booleans(),
    st.booleans(),
    st.floats(0.01, 3.0),
    st.integers(0, 2**31),
)
def test_any_sizes_agree_with_autograd(places, others, d, e, causal, kept_apart, scale, seed):
    draws = torch.Generator().manual_seed(seed)
    q = heads(2, 3, places, d, draws, kept_apart)
    k, v = (heads(2, 3, others, width, draws, kept_apart) for width in (d, e))
    g = heads(2, 3, places, e, draws, not kept_apart)
    out, sums = attention(q, k, v, scale, causal)
    expected, gradients = slowly(q, k, v, scale, causal, g)
    assert torch.allclose(out.transpose(1, 2).double(), expected, atol=1e-5, rtol=1e-5)
    # Slopes are differences, whose rounding is relative to what they are differences of.
    slack = 1e-6 * (g.norm() * (1 + v.norm()) * (1 + scale * (q.norm() + k.norm())))
    for found, exact in zip(
        attention_back(g.transpose(1, 2), q, k, v, sums, scale, causal), gradients, strict=True
    ):
        assert (found - exact).norm() <= 1e-5 * exact.norm() + slack


def test_the_longest_sequences_agree_too():
    draws = torch.Generator().manual_seed(0)
    q, k, v, g = (heads(1, 2, MOST, MOST, draws, True) for _ in range(4))
    assert fits(q, k, v)
    assert not fits(torch.randn(1, 2, MOST + 1, 4))
    out, sums = attention(q, k, v, 0.1, False)
    expected, gradients = slowly(q, k, v, 0.1, False, g)
    assert torch.allclose(out.transpose(1, 2).double(), expected, atol=1e-5)
    for found, exact in zip(
        attention_back(g.transpose(1, 2), q, k, v, sums, 0.1, False), gradients, strict=True
    ):
        assert (found - exact).norm() <= 1e-5 * exact.norm()


@pytest.mark.parametrize("size", [1.0, 50.0, 1e4])
def test_large_scores_leave_no_weight_undefined(size):
    """exp of the largest score would overflow, and those far below it vanish."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 9, 8) for _ in range(3))
    out, sums = attention(size * q, k, v, 1.0, False)
    expected, _ = slowly(size * q, k, v, 1.0, False, torch.zeros(1, 1, 9, 8))
    assert sums.isfinite().all()
    assert torch.allclose(out.transpose(1, 2).double(), expected, atol=1e-5 * max(1.0, size / 10))


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(3, 2, 17, 12) for _ in range(4))
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            out, sums = attention(q, k, v, 0.3, True)
            found[count] = torch.stack(
                [out.transpose(1, 2), *attention_back(g.transpose(1, 2), q, k, v, sums, 0.3, True)]
            )
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[1], found[2])
    assert torch.equal(found[1], found[8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite_stays_so_and_stays_with_its_example(bad, where):
    torch.manual_seed(0)
    operands = [torch.randn(3, 2, 7, 5) for _ in range(4)]

    def run():
        q, k, v, g = operands
        out, sums = attention(q, k, v, 0.4, False)
        return torch.stack(
            [out.transpose(1, 2), *attention_back(g.transpose(1, 2), q, k, v, sums, 0.4, False)]
        )

    clean = run()
    operands[where][1, 0, 3, 2] = bad
    dirty = run()
    assert not dirty[:, 1].isfinite().all()
    assert torch.equal(dirty[:, [0, 2]], clean[:, [0, 2]])


class Attending(nn.Module):
    def __init__(self, width=12, heads=3, **options):
        super().__init__()
        self.heads, self.options = heads, options
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).unbind(0)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(mixed.transpose(1, 2).flatten(-2)).square().sum((1, 2))


class Checkpointed(Attending):
    """The same, run again on the way back."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def test_within_a_checkpoint_it_says_the_same():
    torch.manual_seed(0)
    model, x = Checkpointed(is_causal=True), torch.randn(5, 6, 12)
    found, norms = clipped_gradients(model, lambda model, x: model(x), x, 1.0)
    plain = Attending(is_causal=True)
    plain.load_state_dict(model.state_dict())
    expected, lengths = clipped_gradients(plain, lambda model, x: model(x), x, 1.0)
    assert torch.allclose(norms, lengths)
    for name, total in expected.items():
        assert torch.allclose(found[name], total, atol=1e-6)


def test_what_comes_back_in_another_type_is_refused():
    q = torch.randn(1, 1, 4, 4)
    _, sums = attention(q, q, q, 1.0, False)
    with pytest.raises(TypeError, match="another kind"):
        attention_back(q, q.double(), q, q, sums, 1.0, False)
    with pytest.raises(TypeError, match="float64"):
        attention_back(q, q, q, q, sums.double(), 1.0, False)


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, True),
        ({"is_causal": True}, True),
        ({"scale": 0.7}, True),
        ({"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()}, False),
        ({"dropout_p": 0.5}, False),
    ],
)
def test_a_pass_takes_the_loops_where_they_say_the_same(options, ours, monkeypatch):
    calls = []
    monkeypatch.setattr(attentions, "attention", lambda *args: calls.append(1) or attention(*args))
    torch.manual_seed(0)
    model, x = Attending(**options), torch.randn(5, 6, 12)
    torch.manual_seed(1)
    sums, norms = clipped_gradients(model, lambda model, x: model(x), x, math.inf)
    assert bool(calls) == ours
    torch.manual_seed(1)
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert torch.allclose(sums[name], p.grad, rtol=1e-4, atol=1e-5)
    assert norms.isfinite().all()


class Modifying(nn.Module):
    """Heads of values twice as wide as keys, with something done in place afterwards."""

    def __init__(self, change, trained):
        super().__init__()
        self.q, self.v = nn.Linear(12, 12), nn.Linear(12, 24)
        self.change = change
        self.q.requires_grad_(trained)

    def forward(self, x):
        q, v = (part(x).unflatten(-1, (3, -1)).transpose(1, 2) for part in (self.q, self.v))
        key = q if self.q.weight.requires_grad else x.unflatten(-1, (3, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, key, v if self.change != "raw" else key)
        if self.change == "raw":
            mixed.add_(v[..., :4])
        elif self.change == "part":
            mixed[:, :, 0] = v[:, :, 1]
        else:
            mixed.mul_(2)
        return mixed.square().sum((1, 2, 3))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("change", ["whole", "part", "raw"])
def test_what_comes_out_may_be_modified_in_place(change, trained):
    if change == "raw" and trained:
        pytest.skip("torch refuses it as well: its kernel needs the output")
    torch.manual_seed(0)
    model, x = Modifying(change, trained), torch.randn(5, 6, 12)
    sums, _ = clipped_gradients(model, lambda model, x: model(x), x, math.inf)
    model(x).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.allclose(sums[name], p.grad, rtol=1e-4, atol=1e-5)
