"""Attacks by the layout of a batch in memory, by masks that a pass shares, and by long chains."""

import pytest
import torch
import torch.nn.functional as F
from small import cross_entropy
from sum_attacks import Net, alone, charged, distance_moved, sloped
from torch import nn

from epsilons.gradients import clipped_gradients
from epsilons.gradients.batch_invariance import batch_invariant


def test_a_batch_that_fills_its_pass_has_the_layout_of_all_others():
    # Taken as it lay in memory, it had other means by row than with one example less: 13 C.
    torch.manual_seed(0)
    count = 64
    strided = torch.randn(784, count).t()
    means = strided.mean(1), strided.contiguous().mean(1)
    thresholds = torch.minimum(*means)
    model = Net(
        lambda m, x: torch.relu(x[0].mean(1) - x[1]).unsqueeze(1) * 1e9 * m.w,
        w=nn.Parameter(torch.ones(4)),
    )

    def loss_fn(model, batch):
        return model(batch).sum(1)

    whole, _ = clipped_gradients(model, loss_fn, (strided, thresholds), 1.0, micro_batch=count)
    less = (strided[:-1], thresholds[:-1])
    without, _ = clipped_gradients(model, loss_fn, less, 1.0, micro_batch=count)
    assert distance_moved(whole, without) <= charged(count)


@pytest.mark.parametrize("mask", ["of a weight", "of all examples"])
def test_a_mask_that_a_pass_shares_is_not_taken_for_dropout_by_example(mask):
    # One example more pushes others into another pass, and under another mask: 2 C.
    def forward(m, x):
        if mask == "of a weight":
            return F.linear(x, F.dropout(m.w, training=True))
        return F.linear(x, m.w) * F.dropout(torch.ones(()), training=True)

    torch.manual_seed(0)
    model = Net(forward, w=nn.Parameter(torch.randn(4, 8)))
    batch = torch.randn(64, 8), torch.arange(64) % 4
    assert not batch_invariant(model, cross_entropy, batch, 16)


@pytest.mark.parametrize("positions", [128, 256, 2048])
def test_a_long_chain_rounded_to_one_side_stays_within_its_bound(positions):
    # The norm was that of exact sums, while each addition to what is added was rounded up.
    a, g = torch.zeros(1, positions, 256), torch.zeros(1, positions, 256)
    total = torch.tensor(0.0)
    candidates = 1 - torch.arange(256) * 2.0**-24
    for t in range(positions):
        sign = 1.0 if t < (positions + 4) // 2 else -1.0
        sums = total + sign * candidates
        best = int((sums.double() - (total.double() + sign * candidates.double())).argmax())
        a[0, t, 0], g[0, t, 0], total = sign, candidates[best], sums[best]
    assert alone(nn.Linear(256, 256, bias=False), sloped, (a, g), size=1) <= charged(1)
