"""Random networks made of the layers that have rules: depth, widths, reuse and ties at random."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_agrees
from torch import nn
from torch.nn import functional as F

WIDTHS = st.sampled_from([2, 4, 6])


class Tied(nn.Module):
    """x + tanh(x Wᵀ) W with a weight used twice, once transposed."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x):
        return x + F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


class Attention(nn.Module):
    def __init__(self, width, batch_first):
        super().__init__()
        self.inner = nn.MultiheadAttention(width, 2, batch_first=batch_first)

    def forward(self, x):
        if self.inner.batch_first:
            return x + self.inner(x, x, x)[0]
        x = x.transpose(0, 1)
        return (x + self.inner(x, x, x)[0]).transpose(0, 1)


class Recurrent(nn.Module):
    def __init__(self, kind, width):
        super().__init__()
        self.inner = kind(width, width, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Along(nn.Module):
    """A convolution along the sequence, with its channels last."""

    def __init__(self, width, kernel, dilation, groups):
        super().__init__()
        padding = "same" if kernel % 2 else dilation * (kernel - 1) // 2
        options = {"padding": padding, "dilation": dilation, "groups": groups}
        self.inner = nn.Conv1d(width, width, kernel, **options)

    def forward(self, x):
        return self.inner(x.mT).mT


class Folded(nn.Module):
    """Another layer, on the batch flattened into one dimension, time first or examples first."""

    def __init__(self, inner, time_first):
        super().__init__()
        self.inner, self.time_first = inner, time_first

    def forward(self, x):
        if self.time_first:
            flat = self.inner(x.transpose(0, 1).reshape(-1, x.shape[2]))
            return flat.view(x.shape[1], x.shape[0], -1).transpose(0, 1)
        return self.inner(x.reshape(-1, x.shape[2])).view(*x.shape[:2], -1)


class Shifted(nn.Module):
    """Raw parameters: a scale per channel and one vector per position, broadcast."""

    def __init__(self, width, length):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.positions = nn.Parameter(torch.randn(length, width))

    def forward(self, x):
        return x * self.scale + self.positions[: x.shape[1]]


@st.composite
def layers(draw, width, length):
    """One layer that maps (B, length, width) to the same shape."""
    kind = draw(st.integers(0, 11))
    groups = draw(st.sampled_from([1, 2]))
    flag = draw(st.booleans())
    return [
        lambda: nn.Linear(width, width, bias=flag),
        lambda: nn.Sequential(nn.Linear(width, 3), nn.ReLU(inplace=flag), nn.Linear(3, width)),
        lambda: nn.LayerNorm(width, bias=flag),
        lambda: nn.RMSNorm(width),
        lambda: Folded(nn.GroupNorm(groups, width), flag),
        lambda: Folded(nn.Linear(width, width), flag),
        lambda: Tied(width),
        lambda: Attention(width, flag),
        lambda: Recurrent(draw(st.sampled_from([nn.LSTM, nn.GRU, nn.RNN])), width),
        lambda: Along(width, draw(st.sampled_from([1, 3])), draw(st.integers(1, 2)), groups),
        lambda: Shifted(width, length),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(width, width)),
    ][kind]()


class Generated(nn.Module):
    """Layers in an order in which some come several times, and a head that may be the embedding."""

    def __init__(self, vocabulary, width, chosen, order, tie, frozen):
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=0)
        self.layers = nn.ModuleList(chosen)
        self.order = order
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tie:
            self.head.weight = self.words.weight
        for number in frozen:
            self.layers[number % len(chosen)].requires_grad_(False)

    def forward(self, ids):
        x = self.words(ids)
        for number in self.order:
            x = torch.tanh(self.layers[number % len(self.layers)](x))
        return self.head(x)


@st.composite
def cases(draw):
    torch.manual_seed(draw(st.integers(0, 2**16)))
    width, length, count = draw(WIDTHS), draw(st.integers(2, 6)), draw(st.integers(1, 6))
    chosen = [draw(layers(width, length)) for _ in range(draw(st.integers(1, 3)))]
    order = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    frozen = draw(st.lists(st.integers(0, 5), max_size=1))
    model = Generated(7, width, chosen, order, draw(st.booleans()), frozen)
    ids = torch.randint(0, 7, (count, length))
    ids[:, 0] = ids[:, 0].clamp(min=1)  # an example of padding only has no gradient to compare
    return model.double(), ids


def next_word(model, ids):
    logits = model(ids)
    losses = F.cross_entropy(logits.flatten(0, 1), ids.roll(1, 1).flatten(), reduction="none")
    return losses.view(ids.shape).mean(1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_random_networks_agree_with_the_loop(case):
    model, ids = case
    assert_agrees(model, next_word, ids)
