"""Batches that are made to move a clipped sum by more than one example's bound.

An attack is a model, a batch and one example more; what it does is the distance of two clipped
sums, in units of the bound.
"""

import torch
import torch.nn.functional as F
from hazards.kit import Net
from torch import nn

from epsilons.accounting.sums import pass_size, sum_remainder
from epsilons.gradients import clipped_gradients
from epsilons.gradients.norms import batch_norms
from epsilons.models.wide_resnet import StandardisedConv2d

SLACK = 1 + 1e-9
LONG = (1024, 4096, 16384)


def distance_moved(sums, others):
    """‖sums − others‖ over all parameters together, in float64."""
    apart = [(sums[name].double() - others[name].double()).square().sum() for name in sums]
    return torch.stack(apart).sum().sqrt().item()


def moved(model, loss_fn, batch, extra, bound=1.0, *, first=True, **options):
    """How far the clipped sum moves when `extra` joins the batch, in units of its bound.

    `bound` may hold one for each example of the batch; the extra one then has the largest.
    """
    joined = [torch.cat([e, b] if first else [b, e]) for b, e in zip(batch, extra, strict=True)]
    own = float(torch.as_tensor(bound, dtype=torch.float64).max())
    bounds = joined_bounds = bound
    if isinstance(bound, torch.Tensor):
        one = bound.new_full((1,), own)
        joined_bounds = torch.cat([one, bound] if first else [bound, one])
    without, _ = clipped_gradients(model, loss_fn, batch, bounds, **options)
    with_it, _ = clipped_gradients(model, loss_fn, joined, joined_bounds, **options)
    return distance_moved(with_it, without) / own


def charged(count, bound=1.0):
    """The most that one example may move the float64 sum of `count` examples, and one more."""
    return bound * SLACK + sum_remainder(count + 1, bound)


def alone(model, loss_fn, example, bound=1.0, size=8):
    """What one example by itself moves an empty sum by, in units of its bound."""
    sums, _ = clipped_gradients(model, loss_fn, example, bound, micro_batch=size)
    return distance_moved(sums, {name: torch.zeros_like(s) for name, s in sums.items()}) / bound


def sloped(model, batch):
    """A loss that is linear in the outputs, with slopes that are the example's own data."""
    x, slope = batch
    out = model(x)
    return (out * slope.to(out.dtype)).flatten(1).sum(1)


def one_hot(*shape):
    """Zeros, and a 1 in the first place."""
    tensor = torch.zeros(shape)
    tensor.view(-1)[0] = 1
    return tensor


def _bias():
    return Net(lambda m, x: x + m.b, b=nn.Parameter(torch.zeros(4))), torch.zeros(4), one_hot(4)


def _linear():
    return nn.Linear(4, 3, bias=False), one_hot(4), one_hot(3)


def _linear_of_64_positions():
    return nn.Linear(4, 3, bias=False), one_hot(4).expand(64, 4), one_hot(3).expand(64, 3)


def _convolution():
    return nn.Conv2d(1, 2, 3, bias=False), one_hot(1, 5, 5), one_hot(2, 3, 3)


def _embedding():
    return nn.Embedding(6, 4), torch.zeros(2, dtype=torch.long), one_hot(2, 4)


def _group_norm():
    model = nn.GroupNorm(2, 4)
    return model, torch.tensor([1.0, -1.0, 2.0, 0.0]).view(4, 1).expand(4, 3), one_hot(4, 3)


def _standardised_convolution():
    return StandardisedConv2d(2, 2, 3), torch.linspace(-1, 1, 32).view(2, 4, 4), one_hot(2, 2, 2)


def _tied():
    def forward(m, ids):
        return F.linear(m.table(ids), m.table.weight)

    return Net(forward, table=nn.Embedding(5, 4)), torch.tensor([1, 3]), one_hot(2, 5)


def _recurrent():
    model = Net(lambda m, x: m.lstm(x)[0], lstm=nn.LSTM(2, 3, batch_first=True))
    return model, torch.linspace(-1, 1, 8).view(4, 2), torch.ones(4, 3)


