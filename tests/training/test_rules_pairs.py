"""Compiled sums over pairs of places: any sizes, any number of threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.training.rules.pairs import pair_sums

SHARE = 0.3


def slowly(a, g):
    """Both sums and their parts with t = u from whole Gram matrices, in float64."""
    ours, theirs = (t.double() @ t.double().mT for t in (a, g))
    grams = ours * theirs, theirs
    return [gram.sum((1, 2)) for gram in grams], [
        gram.diagonal(dim1=1, dim2=2).sum(1) for gram in grams
    ]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 14), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**31))
def test_any_sizes_agree_with_whole_matrices(places, d, p, seed):
    draws = torch.Generator().manual_seed(seed)
    a = torch.randn(3, places, d, generator=draws)
    g = torch.randn(3, places, p, generator=draws)
    *sums, cancelled = pair_sums(a, g, SHARE)
    slack = [1e-6 * size for size in slowly(a.abs(), g.abs())[0]]  # what rounding is relative to
    certainly, perhaps = torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    for found, expected, part, off in zip(sums, *slowly(a, g), slack, strict=True):
        assert ((found - expected).abs() <= off).all()
        certainly |= expected + off < SHARE * part
        perhaps |= expected - off < SHARE * part
    assert (cancelled | ~certainly).all()
    assert (perhaps | ~cancelled).all()


def test_any_number_of_threads_gives_the_same_bits():
    torch.manual_seed(0)
    a, g = torch.randn(5, 9, 33), torch.randn(5, 9, 7)
    threads, found = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            found[count] = torch.stack(pair_sums(a, g, SHARE))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[1], found[2])
    assert torch.equal(found[1], found[8])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_stays_so_and_stays_with_its_example(bad, where):
    torch.manual_seed(0)
    operands = [torch.randn(4, 6, 5), torch.randn(4, 6, 3)]
    clean = torch.stack(pair_sums(*operands, SHARE))
    operands[where][2, 3, 1] = bad
    dirty = torch.stack(pair_sums(*operands, SHARE))
    assert not dirty[0, 2].isfinite()
    assert torch.equal(dirty[:, [0, 1, 3]], clean[:, [0, 1, 3]])
