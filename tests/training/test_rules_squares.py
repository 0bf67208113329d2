"""Compiled sums along rows: any sizes, any number of threads."""

import itertools

import pytest
import torch

from epsilons.training.rules.registry import Formed
from epsilons.training.rules.squares import PIECE, row_squares, row_sums
from epsilons.training.standardisation import Standardised


@pytest.mark.parametrize("width", [0, 1, 7, 64, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_rows_of_any_length_agree_with_double_precision(width):
    torch.manual_seed(0)
    rows, like = torch.randn(6, width), torch.randn(3, width)
    squares, products, totals = row_sums(rows, like)
    exact, its = rows.double(), like.double().repeat(2, 1)
    torch.testing.assert_close(squares.double(), exact.square().sum(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(row_squares(rows), squares, rtol=1e-6, atol=0)
    for found, terms in ((products, exact * its), (totals, exact)):
        assert ((found - terms.sum(1)).abs() <= 1e-6 * terms.abs().sum(1)).all()


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    rows, like = torch.randn(10, 333), torch.randn(5, 333)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count] = row_sums(rows, like)
    finally:
        torch.set_num_threads(threads)
    for count in (2, 8):
        assert all(map(torch.equal, found[1], found[count]))


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))))
def test_a_standardised_filter_is_told_from_gradients_in_any_order_in_memory(order):
    torch.manual_seed(0)
    sizes = (2, 3, 4, 2, 5)
    r = torch.randn([sizes[d] for d in order]).permute([order.index(d) for d in range(5)])
    _check_by_filter(r)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_a_standardised_filter_is_told_from_gradients_that_repeat_in_memory(dim):
    torch.manual_seed(0)
    r = torch.randn(2, 3, 4, 2, 5)
    _check_by_filter(r.narrow(dim, 0, 1).expand_as(r))


def _check_by_filter(r):
    rows, ones = torch.randn(3, 40), torch.ones(3, 1)
    found = Standardised(rows, ones, ones, ones)._by_filter(Formed(), r, with_sums=True)
    flat = r.reshape(2, 3, 40)
    expected = flat.square().sum(2), (flat * rows).sum(2), flat.sum(2)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
