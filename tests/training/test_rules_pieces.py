"""Tensors taken apart and their gradients put together: as torch does, without its copies."""

import pytest
import torch
import torch.nn.functional as F
from oracle import assert_agrees
from torch import nn

from epsilons.training import clipped_gradients
from epsilons.training.rules.attention import attention, attention_back
from epsilons.training.rules.pieces import room_like, side_by_side

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
def test_gradients_are_those_of_an_example_at_a_time(take):
    torch.manual_seed(0)
    assert_agrees(Apart(take), lambda model, x: model(x), torch.randn(6, 5))


def test_nothing_is_copied_where_gradients_lie_as_the_pieces_did():
    torch.manual_seed(0)
    whole = torch.randn(2, 7, 3, 4, 5)  # examples, places, which, heads, numbers
    q, k, v = (part.transpose(1, 2) for part in whole.movedim(2, 0).unbind(0))
    out, sums = attention(q, k, v, 0.3, False)
    found = attention_back(torch.randn_like(out), q, k, v, sums, 0.3, False)
    view = side_by_side([part.transpose(1, 2) for part in found], 2)
    assert view is not None
    assert view.is_contiguous()
    assert view.shape == whole.shape
    for place, part in enumerate(found):
        assert torch.equal(view[:, :, place], part.transpose(1, 2))


def test_a_view_is_given_only_where_it_holds_the_same_numbers():
    memory = torch.arange(60.0)
    a, b, c = memory.view(3, 4, 5).unbind(0)
    for dim in range(3):
        view = side_by_side([a, b, c], dim)
        assert torch.equal(view, torch.stack([a, b, c], dim))
        assert view.data_ptr() == memory.data_ptr()
    assert torch.equal(side_by_side([a, c], 0), torch.stack([a, c]))
    assert side_by_side([b, b], 1) is None  # a hook may write to what comes of it
    assert side_by_side([c, b, a], 0) is None  # backwards
    assert side_by_side([a, b, b], 0) is None  # uneven
    assert side_by_side([a, b.clone()], 0) is None
    assert side_by_side([a, b[:3]], 0) is None
    assert side_by_side([a.mT, b.view(5, 4)], 0) is None
    assert side_by_side([a], 0) is None
    assert side_by_side([a.double(), b.double()], 0) is None
    assert side_by_side([torch._neg_view(a), torch._neg_view(b)], 0) is None


def test_room_is_never_shared():
    """Where tensors overlap, what is written to one must not be found in another."""
    x = torch.randn(2, 3, 8, 4)
    shared = [(x, x, x), (x[:, :, :6], x[:, :, 1:7], x[:, :, 2:]), (x[:, :, :1].expand_as(x),) * 2]
    for tensors in shared:
        room = room_like(tensors) or ()
        for place, part in enumerate(room):
            part.fill_(place)
        assert all((part == place).all() for place, part in enumerate(room))


class Attending(nn.Module):
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
    "places side by side": lambda h: h.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 4, 1).unbind(0),
    "one for all": lambda h: 3 * [h.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)[1]],
    "one number": lambda h: h.unflatten(-1, (3, 8, 1)).permute(2, 0, 3, 1, 4).unbind(0),
}


@pytest.mark.parametrize("take", HEADS.values(), ids=HEADS)
def test_attention_gives_gradients_in_any_order_of_memory(take):
    torch.manual_seed(0)
    assert_agrees(Attending(take), lambda model, x: model(x), torch.randn(5, 6, 8))


def test_a_piece_is_refused_to_whoever_modifies_it_in_place_as_torch_does():
    def take(hidden):
        a, b, c = hidden.chunk(3, 1)
        return a.mul_(2), b, c

    model, x = Apart(take), torch.randn(6, 5)
    with pytest.raises(RuntimeError, match="modified inplace"):
        model(x)
    with pytest.raises(RuntimeError, match="modified inplace"):
        clipped_gradients(model, lambda model, x: model(x), x, 1.0)


def test_without_gradients_pieces_are_torchs_own():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 1)

        def forward(self, x):
            first, rest = x.chunk(2, 1)
            assert first.grad_fn is None
            with torch.no_grad():
                rest, _ = (self.last(rest) * rest).split(2, 1)
                assert rest.grad_fn is None
            return self.last(first).squeeze(1) * rest.sum(1)

    torch.manual_seed(0)
    assert_agrees(Frozen(), lambda model, x: model(x), torch.randn(6, 8))


@pytest.mark.parametrize("transform", ["vjp", "vmap"])
def test_transforms_take_tensors_apart_in_their_own_way(transform):
    def product(row):
        first, second = row.chunk(2, -1)
        return (first * second).sin()

    def take(hidden):
        if transform == "vmap":
            return 3 * [torch.vmap(product)(hidden)]
        return 3 * [torch.func.vjp(product, hidden)[0]]

    torch.manual_seed(0)
    assert_agrees(Apart(take), lambda model, x: model(x), torch.randn(6, 5))


def test_pieces_of_different_lengths_go_back_as_torch_says():
    def take(hidden):
        rows = [row[: 4 + i % 3] for i, row in enumerate(hidden)]
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        sums = torch.stack([part.sin().sum() for part in nested.unbind()])
        return 3 * [sums.unsqueeze(1)]

    torch.manual_seed(0)
    model, x = Apart(take), torch.randn(6, 5)
    sums, _ = clipped_gradients(model, lambda model, x: model(x), x, 1e9)
    model(x).sum().backward()
    torch.testing.assert_close(sums["first.weight"], model.first.weight.grad)
