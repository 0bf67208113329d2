"""Compiled loops on torch's threads: every item once, whoever goes through them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from epsilons.training import threads as module
from epsilons.training.threads import go_through, share_out


@njit
def count_visits(first, last, step, visits):
    for i in range(first, last):
        visits[i] += step


@njit
def count_at_once(threads, count, step, visits):
    return go_through(count_visits, threads, count, (step, visits))


@njit
def fail_at_two(first, last, visits):
    if first <= 2 < last:
        raise ValueError


@njit
def fail_at_once(threads, count, visits):
    return go_through(fail_at_two, threads, count, (visits,))


@pytest.fixture(params=[True, False], ids=["team", "no team"])
def _team(request, monkeypatch):
    if request.param and not module.HAS_TEAM:
        pytest.skip("torch has no OpenMP that can be called here")
    monkeypatch.setattr(module, "HAS_TEAM", request.param)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_team")
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 100])
def test_every_item_is_gone_through_once(threads, count):
    torch.set_num_threads(threads)
    visits = np.zeros(count, np.int64)
    share_out(count, count_visits, count_at_once, 7, visits)
    assert (visits == 7).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(0, 40))
def test_a_team_of_another_size_leaves_nothing_out(shares, count):
    if not module.HAS_TEAM:
        pytest.skip("torch has no OpenMP that can be called here")
    visits = np.zeros(count, np.int64)
    assert not count_at_once(shares, count, 1, visits)
    assert (visits == 1).all()


@pytest.mark.usefixtures("_team")
def test_a_share_that_fails_is_said():
    torch.set_num_threads(2)
    with pytest.raises((MemoryError, ValueError)):
        share_out(4, fail_at_two, fail_at_once, np.zeros(4))
