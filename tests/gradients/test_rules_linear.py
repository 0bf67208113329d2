"""Linear maps: ghost norms and materialized gradients, weight and bias."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.gradients.rules import linear
from epsilons.gradients.rules.linear import Bias, Linear


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 14),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_norms_of_any_sizes_agree_with_float64(positions, d, p, transposed, materialize, seed):
    draws = torch.Generator().manual_seed(seed)
    a = torch.randn(3, positions, d, generator=draws)
    g = torch.randn(3, positions, p, generator=draws)
    rule = Linear(a, transposed)
    expected = g.double().mT @ a.double()
    slack = 1e-6 * (g.abs().double().mT @ a.abs().double())  # what rounding is relative to
    gradients = rule.gradients(g).mT if transposed else rule.gradients(g)
    assert ((gradients - expected).abs() <= slack).all()
    norms = linear._materialized if materialize else linear._ghost
    for found in (norms(a, g), rule.square_norms(g)):
        torch.testing.assert_close(
            found.double(), expected.square().sum((1, 2)), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("norms", [linear._materialized, linear._ghost])
def test_what_is_not_finite_stays_with_its_example(norms, where, bad):
    torch.manual_seed(0)
    operands = [torch.randn(4, 6, 21), torch.randn(4, 6, 13)]
    clean = norms(*operands)
    operands[where][2, 3, 1] = bad
    dirty = norms(*operands)
    assert not dirty[2].isfinite()
    torch.testing.assert_close(dirty[[0, 1, 3]], clean[[0, 1, 3]])


def test_ghost_norms_that_cancel_are_materialized():
    """Two positions whose outer products differ by 1e-5 of their norm."""
    torch.manual_seed(0)
    a, g = torch.randn(3, 1, 8), torch.randn(3, 1, 7)
    a, g = torch.cat([a, a * (1 + 1e-5)], 1), torch.cat([g, -g], 1)
    exact = (g.double().mT @ a.double()).square().sum((1, 2))
    torch.testing.assert_close(linear._ghost(a, g).double(), exact, rtol=2e-2, atol=0)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize(("d", "p"), [(30, 600), (600, 30)])
def test_weighted_sums_agree_with_float64(positions, d, p):
    torch.manual_seed(0)
    a, g, factors = torch.randn(70, positions, d), torch.randn(70, positions, p), torch.rand(70)
    rule, bias = Linear(a), Bias(torch.Size([p]))
    exact = g.double() * factors.double()[:, None, None]
    found, total = rule.weighted_sum(g, factors), bias.weighted_sum(g, factors)
    assert torch.allclose(found.double(), (exact.mT @ a.double()).sum(0), atol=1e-4)
    assert torch.allclose(total.double(), exact.sum((0, 1)), atol=1e-4)


def test_rules_for_some_rows_are_those_of_the_rows():
    torch.manual_seed(0)
    a, g, factors = torch.randn(5, 4), torch.randn(5, 3), torch.rand(5)
    rule, bias = Linear(a), Bias(torch.Size([3]))
    some = slice(1, 3)
    torch.testing.assert_close(bias.rows(some).square_norms(g[some]), g[some].square().sum(1))
    torch.testing.assert_close(
        bias.rows(some).weighted_sum(g[some], factors[some]), factors[some] @ g[some]
    )
    torch.testing.assert_close(
        rule.rows(some).square_norms(g[some]).float(),
        a[some].square().sum(1) * g[some].square().sum(1),
    )
