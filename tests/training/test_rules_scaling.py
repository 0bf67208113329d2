"""Rows scaled and summed by a compiled loop."""

import pytest
import torch

from epsilons.training.rules.scaling import scaled_rows
from epsilons.training.rules.squares import products_of_squares


@pytest.mark.parametrize(
    ("count", "each", "width"),
    [(1, 1, 1), (5, 1, 7), (64, 1, 33), (65, 1, 512), (130, 3, 9), (3, 200, 40)],
)
def test_rows_and_their_sum_agree_with_float64(count, each, width):
    torch.manual_seed(0)
    rows, factors = torch.randn(count * each, width), torch.rand(count)
    exact = rows.double() * factors.double().repeat_interleave(each).unsqueeze(1)
    scaled, total = scaled_rows(rows, factors)
    assert torch.allclose(scaled.double(), exact, rtol=1e-6)
    assert torch.allclose(total.double(), exact.sum(0), atol=1e-5 * float(exact.norm()))


def test_rows_in_any_order_in_memory_are_read_as_they_are():
    torch.manual_seed(0)
    rows, factors = torch.randn(9, 70).mT, torch.rand(140)[::2]
    scaled, total = scaled_rows(rows, factors)
    assert torch.equal(scaled, rows * factors.unsqueeze(1))
    assert torch.allclose(total, scaled.sum(0), atol=1e-5)


def test_no_rows_have_no_sum():
    scaled, total = scaled_rows(torch.empty(0, 4), torch.empty(0))
    assert scaled.shape == (0, 4)
    assert total.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("d", "p"), [(1, 1), (7, 40), (5000, 3)])
def test_products_of_squares_agree_with_float64(d, p):
    torch.manual_seed(0)
    a, g = torch.randn(11, d), torch.randn(11, p)
    products, lengths = products_of_squares(a, g)
    exact = a.double().square().sum(1), g.double().square().sum(1)
    assert torch.allclose(products.double(), exact[0] * exact[1], rtol=1e-6)
    assert torch.allclose(lengths.double(), exact[1], rtol=1e-6)
