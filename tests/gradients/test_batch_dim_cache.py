"""The cache of batch dimensions: what one pass finds and the next one reuses."""

import pytest
import torch
from hazards.kit import B, D, Net
from oracle import assert_agrees
from torch import nn

from epsilons.gradients import UnsupportedLayer
from epsilons.gradients.norms import batch_norms


def losses(model, batch):
    return model(batch).square().sum(1)


def test_an_index_that_comes_with_the_data_is_not_cached():
    model = Net(lambda self, batch: self.layer(batch[0][batch[1]]), layer=nn.Linear(D, 3))
    x, in_order = torch.randn(B, D), torch.arange(B)
    batch_norms(model, losses, (x, in_order))
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(model, losses, (x, in_order.flip(0)))


def test_a_result_of_another_shape_is_not_taken_from_the_cache():
    model = Net(
        lambda self, x: self.layer(torch.unique_consecutive(x, dim=0)), layer=nn.Linear(D, 3)
    )
    distinct = torch.randn(B, D)
    batch_norms(model, losses, distinct)
    with pytest.raises(UnsupportedLayer, match="lost track of the examples"):
        batch_norms(model, losses, distinct[[0, 0, *range(2, B)]])


def test_the_same_shapes_with_another_batch_dimension_are_another_key():
    def forward(self, x):
        h = self.first(x)
        if self.turned:  # (positions, examples, …) of the same shape
            h = h.transpose(0, 1)
        h = torch.tanh(h.flip(2).roll(1, 2))
        return self.last(h).sum(0 if self.turned else 1)

    model = Net(forward, first=nn.Linear(D, D), last=nn.Linear(D, 3))
    x = torch.randn(B, B, D)
    for model.turned in (False, True, False):
        assert_agrees(model, losses, x)
