"""Compiled sums along rows: any sizes, any number of threads."""

import pytest
import torch

from epsilons.training.rules.squares import PIECE, row_squares, row_sums


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
