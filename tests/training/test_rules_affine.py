"""Linear maps with their bias by a compiled loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_agrees
from torch import nn

from epsilons.training.rules import affine
from epsilons.training.rules.affine import MOST, fits, linear_map
from epsilons.training.rules.tiles import COLUMNS, HIGH, SIDE, WIDE

needs_wide_registers = pytest.mark.skipif(not WIDE, reason="the library is used on this processor")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(HIGH, 40 * HIGH), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**31)
)  # fmt: skip
def test_any_whole_sizes_agree_with_float64(rows, sides, panels, seed):
    draws = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, sides * SIDE, generator=draws)
    weight = torch.randn(panels * COLUMNS, sides * SIDE, generator=draws)
    bias = torch.randn(panels * COLUMNS, generator=draws)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (linear_map(x, weight, bias) - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_products_that_are_small_against_the_bias_are_not_lost(size):
    torch.manual_seed(0)
    x, weight = 0.1 * torch.randn(3 * HIGH, MOST), 0.1 * torch.randn(COLUMNS, MOST)
    bias = size * torch.randn(COLUMNS)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert ((linear_map(x, weight, bias) - exact).abs() <= 1e-7 * exact.abs() + 1e-6).all()


def test_the_longest_chain_of_equal_products_errs_by_less_than_a_norm_may():
    x, weight = torch.full((HIGH, MOST), 0.7), torch.full((COLUMNS, MOST), 0.3)
    exact = F.linear(x.double(), weight.double())
    assert ((linear_map(x, weight, torch.zeros(COLUMNS)) / exact - 1).abs() <= 1e-5).all()


def test_any_shape_and_order_in_memory():
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 2 * COLUMNS).t(), torch.randn(2, 2 * COLUMNS)[1]
    x = torch.randn(5, 24, 7).transpose(1, 2)
    found = linear_map(x, weight, bias)
    assert found.shape == (5, 7, 2 * COLUMNS)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_any_number_of_threads_gives_the_same_bits():
    """Rows left over belong to the last tile, whose rows may be another's too."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9 * HIGH + 5, 40), torch.randn(COLUMNS, 40), torch.randn(COLUMNS)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8, 12):
            torch.set_num_threads(count)
            found[count] = linear_map(x, weight, bias)
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[1], other) for other in found.values())


def test_what_is_not_finite_stays_with_its_row():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3 * HIGH + 1, 16), torch.randn(COLUMNS, 16), torch.randn(COLUMNS)
    clean = linear_map(x, weight, bias)
    x[7, 3] = torch.nan
    dirty = linear_map(x, weight, bias)
    others = [row for row in range(len(x)) if row != 7]
    assert dirty[7].isnan().all()
    assert torch.equal(dirty[others], clean[others])


@needs_wide_registers
def test_it_fits_where_it_is_right_and_faster():
    def operands(rows=2**10, d=64, p=COLUMNS, **options):
        tensors = torch.zeros(rows, d), torch.zeros(p, d), torch.zeros(p)
        return [t.to(**options) for t in tensors]

    assert fits(*operands())
    assert fits(operands()[0].view(2, -1, 64), *operands()[1:])
    for other in (
        {"rows": 2**10 - 1}, {"rows": 0}, {"d": 60}, {"d": 0}, {"p": COLUMNS + 8},
        {"d": 512, "p": 512}, {"d": 2048}, {"dtype": torch.float64}, {"dtype": torch.bfloat16},
    ):  # fmt: skip
        assert not fits(*operands(**other)), other
    x, weight, bias = operands()
    assert not fits(x[:, :8], weight, bias)
    assert not fits(x, weight, bias[:1])  # which torch would stretch
    assert not fits(torch._neg_view(x), weight, bias)


class Blocks(nn.Module):
    """Maps that the loop takes, one of whose outputs is modified in place."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, COLUMNS), nn.Linear(COLUMNS, COLUMNS)

    def forward(self, x):
        hidden = self.up(x)
        hidden.clamp_(min=-0.5)
        return self.down(hidden).square().mean((1, 2))


@needs_wide_registers
def test_gradients_are_those_of_an_example_at_a_time(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(affine, "_LEAST", HIGH)
    taken = []
    monkeypatch.setattr(
        affine, "linear_map", lambda *operands: taken.append(1) or linear_map(*operands)
    )
    assert_agrees(Blocks(), lambda model, x: model(x), torch.randn(6, 5, 16))
    assert len(taken) == 4  # norms alone, and with the clipped sum
