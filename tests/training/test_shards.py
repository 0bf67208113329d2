"""Shards: every example in one of them, every shard in one process, and no owner in two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epsilons import Plan
from epsilons.training.shards import Shards, given_shards, shard_edges


@given(n=st.integers(1, 300), count=st.integers(1, 40), ranks=st.integers(1, 40))
def test_every_example_belongs_to_one_process_in_order(n, count, ranks):
    count = max(count, ranks)
    edges = shard_edges(n, count)
    shards = [Shards(edges, rank, ranks) for rank in range(ranks)]
    parts = [part for each in shards for part in each.parts()]
    assert [shard for shard, _, _ in parts] == list(range(count))
    assert [k for _, first, last in parts for k in range(first, last)] == list(range(n))
    assert max(np.diff(edges)) - min(np.diff(edges)) <= 1
    assert all(each.first == each.rank_edges[each.rank] for each in shards)
    some = np.flatnonzero(np.random.default_rng(n).random(n) < 0.3)
    among = [index for each in shards for _, part in each.among(some) for index in part]
    assert among == some.tolist()


@given(
    sizes=st.lists(st.integers(1, 4), min_size=30, max_size=60),
    count=st.integers(1, 4),
    names=st.randoms(use_true_random=False),
)
def test_edges_cut_no_owners_records_apart(sizes, count, names):
    people = [f"p{k}" for k in range(len(sizes))]
    names.shuffle(people)
    owners = np.repeat(people, sizes)
    edges = shard_edges(len(owners), count, owners)
    shard = np.searchsorted(edges, np.arange(len(owners)), side="right")
    assert all(len(set(shard[owners == person])) == 1 for person in people)
    assert (edges >= shard_edges(len(owners), count)).all()


def test_owners_spread_over_the_data_are_refused():
    with pytest.raises(ValueError, match="Sort the examples by owner"):
        shard_edges(100, 4, np.arange(100) % 10)


def test_budgets_are_refused_where_not_every_process_has_the_journal():
    constants = dict(n=100, batch_size=10, steps=5, max_grad_norm=1.0, delta=1e-5)
    plan = Plan.for_budgets((1.0, 4.0), **constants)
    assert given_shards(None, 1, plan) == 1
    assert given_shards(3, 1, plan) == 3
    with pytest.raises(ValueError, match="there are 2 processes; train in one"):
        given_shards(None, 2, plan)
