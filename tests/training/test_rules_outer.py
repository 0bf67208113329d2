"""Compiled sums of outer products: any sizes, any number of threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.training.rules.linear import Bias, Linear
from epsilons.training.rules.outer import outer_sums


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(1, 40), st.integers(0, 2**31))
def test_any_sizes_agree_with_products_in_double_precision(places, d, p, seed):
    draws = torch.Generator().manual_seed(seed)
    a = torch.randn(3, places, d, generator=draws)
    g = torch.randn(3, places, p, generator=draws)
    formed, squares, totals = outer_sums(a, g)
    expected = g.double().mT @ a.double()
    slack = 1e-6 * (g.abs().double().mT @ a.abs().double())  # what rounding is relative to
    assert ((formed - expected).abs() <= slack).all()
    assert torch.allclose(squares.double(), formed.double().square().sum((1, 2)), rtol=1e-6)
    assert torch.allclose(totals.double(), g.double().sum(1), rtol=0, atol=1e-5)


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    a, g = torch.randn(5, 9, 33), torch.randn(5, 9, 7)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count] = outer_sums(a, g)
    finally:
        torch.set_num_threads(threads)
    for count in (2, 8):
        assert all(map(torch.equal, found[1], found[count]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_stays_so_and_stays_with_its_example(bad, where):
    torch.manual_seed(0)
    operands = [torch.randn(4, 6, 21), torch.randn(4, 6, 13)]
    clean = outer_sums(*operands)
    operands[where][2, 3, 1] = bad
    dirty = outer_sums(*operands)
    assert not dirty[1][2].isfinite()
    for before, after in zip(clean, dirty, strict=True):
        assert torch.equal(after[[0, 1, 3]], before[[0, 1, 3]])


def test_operands_apart_in_memory():
    torch.manual_seed(0)
    a, g = torch.randn(3, 8, 5).mT, torch.randn(5, 3, 7).transpose(0, 1)
    formed, _, _ = outer_sums(a, g)
    assert torch.allclose(formed, g.mT @ a, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_formed_gradients_are_those_of_the_rule(transposed):
    torch.manual_seed(0)
    term, g = Linear(torch.randn(3, 5, 8), transposed), torch.randn(3, 5, 7)
    formed, gradients = term.formed(g)
    assert torch.allclose(gradients, term.gradients(g), atol=1e-5)
    assert torch.allclose(formed.square_norms(gradients), term.square_norms(g), rtol=1e-5)
    part = formed.rows(torch.tensor([2, 0])).square_norms(gradients[[2, 0]])
    assert torch.allclose(part, term.square_norms(g)[[2, 0]], rtol=1e-5)


def test_the_bias_of_a_formed_map_has_its_gradients_from_it():
    torch.manual_seed(0)
    bias, g = Bias(torch.Size([7])), torch.randn(3, 5, 7)
    Linear(torch.randn(3, 5, 8), bias=bias).formed(g)
    assert bias.sums is not None
    assert torch.allclose(bias.gradients(g), g.sum(1), atol=1e-5)
    assert torch.allclose(bias.rows(slice(1, 3)).gradients(g[1:3]), g[1:3].sum(1), atol=1e-5)


def test_some_rows_forget_what_is_known_of_all():
    torch.manual_seed(0)
    a, g, factors = torch.randn(5, 4), torch.randn(5, 3), torch.rand(5)
    bias = Bias(torch.Size([3]))
    linear = Linear(a, bias=bias)
    linear.square_norms(g)
    linear.weighted_sum(g, factors)
    some = slice(1, 3)
    torch.testing.assert_close(bias.weighted_sum(g, factors), factors @ g)
    torch.testing.assert_close(
        bias.rows(some).weighted_sum(g[some], factors[some]), factors[some] @ g[some]
    )
    torch.testing.assert_close(
        linear.rows(some).square_norms(g[some]),
        a[some].square().sum(1) * g[some].square().sum(1),
    )