def _fallback():
    def forward(m, x):
        return torch.einsum("bti,tio->bto", x, m.w)

    return Net(forward, w=nn.Parameter(torch.ones(2, 3, 4))), one_hot(2, 3), one_hot(2, 4)


def _bfloat16():
    return nn.Linear(4, 3).to(torch.bfloat16), one_hot(4).to(torch.bfloat16), one_hot(3)


KINDS = {
    "bias": _bias,
    "linear": _linear,
    "linear of 64 positions": _linear_of_64_positions,
    "convolution": _convolution,
    "embedding": _embedding,
    "group norm": _group_norm,
    "standardised convolution": _standardised_convolution,
    "tied": _tied,
    "recurrent": _recurrent,
    "fallback": _fallback,
    "bfloat16": _bfloat16,
}


def rounding_values(count, digits=23):
    """Gradients that make all roundings of a sum go one way, or the other with one 1 in front.

    Half of them bring the total to 2ᵉ − 1. The others are a little more than half of its last bit
    beyond 2ᵉ: from there each is rounded up to a whole one, below to a half. With one more in front
    the total is beyond 2ᵉ from the beginning (after Casacuberta et al. 2022).
    """
    half = count // 2
    last_bit = 2.0 * half / 2 ** (digits + 1)
    values = torch.full((count,), 0.5078125 * last_bit)  # few digits: exact in bfloat16
    values[: half - 1] = 1
    return values


def rounding_attack(kind, count, digits=23):
    """A model of that kind, a batch of so many examples, and one more that turns the roundings.

    Every example is the same but for the length of its gradient, which is at most 1.
    """
    torch.manual_seed(0)
    model, x, slope = KINDS[kind]()
    unit = batch_norms(model, sloped, (x[None], slope[None])).item()
    values = rounding_values(count, digits) / unit

    def batch(values):
        slopes = slope * values.view(-1, *[1] * slope.dim())
        return x.expand(len(values), *x.shape), slopes

    return model, batch(values), batch(values[:1])


def pass_of(count):
    """The examples that one pass takes where so many are expected."""
    return pass_size(count, cap=2 * count + 64)


class Kinked(nn.Module):
    """ReLUs behind a layer: beyond its threshold a unit passes a gradient to the threshold."""

    def __init__(self, layer, thresholds):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.thresholds = nn.Parameter(thresholds)

    def forward(self, x):
        return F.relu(self.layer(x).flatten(1) - self.thresholds)


def values_by_row(layer, record, size):
    """What the layer makes of a record in each row of a batch of `size`: (size, width)."""
    with torch.no_grad():
        return layer(record.expand(size, *record.shape).contiguous()).flatten(1)


def kinked_by_shape(layer, record, count):
    """An attack on passes of `count` and of `count` + 1 examples; None if they have the same bits.

    The threshold of a unit lies between its value in the smaller batch and that in the larger: an
    example more, of zeros, switches it on for the others.
    """
    small = values_by_row(layer, record, count)
    return _kinked(layer, record, small, values_by_row(layer, record, count + 1)[1:])


def kinked_by_row(layer, record, count, size):
    """An attack on passes of `size` rows: records stand where the next row has other bits.

    Elsewhere, and in front when one is added, are records without a gradient. None if all rows
    have the same bits.
    """
    rows = values_by_row(layer, record, size)[torch.arange(count + 1) % size]
    return _kinked(layer, record, rows[:-1], rows[1:])


def _kinked(layer, record, before, after):
    """A unit's threshold at its lowest value, and records where they step over it."""
    lows = torch.minimum(before.amin(0), after.amin(0))
    switched_on = (before == lows) & (after > lows)
    if not switched_on.any():
        return None
    unit = int(switched_on.sum(0).argmax())
    model = Kinked(layer, lows)
    slopes = torch.zeros_like(before)
    slopes[:, unit] = switched_on[:, unit]
    batch = (record.expand(len(slopes), *record.shape).contiguous(), slopes)
    extra = (torch.zeros_like(record)[None], torch.zeros_like(slopes[:1]))
    return model, batch, extra
