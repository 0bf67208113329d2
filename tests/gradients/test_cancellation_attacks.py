"""Attacks within one example: its own terms are huge and cancel, so that its norm comes out low.

What bounds an example is its norm. It must be the norm of what is really added, and hold against
records made for it.
"""

import pytest
import torch
import torch.nn.functional as F
from sum_attacks import Net, alone, charged, moved, sloped
from torch import nn

HUGE = [1e2, 1e4, 1e6, 1e8]
BOUND = 1e-3  # far below all gradients


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cancelling(shape, size, seed, over):
    """Slopes of about `size` whose sum over some dimensions is about 1."""
    slopes = random(*shape, seed=seed) * size
    return slopes - slopes.mean(over, keepdim=True) + random(*shape, seed=seed + 1)


def equal(shape, seed, *, along):
    """An input that is the same at all positions `along`."""
    kept = [1 if d in along else size for d, size in enumerate(shape)]
    return random(*kept, seed=seed).expand(shape).contiguous()


class Standardised(nn.Conv2d):
    """A convolution by filters of mean 0 and variance 1, without a gain."""

    def forward(self, x):
        flat = self.weight.flatten(1)
        rows = F.layer_norm(flat, flat.shape[1:])
        return F.conv2d(x, rows.view(self.weight.shape), self.bias)


def _fallback():
    return Net(lambda m, x: torch.einsum("bti,io->bto", x, m.w), w=nn.Parameter(torch.ones(64, 48)))


def _lstm():
    return Net(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(32, 32, batch_first=True))


CASES = {  # layer, input, positions of the input, output, positions of the output
    "linear": (lambda: nn.Linear(64, 64), (4, 64), (0,), (4, 64), 0),
    "linear of 64 positions": (lambda: nn.Linear(6, 8), (64, 6), (0,), (64, 8), 0),
    "odd linear": (lambda: nn.Linear(63, 63), (9, 63), (0,), (9, 63), 0),
    "convolution": (lambda: nn.Conv2d(8, 32, 3), (8, 6, 6), (1, 2), (32, 4, 4), (1, 2)),
    "wide convolution": (lambda: nn.Conv2d(32, 32, 3), (32, 5, 5), (1, 2), (32, 3, 3), (1, 2)),
    "group norm": (lambda: nn.GroupNorm(2, 8), (8, 5, 5), (), (8, 5, 5), (1, 2)),
    "recurrent": (_lstm, (6, 32), (0,), (6, 32), 0),
    "fallback": (_fallback, (4, 64), (0,), (4, 48), 0),
}


@pytest.mark.parametrize("size", [8, 80])
@pytest.mark.parametrize("name", CASES)
def test_an_example_whose_positions_cancel_stays_within_its_bound(name, size):
    build, shape, positions, out, over = CASES[name]
    torch.manual_seed(0)
    model = build()
    for seed, huge in enumerate(HUGE):
        x, slope = equal(shape, seed, along=positions), cancelling(out, huge, seed, over)
        assert alone(model, sloped, (x[None], slope[None]), BOUND, size) <= charged(size)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_cancelling_examples_stays_within_the_bound_of_one(name):
    # With a record more in front all stand one row further down; their own rounding moves along.
    build, shape, positions, out, over = CASES[name]
    torch.manual_seed(0)
    model = build()
    x = torch.stack([equal(shape, seed, along=positions) for seed in range(95)])
    slope = torch.stack([cancelling(out, 1e6, seed, over) for seed in range(95)])
    extra = (torch.zeros_like(x[:1]), torch.zeros_like(slope[:1]))
    for size in (32, 96):
        assert moved(model, sloped, (x, slope), extra, BOUND, micro_batch=size) <= charged(95)


def test_an_embedding_whose_positions_cancel_stays_within_its_bound():
    # The norm was taken from a float32 sum and what is added from a float64 one: 2³⁰ + 60 − 2³⁰ had
    # norm 0 and added 60 C.
    ids = torch.zeros(1, 3, dtype=torch.long)
    slopes = torch.tensor([2.0**30, 60.0, -(2.0**30)]).view(1, 3, 1)
    assert alone(nn.Embedding(64, 1), sloped, (ids, slopes)) <= charged(8)


def test_a_tied_weight_whose_positions_cancel_stays_within_its_bound():
    # The product of look-up and map was summed over terms that cancel, and only the squares of both
    # told whether the norm did: 8 C. Positions that cancel in the map, to about what the look-up
    # adds, and the other way.
    def attack(seed):
        a = random(1, 32, seed=seed)
        logits = random(5, 1, seed=seed + 1) * 1e7 / a.norm()
        logits[-1] = -logits[:-1].sum()
        slopes = F.pad(logits, (0, 255))
        return a.expand(5, 32).contiguous(), a / a.norm(), slopes

    def tied(model, batch):
        ids, a, looked_up, slopes = batch
        mapped = (F.linear(a, model.weight) * slopes).sum((1, 2))
        return (model(ids) * looked_up).sum((1, 2)) + mapped

    ids = torch.zeros(1, 1, dtype=torch.long)
    for seed in range(60):
        batch = [ids, *(part[None] for part in attack(seed))]
        assert alone(nn.Embedding(256, 32), tied, batch, BOUND) <= charged(8)


