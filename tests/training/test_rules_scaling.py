"""Rows scaled and summed by a compiled loop."""

import pytest
import torch

from epsilons.training.products import HAS_PRODUCT
from epsilons.training.rules import linear, scaling
from epsilons.training.rules.scaling import scaled_rows, weighed_products, weighs
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


@pytest.mark.usefixtures("_threads")
@pytest.mark.skipif(not HAS_PRODUCT, reason="torch has no library that loops can call")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("count", "each", "p", "d"),
    [(1, 1, 1, 1), (5, 1, 7, 3), (64, 1, 33, 65), (130, 3, 9, 20), (513, 1, 400, 130)],
)
def test_weighed_products_agree_with_float64(threads, count, each, p, d):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    g, a, factors = torch.randn(count * each, p), torch.randn(count * each, d), torch.rand(count)
    exact = g.double() * factors.double().repeat_interleave(each).unsqueeze(1)
    products, sums = weighed_products(g, factors, a)
    expected = exact.mT @ a.double()
    assert torch.allclose(products.double(), expected, atol=1e-6 * float(expected.norm()))
    assert torch.allclose(sums.double(), exact.sum(0), atol=1e-6 * float(exact.norm()))


@pytest.mark.usefixtures("_threads")
def test_few_columns_many_rows_or_no_library_leave_products_to_torch(
    monkeypatch,
):
    torch.set_num_threads(2)
    narrow, wide, a = torch.ones(4, 255), torch.ones(4, 256), torch.ones(4, 8)
    assert weighs(wide, a) == (HAS_PRODUCT and scaling.HAS_TEAM)
    for refused in (narrow, wide[:0], wide.double(), wide.repeat(1025, 1)):
        assert not weighs(refused, a[:1].repeat(len(refused), 1))
    monkeypatch.setattr(scaling, "HAS_PRODUCT", False)
    assert not weighs(wide, a)


@pytest.mark.parametrize("with_bias", [True, False])
def test_both_ways_to_the_sum_of_a_wide_linear_map_agree(monkeypatch, with_bias):
    torch.manual_seed(0)
    x, g, factors = torch.randn(70, 30), torch.randn(70, 600), torch.rand(70)
    weight, bias = torch.randn(600, 30), torch.randn(600) if with_bias else None
    found = []
    for _ in range(2):
        terms = [term for _, term in linear.linear(x, weight, bias)]
        for term in terms:
            term.square_norms(g)
        found.append([term.weighted_sum(g, factors) for term in terms])
        monkeypatch.setattr(linear, "weighs", lambda g, a: False)
    for one, two in zip(*found, strict=True):
        assert torch.allclose(one, two, atol=1e-5)
