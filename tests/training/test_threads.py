"""Compiled loops on torch's threads: every item once, whoever goes through them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch.testing._internal.two_tensor import TwoTensor

from epsilons.training import threads as module
from epsilons.training.rules.pairs import pair_sums
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


@pytest.mark.usefixtures("_team")
def test_threads_find_the_same_bits_as_one():
    torch.manual_seed(0)
    a, g = torch.randn(7, 9, 33), torch.randn(7, 9, 7)
    found = {}
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found[threads] = torch.stack(pair_sums(a, g, 0.01))
    assert torch.equal(found[1], found[2])
    assert torch.equal(found[1], found[3])


@njit(nogil=True)
def add_rows(first, last, rows, totals):
    for i in range(first, last):
        totals[i] = rows[i].sum()


@njit(nogil=True)
def add_at_once(threads, count, *operands):
    return go_through(add_rows, threads, count, operands)


@pytest.mark.usefixtures("_team")
@pytest.mark.parametrize(
    "rows",
    [
        torch.arange(12.0).view(4, 3),
        torch.arange(12.0).view(4, 3).requires_grad_(),
        torch.arange(12.0).view(3, 4).mT,
        torch.arange(3.0).expand(4, 3),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.complex(torch.ones(4, 3), torch.ones(4, 3)).conj().imag,
        torch.nn.Parameter(torch.ones(4, 3)),
        torch.empty(4, 0),
    ],
    ids=["plain", "with a gradient", "transposed", "one row", "apart", "negated", "own", "none"],
)
def test_tensors_come_to_a_loop_as_they_seem(rows):
    totals = torch.empty(4)
    share_out(4, add_rows, add_at_once, rows, totals)
    assert torch.equal(totals, rows.detach().sum(1))


@pytest.mark.usefixtures("_team")
@pytest.mark.parametrize(
    "rows",
    [
        torch.ones(4, 3).double(),
        TwoTensor(torch.ones(4, 3), torch.ones(4, 3)),
        torch._efficientzerotensor((4, 3)),
    ],
)
def test_tensors_whose_numbers_are_elsewhere_or_other_ones_are_refused(rows):
    with pytest.raises(TypeError):
        share_out(4, add_rows, add_at_once, rows, torch.empty(4))
