"""Compiled sums over places with the same id."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.training.rules.lookups import looked_up_squares


def slowly(ids, g):
    """Squared norms of what a table receives, formed in double precision."""
    formed = torch.zeros(len(ids), 1 + int(ids.max()), g.shape[2], dtype=torch.float64)
    for i, (its, rows) in enumerate(zip(ids, g.double(), strict=True)):
        for v, row in zip(its, rows, strict=True):
            formed[i, v] += row
    return formed.square().sum((1, 2))


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
)
def test_any_ids_agree_with_gradients_that_are_formed(places, d, vocabulary, kind, seed):
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (3, places), generator=draws, dtype=kind)
    g = torch.randn(3, places, d, generator=draws)
    torch.testing.assert_close(
        looked_up_squares(ids, g).double(), slowly(ids.long(), g), rtol=1e-6, atol=0
    )


def test_gradients_of_one_id_that_cancel_leave_what_is_left():
    g = torch.tensor([[[1e4], [1.0], [-1e4]]])
    assert looked_up_squares(torch.zeros(1, 3, dtype=torch.int64), g).item() == 1.0


def test_no_places_and_no_examples_have_no_gradients():
    for examples, places in ((2, 0), (0, 3), (0, 0)):
        ids = torch.zeros(examples, places, dtype=torch.int64)
        found = looked_up_squares(ids, torch.zeros(examples, places, 4))
        assert torch.equal(found, torch.zeros(examples))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_so_and_stays_with_its_example(bad):
    torch.manual_seed(0)
    ids, g = torch.randint(0, 5, (3, 6)), torch.randn(3, 6, 4)
    clean = looked_up_squares(ids, g)
    g[1, 2, 3] = bad
    dirty = looked_up_squares(ids, g)
    assert not dirty[1].isfinite()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
