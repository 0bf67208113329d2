"""Embeddings: gradients of positions with the same id are added before the norm is taken."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.gradients.rules.embedding import Embedding


def square_norms(ids, g, vocabulary=12):
    return Embedding(ids, vocabulary, None).square_norms(g)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
)
def test_any_ids_agree_with_materialized_gradients(positions, d, vocabulary, kind, seed):
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (3, positions), generator=draws, dtype=kind)
    g = torch.randn(3, positions, d, generator=draws)
    exact = torch.zeros(3, vocabulary, d, dtype=torch.float64)
    for i in range(3):
        exact[i].index_add_(0, ids[i].long(), g[i].double())
    torch.testing.assert_close(
        square_norms(ids, g, vocabulary).double(), exact.square().sum((1, 2)), rtol=1e-5, atol=1e-8
    )


def test_gradients_of_one_id_that_cancel_leave_what_is_left():
    g = torch.tensor([[[1e4], [1.0], [-1e4]]])
    assert square_norms(torch.zeros(1, 3, dtype=torch.int64), g).item() == 1.0


@pytest.mark.parametrize("positions", [128, 129, 20_000])
def test_many_equal_gradients_of_one_id_are_not_summed_too_coarsely(positions):
    g = torch.full((2, positions, 3), 0.5 + 5 / 47)
    found = square_norms(torch.zeros(2, positions, dtype=torch.int64), g)
    exact = 3 * (positions * g[0, 0, 0].double()) ** 2
    assert (found.double() / exact - 1).abs().max() <= 1e-5


def test_no_positions_and_no_examples_have_no_gradients():
    for examples, positions in ((2, 0), (0, 3), (0, 0)):
        ids = torch.zeros(examples, positions, dtype=torch.int64)
        found = square_norms(ids, torch.zeros(examples, positions, 4))
        assert torch.equal(found, torch.zeros(examples))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_with_its_example(bad):
    torch.manual_seed(0)
    ids, g = torch.randint(0, 5, (3, 6)), torch.randn(3, 6, 4)
    clean = square_norms(ids, g)
    g[1, 2, 3] = bad
    dirty = square_norms(ids, g)
    assert not dirty[1].isfinite()
    assert torch.equal(dirty[[0, 2]], clean[[0, 2]])