def test_a_standardised_filter_whose_pixels_cancel_stays_within_its_bound():
    # ⟨ŵ, R⟩ was summed over pixels that cancel, with rounding as large as R: 8 C.
    for seed in range(20):
        torch.manual_seed(seed)
        model = Standardised(64, 64, 1, bias=False)
        x = equal((64, 2, 2), seed, along=(1, 2))
        slope = cancelling((64, 2, 2), 1e7, seed, (1, 2))
        slope[1:] = 0
        slope[0] -= slope[0].mean()
        assert alone(model, sloped, (x[None], slope[None]), BOUND, 32) <= charged(32)


@pytest.mark.parametrize("bias", [1e3, 1e5])
def test_a_standardised_filter_with_a_large_bias_stays_within_its_bound(bias):
    # ⟨w, R⟩ was taken from outputs less their bias, which had rounded them: 1.03 C with biases of
    # 10⁵.
    torch.manual_seed(0)
    model = Standardised(64, 64, 1)
    model.weight.data.normal_()
    model.bias.requires_grad_(False).fill_(bias)
    for seed in range(20):  # gradients that standardisation cancels, almost to the guard's share
        nearly = standard_rows(model)[0] + (0.11 + 0.01 * seed) * random(64, 1, 1, seed=seed)
        x = nearly * (0.7 + 0.1 * seed)
        assert alone(model, sloped, (x[None], only_first_filter(64)), BOUND, 32) <= charged(32)


@pytest.mark.parametrize(("mean", "width"), [(1e2, 64), (1e4, 256)])
def test_a_standardised_filter_with_a_large_mean_stays_within_its_bound(mean, width):
    # Such filters are standardised with rounding. Their rows have a mean, which the closed form
    # left out: 1.0002 C at a mean of 100 deviations, 1.03 C at 10,000.
    torch.manual_seed(0)
    model = Standardised(width, width, 1, bias=False)
    model.weight.data.normal_().add_(mean)
    for seed in range(40):
        x = (-1) ** seed + standard_rows(model)[0] + 0.15 * random(width, 1, 1, seed=seed)
        assert alone(model, sloped, (x[None], only_first_filter(width)), BOUND, 32) <= charged(32)


@pytest.mark.parametrize("apart", [0.205, 0.47])  # a hundredth is left, and a twentieth
def test_a_ghost_norm_rounded_to_one_side_stays_within_its_bound(apart):
    # Products of positions were all rounded to one side, by 1.5e-5 at 2048 numbers, and
    # cancellation down to a hundredth multiplied that: 1.001 C. Squares just below half of the
    # first one's last bit are lost, mixed products just above it are rounded up; and the norm is
    # what is left of their difference.
    width, loss = 2048, 0.99
    a, g = torch.zeros(2, 1, 2, width)
    a[:, 0], a[:, 1] = 2.0**-12 * loss, 2.0**-11.5 * loss
    a[0, :, 0] = torch.tensor([1.0, 2**0.5])
    g[0, :, 0] = torch.tensor([1.0, -(2**-0.5)])
    a[0, 1, -1] = apart
    model = nn.Linear(width, width, bias=False)
    assert alone(model, sloped, (a, g), BOUND, size=1) <= charged(1)


@pytest.mark.parametrize("positions", [1, 2])
def test_a_product_of_a_huge_and_a_tiny_factor_stays_within_its_bound(positions):
    # In float32 the squared norm of g = 1e-22 is 0, and so was its product with ‖a‖² = 3e38: 4 C.
    width = 64
    a = torch.full((1, positions, width), 1.7e19 / width**0.5)
    g = torch.full((1, positions, width), 1e-22 / width**0.5)
    a[:, 1:], g[:, 1:] = 0, 0
    if positions == 1:
        a, g = a[:, 0], g[:, 0]
    model = nn.Linear(width, width, bias=False)
    assert alone(model, sloped, (a, g), 4e-4, size=80) <= charged(80)


def standard_rows(model):
    """The filters with mean 0 and variance 1, of the shape of the weight, almost exactly."""
    flat = model.weight.detach().double().flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    rows = centred / centred.square().mean(1, keepdim=True).sqrt()
    return rows.float().view(model.weight.shape)


def only_first_filter(filters):
    slope = torch.zeros(1, filters, 1, 1)
    slope[0, 0] = 1
    return slope
