"""An example's ε depends on its own norms alone: not on its company, nor on who prices it."""

import os

import numpy as np
import pytest

from epsilons.accounting import epsilons_from_blocks, individual_epsilons, threads, tight
from epsilons.accounting.processes import in_processes

GIVEN = dict(
    sample_rate=[0.05, 0.05, 0.1, 0.1, 0.1], noise_std=1.5, max_grad_norm=1.0, delta=1e-5, levels=64
)
STEPS = np.array([10, 20, 10, 30, 30])


def some_norms(n=300):
    return np.random.default_rng(3).lognormal(-1, 1, (5, n))


@pytest.mark.parametrize("rounding", [None, "up"])
@pytest.mark.parametrize("method", ["rdp", "tight"])
def test_no_bit_depends_on_the_blocks_their_order_or_the_threads(monkeypatch, method, rounding):
    norms, how = some_norms(), dict(GIVEN, method=method, rounding=rounding)
    whole = individual_epsilons(norms, STEPS, **how).values
    assert len(np.unique(whole)) > 40
    for threads_of in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads_of)
        np.testing.assert_array_equal(individual_epsilons(norms, STEPS, **how).values, whole)
    for size in (1, 7, 100):
        first = 300 - size * 3 if size > 1 else 290
        blocks = [(norms[:, k : k + size], STEPS) for k in range(first, 300, size)]
        found = epsilons_from_blocks(blocks[::-1], **how).values
        again = np.concatenate(np.split(found, len(blocks))[::-1])
        np.testing.assert_array_equal(again, whole[first:])


def test_processes_price_the_same_bits():
    norms, done = some_norms(), []
    blocks = [(norms[:, k : k + 75], STEPS) for k in range(0, 300, 75)]
    shared = epsilons_from_blocks(blocks, **GIVEN, processes=2, progress=done.append)
    alone = epsilons_from_blocks(blocks, **GIVEN)
    np.testing.assert_array_equal(shared.values, alone.values)
    assert (shared.worst_case, shared.kind) == (alone.worst_case, alone.kind)
    assert done == [75, 150, 225, 300]


def test_blocks_are_asked_for_as_they_are_needed():
    """Else a journal would be in memory as a whole, waiting to be priced."""
    asked = []

    def blocks():
        for k in range(20):
            asked.append(k)
            yield -k

    results = in_processes(abs, blocks(), 2)
    for k, found in enumerate(results):
        assert found == k
        assert len(asked) <= k + 4


def test_no_process_at_all_is_refused():
    with pytest.raises(ValueError, match="processes"):
        epsilons_from_blocks([], **GIVEN, processes=0)


def test_threads_are_as_many_as_torchrun_allows(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    most = threads.available()
    for said, expected in (("1", 1), ("0", 1), ("", most), ("many", most), ("99999", most)):
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        assert threads.available() == expected
    assert most <= (os.cpu_count() or 1)


def test_products_are_those_of_blas_and_each_rows_own():
    random = np.random.default_rng(0)
    weights = random.uniform(0, 5, (70, 33)) * (random.random((70, 33)) < 0.4)
    table = random.normal(size=(33, 19))
    found = tight._product(weights, table)
    np.testing.assert_allclose(found, weights @ table, rtol=1e-13, atol=1e-13)
    for k in range(70):
        np.testing.assert_array_equal(tight._product(weights[k : k + 1], table)[0], found[k])


def test_few_steps_cost_no_more_nodes_than_many(monkeypatch):
    """Two rows of 10 steps took 800 µs per example and a hundred 75: nodes were doubled up to 368
    in five rounds, of which those after the second never lowered an ε."""
    solved = [0]
    whole = tight._in_parts

    def counted(*args):
        *_, sums, out = args
        solved[0] += out.shape[0] * sums[0].shape[1]
        return whole(*args)

    monkeypatch.setattr(tight, "_in_parts", counted)
    norms = np.random.default_rng(0).lognormal(-0.7, 0.9, (2, 200))
    constants = dict(sample_rate=4096 / 50_000, noise_std=3.32622, max_grad_norm=1.0, delta=1e-5)
    individual_epsilons(norms, [10, 10], **constants)
    # both directions; 1,000 nodes per example before
    assert solved[0] / 200 < 200
