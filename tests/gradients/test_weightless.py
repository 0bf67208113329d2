"""Operations without weights between those that have them: attention, pooling, GELU, splitting."""

import math

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_agrees
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from epsilons.gradients import clipped_gradients


def assert_sums_to_autograd(model, loss_fn, x):
    """Without clipping, the sum of per-example gradients is the gradient of the summed loss."""
    torch.manual_seed(1)
    sums, norms = clipped_gradients(model, loss_fn, x, math.inf)
    assert norms.isfinite().all()
    torch.manual_seed(1)
    loss_fn(model, x).sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is None or torch.allclose(sums[name].to(p), p.grad, rtol=1e-4, atol=1e-5)


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


def test_attention_within_a_checkpoint_gives_the_same_norms():
    torch.manual_seed(0)
    model, x = Checkpointed(is_causal=True), torch.randn(5, 6, 12)
    found, norms = clipped_gradients(model, lambda model, x: model(x), x, 1.0)
    plain = Attending(is_causal=True)
    plain.load_state_dict(model.state_dict())
    expected, norms = clipped_gradients(plain, lambda model, x: model(x), x, 1.0)
    assert torch.allclose(norms, norms)
    for name, total in expected.items():
        assert torch.allclose(found[name], total, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.7},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
        {"dropout_p": 0.5},
    ],
)
def test_attention_with_any_option_agrees_with_autograd(options):
    torch.manual_seed(0)
    assert_sums_to_autograd(Attending(**options), lambda model, x: model(x), torch.randn(5, 6, 12))


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
def test_the_output_of_attention_is_modified_in_place_as_torch_allows(change, trained):
    torch.manual_seed(0)
    model, x = Modifying(change, trained), torch.randn(5, 6, 12)
    try:
        model(x).sum().backward()
    except RuntimeError:  # torch's kernel needs its output
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            clipped_gradients(model, lambda model, x: model(x), x, math.inf)
        return
    model.zero_grad()
    assert_sums_to_autograd(model, lambda model, x: model(x), x)


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d((3, 2), 1),
        nn.MaxPool2d([2, 3], [1, 2]),
        nn.MaxPool2d(2, padding=1),
        nn.MaxPool2d(2, dilation=2),
        nn.MaxPool2d(2, ceil_mode=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_max_pooling_with_any_option_agrees_with_autograd(pool, order):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), pool, nn.Flatten(), nn.LazyLinear(1))
    x = torch.randn(5, 2, 9, 9).contiguous(memory_format=order)
    model(x)
    assert_sums_to_autograd(model, lambda model, x: model(x).squeeze(1), x)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_agrees_with_autograd(approximate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 200), nn.GELU(approximate), nn.Linear(200, 1))
    assert_sums_to_autograd(model, lambda model, x: model(x).squeeze(1), torch.randn(20, 20))


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
def test_unusual_calls_agree_with_autograd(function):
    torch.manual_seed(0)
    assert_sums_to_autograd(
        nn.Linear(20, 200), lambda layer, x: function(layer(x)).sum(1), torch.randn(20, 20)
    )


TAKEN = {
    "unbind": lambda h: h.unflatten(1, (3, 4)).unbind(1),
    "unbind, torch's": lambda h: torch.unbind(h.unflatten(1, (4, 3)), dim=-1),
    "unbind, examples last": lambda h: h.unflatten(1, (3, 4)).movedim(1, 0).unbind(),
    "chunk": lambda h: h.chunk(3, 1),
    "chunk, torch's": lambda h: torch.chunk(h, chunks=3, dim=-1),
    "chunk with a rest": lambda h: [p[:, :3] for p in h[:, :11].chunk(3, dim=1)],
    "split": lambda h: h.split(4, dim=1),
    "split, torch's": lambda h: torch.split(h, 4, 1),
    "split in sections": lambda h: [p[:, :2] for p in h.split([2, 3, 7], -1)],
    "some not used": lambda h: h.chunk(4, 1)[1:],
    "one piece": lambda h: 3 * h.unsqueeze(2).unbind(2),
    "the same twice": lambda h: [h.chunk(2, 1)[0]] * 3,
}


class Apart(nn.Module):
    def __init__(self, take):
        super().__init__()
        self.first, self.take = nn.Linear(5, 12), take

    def forward(self, x):
        a, b, c = self.take(self.first(x))
        return (a.sin() * b + c.square()).sum(1)


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
def test_gradients_through_split_tensors_are_those_of_an_example_at_a_time(take):
    torch.manual_seed(0)
    assert_agrees(Apart(take), lambda model, x: model(x), torch.randn(6, 5))


class Heads(nn.Module):
    """Queries, keys and values taken from one map in some way."""

    def __init__(self, take):
        super().__init__()
        self.qkv, self.take = nn.Linear(8, 24), take

    def forward(self, x):
        q, k, v = self.take(self.qkv(x))
        return F.scaled_dot_product_attention(q, k, v).square().sum((1, 2, 3))


HEADS = {
    "unbound": lambda h: h.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0),
    "in chunks": lambda h: [p.unflatten(-1, (2, 4)).transpose(1, 2) for p in h.chunk(3, -1)],
    "numbers apart": lambda h: h.unflatten(-1, (2, 4, 3)).permute(4, 0, 2, 1, 3).unbind(0),
    "positions side by side": lambda h: h.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 4, 1).unbind(0),
    "one for all": lambda h: 3 * [h.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)[1]],
    "one number": lambda h: h.unflatten(-1, (3, 8, 1)).permute(2, 0, 3, 1, 4).unbind(0),
}


@pytest.mark.parametrize("take", HEADS.values(), ids=HEADS)
def test_heads_may_lie_in_any_order_in_memory(take):
    torch.manual_seed(0)
    assert_agrees(Heads(take), lambda model, x: model(x), torch.randn(5, 6, 8))


def test_a_piece_is_refused_to_whoever_modifies_it_in_place_as_torch_does():
    def take(hidden):
        a, b, c = hidden.chunk(3, 1)
        return a.mul_(2), b, c

    model, x = Apart(take), torch.randn(6, 5)
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(x)
    with pytest.raises(RuntimeError, match="modified inplace"):
        clipped_gradients(model, lambda model, x: model(x), x, 1.0)


@pytest.mark.parametrize("transform", ["vjp", "vmap"])
def test_transforms_of_torch_func_may_split_tensors(transform):
    def product(row):
        first, second = row.chunk(2, -1)
        return (first * second).sin()

    def take(hidden):
        if transform == "vmap":
            return 3 * [torch.vmap(product)(hidden)]
        return 3 * [torch.func.vjp(product, hidden)[0]]

    torch.manual_seed(0)
    assert_agrees(Apart(take), lambda model, x: model(x), torch.randn(6, 5))


def test_nested_tensors_may_be_split():
    def take(hidden):
        rows = [row[: 4 + i % 3] for i, row in enumerate(hidden)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        sums = torch.stack([part.sin().sum() for part in nested.unbind()])
        return 3 * [sums.unsqueeze(1)]

    torch.manual_seed(0)
    model, x = Apart(take), torch.randn(6, 5)
    sums, _ = clipped_gradients(model, lambda model, x: model(x), x, 1e9)
    model(x).sum().backward()
    torch.testing.assert_close(sums["first.weight"].float(), model.first.weight.grad)
