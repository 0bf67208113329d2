"""Groups of records as single examples: norms, sums, and what one group can move a sum by."""

import copy

import pytest
import torch
from hazards.kit import Net
from oracle import distance
from sum_attacks import KINDS, charged, distance_moved, rounding_attack, sloped
from torch import nn
from torch.nn import functional as F

from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.gradients.batch_invariance import batch_invariant
from epsilons.gradients.groups import group_loss, grouped
from epsilons.training import supervised

GROUPS, MOST = 6, 4
PRESENT = torch.arange(MOST) < torch.tensor([1, 4, 2, 3, 1, 4])[:, None]
LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


def _sequence_model(middle, last=lambda hidden: hidden.mean(1)):
    return Net(
        lambda m, ids: m.head(last(m.middle(m.table(ids)))),
        table=nn.Embedding(20, 16), middle=middle, head=nn.Linear(16, 3),
    )  # fmt: skip


def _tied():
    def forward(m, ids):
        return F.linear(m.table(ids).mean(1), m.table.weight)[:, :3]

    return Net(forward, table=nn.Embedding(20, 8))


def _recurrent():
    return _sequence_model(nn.LSTM(16, 16, batch_first=True), lambda hidden: hidden[0][:, -1])


VECTORS = (torch.randn, (8,))
PICTURES = (torch.randn, (3, 8, 8))
WORDS = (lambda *shape: torch.randint(20, shape), (5,))
MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), VECTORS),
    "convolution and norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(),
            nn.LayerNorm(512), nn.Linear(512, 3),
        ),
        PICTURES,
    ),
    "attention": (
        lambda: _sequence_model(
            nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        ),
        WORDS,
    ),
    "recurrent": (_recurrent, WORDS),
    "tied": (_tied, WORDS),
    "float64 parameters": (lambda: nn.Linear(8, 3).double(), VECTORS),
}  # fmt: skip


def records(shape):
    """All records of all groups in turn, and their labels."""
    make, each = shape
    count = int(PRESENT.sum())
    return make(count, *each), torch.randint(3, (count,))


def summed_by_group(model, batch):
    """The gradient of each group by parameter: one record at a time, by autograd, in float64."""
    model = copy.deepcopy(model).double()
    x, y = batch
    x = x.double() if x.is_floating_point() else x
    totals = {name: torch.zeros(GROUPS, *p.shape).double() for name, p in model.named_parameters()}
    group = PRESENT.nonzero()[:, 0]
    for k in range(len(y)):
        model.zero_grad()
        LOSS(model, (x[k : k + 1], y[k : k + 1])).sum().backward()
        for name, p in model.named_parameters():
            totals[name][group[k]] += p.grad
    return totals


@pytest.mark.parametrize("kind", MODELS)
def test_a_group_has_the_gradient_of_the_sum_of_its_losses(kind):
    torch.manual_seed(1)
    make, shape = MODELS[kind]
    model, batch = make(), records(shape)
    if kind == "float64 parameters":
        batch = batch[0].double(), batch[1]
    gradients = summed_by_group(model, batch)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients.values()).sqrt()
    data = grouped(batch, PRESENT)
    found = torch.from_numpy(gradient_norms(model, group_loss(LOSS), data, batch_size=4))
    torch.testing.assert_close(found, norms, rtol=1e-5, atol=0)
    bound = float(norms.median())
    sums, _ = clipped_gradients(model, group_loss(LOSS), data, bound, micro_batch=4)
    factors = (bound / (norms * (1 + 1e-4))).clamp(max=1)
    expected = {name: torch.tensordot(factors, g, dims=1) for name, g in gradients.items()}
    assert distance(sums, expected) <= 1e-5


def test_empty_places_are_filled_with_the_groups_own_first_record():
    x = torch.arange(15.0).unsqueeze(1)
    (filled,), present = grouped((x,), PRESENT)
    assert present is PRESENT
    assert torch.equal(filled[PRESENT].flatten(), x.flatten())
    first = filled[:, :1].expand(GROUPS, MOST, 1)
    assert torch.equal(filled[~PRESENT], first[~PRESENT])


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_moves_the_sum_of_groups_by_no_more_than_the_bound(kind):
    """The attack's gradient is split over the records of a group, one of which cancels a part."""
    model, batch, extra = rounding_attack(kind, 1024)
    shares = torch.tensor([2.0, -1.5, 0.5])  # exact also in bfloat16

    def split(part):
        x, slope = (torch.repeat_interleave(t, 3, 0) for t in part)
        each = shares.repeat(len(part[1])).view(-1, *[1] * (slope.dim() - 1))
        return (x, slope * each), torch.ones(len(part[1]), 3, dtype=torch.bool)

    (x, slope), present = split(batch)
    (more_x, more_slope), more_present = split(extra)
    options = dict(bounds=1.0, micro_batch=1088)
    loss = group_loss(sloped)
    without, _ = clipped_gradients(model, loss, grouped((x, slope), present), **options)
    joined = torch.cat([more_x, x]), torch.cat([more_slope, slope])
    both = grouped(joined, torch.cat([more_present, present]))
    with_it, norms = clipped_gradients(model, loss, both, **options)
    assert norms[0] > 0.5
    assert distance_moved(with_it, without) <= charged(1024)


class UlpByRow(nn.Module):
    """Computes something in a way that depends on the row, and does not use it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x):
        torch.mul(x, torch.where(torch.arange(len(x))[:, None] < 9, 1.0, 1.0 + 2**-22))
        return self.layer(x)


def test_activations_of_the_records_are_compared_between_positions():
    torch.manual_seed(2)
    data = grouped(records(VECTORS), PRESENT)
    assert batch_invariant(nn.Linear(8, 3), group_loss(LOSS), data, 8, probes=2)
    assert not batch_invariant(UlpByRow(), group_loss(LOSS), data, 8, probes=2)


def test_dropout_on_the_records_can_be_left_out_of_the_comparison():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    data = grouped(records(VECTORS), PRESENT)
    assert batch_invariant(model, group_loss(LOSS), data, 8, probes=2)


def test_a_loss_for_all_records_together_is_refused():
    data = grouped(records(VECTORS), PRESENT)
    mean = supervised(nn.CrossEntropyLoss())
    with pytest.raises(ValueError, match="one loss per example"):
        gradient_norms(nn.Linear(8, 3), group_loss(mean), data, batch_size=4)
