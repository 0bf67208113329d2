"""Norms of a refresh, in blocks and in 16 bits: nothing is lost, lowered or half written."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epsilons import Epsilons, Journal, Margin, Plan
from epsilons.accounting import clipping_thresholds, tight_epsilon
from epsilons.accounting.histories import level_norms
from epsilons.journal import opening, refreshes
from epsilons.journal.chain import Chain

EXACT = Margin(relative=0.0, parameters=None)
N = 7


def plan_of(**changes):
    constants = dict(
        n=N, sample_rate=0.1, steps=50, noise_multiplier=1.5, max_grad_norm=2.0, delta=1e-5,
        refresh_every=10,
    )  # fmt: skip
    return Plan(**{**constants, **changes})


def some_norms(n=N, rows=5):
    norms = np.random.default_rng(1).uniform(0, 3, size=(rows, n))
    norms[0, 1], norms[1, 2], norms[2, 3] = np.nan, np.inf, 0.0
    return norms


def filled(path, plan, norms, *, anchor=None, margin=EXACT):
    journal = Journal.create(path, plan, margin=margin, anchor=anchor)
    for step, row in zip(plan.refresh_steps, norms, strict=False):
        journal.record(step, row)
        journal.charge(step, step + 9)
    return journal


@pytest.fixture
def blocks_of(monkeypatch):
    """Sets of how many examples a new journal's entries have norms."""
    return lambda size: monkeypatch.setattr(opening, "BLOCK", size)


@pytest.mark.parametrize("storage", ["float64", "uint16"])
@pytest.mark.parametrize("clipping", ["max", "individual"])
def test_blocks_change_no_epsilon(tmp_path, blocks_of, storage, clipping):
    plan, norms = plan_of(norm_storage=storage, clipping=clipping), some_norms()
    found = []
    for size in (1, 2, 3, 7, 65_536):
        blocks_of(size)
        filled(tmp_path / f"{size}", plan, norms).close()
        with Journal.open(tmp_path / f"{size}") as journal:
            entries = 1 + 5 + 5 * -(-N // size)
            assert journal.verify().entries == entries
            found.append(
                (
                    journal.epsilons().values,
                    journal.epsilons().cautious,
                    journal.epsilons(method="rdp").values,
                    journal.epsilons(only=[1, 4, 5]).values,
                    journal.norms(20),
                    journal.bounds(25, [6, 0, 3]),
                    *(block for block, _ in journal.histories(chunk=4)),
                )
            )
    for other in found[1:]:
        for mine, theirs in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_an_earlier_versions_journal_is_read_and_continued(tmp_path, blocks_of, monkeypatch):
    """In format 2 a refresh was one entry, whatever its size."""
    plan, norms = plan_of(), some_norms()
    new = filled(tmp_path / "new", plan, norms).epsilons().values

    def earlier(*args, **kwargs):
        facts = written(*args, **kwargs)
        del facts["block"], facts["plan"]["norm_storage"]
        return facts | {"format": 2}

    written = opening.opening_facts
    monkeypatch.setattr("epsilons.journal.journal.opening_facts", earlier)
    filled(tmp_path / "old", plan, norms[:3]).close()
    blocks_of(2)
    with Journal.open(tmp_path / "old", writable=True) as journal:
        assert opening.read_opening(journal._chain).format == 2
        for step, row in zip((30, 40), norms[3:], strict=True):
            journal.record(step, row)
            journal.charge(step, step + 9)
        assert journal.verify().entries == 11
        np.testing.assert_array_equal(journal.epsilons().values, new)


def test_a_later_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FORMAT", opening.FORMAT + 1)
    filled(tmp_path / "j", plan_of(), some_norms()).close()
    monkeypatch.undo()
    with pytest.raises(ValueError, match="its format is 4, and this version"):
        Journal.open(tmp_path / "j")


@pytest.mark.parametrize("after", range(4))
def test_a_refresh_that_is_interrupted_is_not_there(tmp_path, blocks_of, monkeypatch, after):
    blocks_of(2)
    norms = some_norms()
    journal = filled(tmp_path / "j", plan_of(), norms[:2], anchor=tmp_path / "a")
    untouched, left = journal._chain.insert, [after]

    def insert(*entry):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        untouched(*entry)

    monkeypatch.setattr(journal._chain, "insert", insert)
    with pytest.raises(KeyboardInterrupt):
        journal.record(20, norms[2])
    monkeypatch.undo()
    assert journal.refreshes == (0, 10)
    with pytest.raises(ValueError, match="a refresh at step 20"):
        journal.charge(20, 29)
    blocks_of(2)
    whole = filled(tmp_path / "whole", plan_of(), norms)
    for step, row in zip((20, 30, 40), norms[2:], strict=True):
        journal.record(step, row)
        journal.charge(step, step + 9)
    assert journal.verify().entries == whole.verify().entries
    np.testing.assert_array_equal(journal.epsilons().values, whole.epsilons().values)


KILLED = """
import os, signal, sys
import numpy as np
from epsilons import Journal
from epsilons.journal.chain import Chain
journal = Journal.open(sys.argv[1], writable=True)
insert, left = Chain.insert, int(sys.argv[2])
def killed(self, *entry):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    insert(self, *entry)
Chain.insert = killed
journal.record(20, np.full(200_000, 0.5))
"""


def test_a_process_killed_between_two_blocks_leaves_no_refresh(tmp_path):
    """Blocks of 512 KB, so that SQLite has written some of them to its log by then."""
    n = 200_000
    path = tmp_path / "j"
    filled(path, plan_of(n=n), np.full((2, n), 0.1)).close()
    ended = subprocess.run([sys.executable, "-c", KILLED, path, "3"], check=False)
    assert ended.returncode == -signal.SIGKILL
    with Journal.open(path, writable=True) as journal:
        assert journal.refreshes == (0, 10)
        assert journal.check()[0] == 1 + 2 * (1 + 4)
        journal.record(20, np.full(n, 0.5))
        journal.charge(20, 29)
        np.testing.assert_array_equal(journal.norms(20), 0.5)
        kept = journal.epsilons(method="rdp", only=[0, n - 1]).values
    small = filled(tmp_path / "small", plan_of(), np.array([[0.1] * N, [0.1] * N, [0.5] * N]))
    np.testing.assert_array_equal(kept, small.epsilons(method="rdp").values[:2])


def test_every_block_changed_moved_or_taken_away_is_found(tmp_path, blocks_of):
    blocks_of(2)
    filled(tmp_path / "j", plan_of(), some_norms(), anchor=tmp_path / "a").close()

    def verified(*changes):
        shutil.copy(tmp_path / "j", tmp_path / "bad")
        with sqlite3.connect(tmp_path / "bad") as connection:
            for sql in changes:
                assert connection.execute(sql).rowcount
        connection.close()
        with Journal.open(tmp_path / "bad", anchor=tmp_path / "a") as journal:
            return journal.verify()

    with sqlite3.connect(tmp_path / "j") as connection:
        numbers = [
            number
            for (number,) in connection.execute(
                "SELECT number FROM entry WHERE kind IN ('refresh', 'norms')"
            )
        ]
    connection.close()
    assert len(numbers) == 5 * 4
    assert verified("UPDATE entry SET kind = kind").entries == 26
    for number in numbers:
        where = f"WHERE number = {number}"
        with pytest.raises(ValueError, match=rf"entry {number} of .* was changed"):
            verified(f"UPDATE entry SET norms = zeroblob(length(norms)) {where}")
        with pytest.raises(ValueError, match=r"is missing|is not the journal"):
            verified(f"DELETE FROM entry {where}")
    swap = "UPDATE entry SET number = CASE number WHEN 2 THEN -3 ELSE -2 END WHERE number IN (2, 3)"
    with pytest.raises(ValueError, match=r"entry 2 of .* was changed"):
        verified(swap, "UPDATE entry SET number = -number WHERE number < 0")


def test_a_refresh_without_its_last_block_is_not_priced(tmp_path, blocks_of):
    blocks_of(2)
    filled(tmp_path / "j", plan_of(), some_norms()).close()
    for damage in ("DELETE FROM entry WHERE number = 4",
                   "UPDATE entry SET norms = x'00' WHERE number = 4"):  # fmt: skip
        shutil.copy(tmp_path / "j", tmp_path / "bad")
        with sqlite3.connect(tmp_path / "bad") as connection:
            connection.execute(damage)
        connection.close()
        with (
            Journal.open(tmp_path / "bad") as journal,
            pytest.raises(ValueError, match="lacks norms of the refresh at entry 1"),
        ):
            journal.epsilons()


def test_every_norm_is_read_once_from_entries_of_bounded_size(tmp_path, blocks_of, monkeypatch):
    """An entry was as large as the data set, and SQLite walks an entry from its start to any byte
    that is asked for: the cost grew with the square of n."""
    blocks_of(64)
    calls = []
    whole = Chain.part_of_norms

    def counted(self, number, first, size):
        calls.append((number, first, size))
        return whole(self, number, first, size)

    monkeypatch.setattr(Chain, "part_of_norms", counted)
    for n in (500, 1000, 2000):
        plan, calls[:] = plan_of(n=n), []
        with filled(tmp_path / f"{n}", plan, some_norms(n)) as journal:
            for _ in journal.histories(chunk=100):
                pass
            lengths = journal._chain._connection.execute("SELECT length(norms) FROM entry")
            assert max(lengths) == (8 * 64,)
        assert sum(size for _, _, size in calls) == 8 * n * 5
        assert len(calls) <= 5 * (n / 64 + n / 100 + 1)
        assert all(first + size <= 8 * 64 for _, first, size in calls)


def test_memory_does_not_grow_with_the_examples(tmp_path):
    peaks = []
    for n in (50_000, 200_000):
        plan = plan_of(n=n, levels=16, norm_storage="uint16")
        filled(tmp_path / f"{n}", plan, np.full((5, n), 0.5)).close()
        with Journal.open(tmp_path / f"{n}") as journal:
            journal.epsilons(method="rdp", only=[0])
            tracemalloc.start()
            journal.epsilons(method="rdp")
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    # results and positions take 8 bytes each per example, and a few copies of them
    assert peaks[1] - peaks[0] < 150_000 * 8 * 8


# -- 16 bits --------------------------------------------------------------------------------------

BOUNDS = st.floats(1e-3, 1e3) | st.just(1.0)


@given(
    BOUNDS,
    st.integers(1, 400) | st.sampled_from([256, 2**15]),
    st.lists(st.floats(0, 1e300) | st.floats(0, 3) | st.just(np.nan) | st.just(np.inf), min_size=1),
)
def test_16_bits_never_lower_a_norm(bound, levels, norms):
    plan = plan_of(norm_storage="uint16", levels=levels, max_grad_norm=bound)
    norms = np.array(norms) * bound
    kept = refreshes.stored_norms(plan, norms)
    assert not (kept < norms).any()
    np.testing.assert_array_equal(np.isnan(kept), np.isnan(norms))
    below = norms <= bound
    assert (kept[below] <= bound).all()
    assert (kept[below] <= norms[below] + bound / 2**14).all()
    above = (norms > bound) & (norms < 2**31 * bound)
    assert (kept[above] <= norms[above] * 2 ** (1.001 / 1024)).all()
    again = refreshes.stored_norms(plan, kept)
    np.testing.assert_array_equal(again, kept)


@given(BOUNDS, st.integers(1, 300) | st.just(2**15), st.lists(st.floats(0, 1.2), min_size=1))
def test_16_bits_change_no_threshold_of_individual_clipping(bound, levels, shares):
    plan = plan_of(norm_storage="uint16", levels=levels, max_grad_norm=bound)
    grid = level_norms(bound, levels)
    norms = np.concatenate(
        [np.array(shares) * bound, grid, np.nextafter(grid, np.inf), np.nextafter(grid, 0)]
    )
    expected = clipping_thresholds(norms, bound, levels)
    found = clipping_thresholds(refreshes.stored_norms(plan, norms), bound, levels)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rounded", [dict(clipping="individual"), dict(rounding="up")])
def test_16_bits_change_no_epsilon_of_norms_on_levels(tmp_path, rounded):
    found = []
    for storage in ("float64", "uint16"):
        plan = plan_of(norm_storage=storage, **rounded)
        with filled(tmp_path / storage, plan, some_norms(), margin=Margin()) as journal:
            found.append((journal.epsilons().values, journal.bounds(15, np.arange(N))))
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_what_a_step_is_clipped_to_is_what_is_charged(tmp_path):
    """Also where a later phase has another bound, whose levels are not among the 16-bit norms."""
    plan = plan_of(
        norm_storage="uint16", clipping="individual", levels=10,
        phases=((20, {"max_grad_norm": 0.77}),),
    )  # fmt: skip
    with filled(tmp_path / "j", plan, some_norms()) as journal:
        constants = journal.constants()
        ((norms, _),) = journal.histories()
        for row, step in enumerate((5, 15, 25, 35, 45)):
            bound = constants.bound[row]
            charged = clipping_thresholds(norms[row], bound, plan.levels)
            np.testing.assert_array_equal(journal.bounds(step, np.arange(N)), charged)


@given(st.data())
def test_16_bits_never_lower_an_epsilon(tmp_path_factory, data):
    norms = np.array(
        data.draw(st.lists(st.lists(st.floats(0, 3), min_size=4, max_size=4), min_size=5,
                           max_size=5))
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("j")
    found = []
    for storage in ("float64", "uint16"):
        plan = plan_of(n=4, norm_storage=storage)
        with filled(folder / storage, plan, norms) as journal:
            found.append([journal.epsilons(method=m, hold="previous") for m in ("rdp", "tight")])
    (rdp, _), (rdp16, tight16) = found
    assert (rdp16.values >= rdp.values * (1 - 1e-12)).all()
    assert (rdp16.values <= rdp.values * 1.01 + 1e-3).all()
    for k in range(4):
        clipped = np.minimum(norms[:, k], 2.0)
        noise = np.divide(3.0, clipped, out=np.full(5, np.inf), where=clipped > 0)
        exact = tight_epsilon(noise, 0.1, [10] * 5, 1e-5)
        assert tight16.values[k] >= exact * (1 - 1e-5)


def test_too_many_levels_for_16_bits_are_refused():
    with pytest.raises(ValueError, match="at most 32768 with norm_storage='uint16'"):
        plan_of(norm_storage="uint16", levels=2**15 + 1)
    with pytest.raises(ValueError, match="'float64' or 'uint16'"):
        plan_of(norm_storage="float16")


def test_how_norms_are_stored_is_a_constant_of_the_opening(tmp_path):
    with filled(tmp_path / "j", plan_of(norm_storage="uint16"), some_norms()) as journal:
        facts = next(journal._chain.entries("open")).facts
        assert (facts["format"], facts["block"]) == (3, 65_536)
        assert json.loads(json.dumps(facts["plan"]))["norm_storage"] == "uint16"
        assert len(journal._chain.norms(1)) == 2 * N
        assert os.stat(journal.path).st_mode & 0o777 == 0o600
        # recorded again after it was rounded: the same facts
        journal.record(40, some_norms()[4])
        assert journal.refreshes == (0, 10, 20, 30, 40)


# -- shared among processes -----------------------------------------------------------------------


def test_parts_priced_apart_are_the_whole_to_the_last_bit(tmp_path):
    n = 60
    with filled(tmp_path / "j", plan_of(n=n), some_norms(n)) as journal:
        whole, done = journal.epsilons(), []
        parts = [journal.epsilons(only=part) for part in np.array_split(np.arange(n), 4)]
        shared = journal.epsilons(processes=2, progress=done.append)
    for found in (Epsilons.joined(parts), shared):
        np.testing.assert_array_equal(found.values, whole.values)
        np.testing.assert_array_equal(found.cautious, whole.cautious)
        assert (found.worst_case, found.kind) == (whole.worst_case, whole.kind)
    assert done == [n // 2, n]


def test_parts_of_different_runs_are_not_joined(tmp_path):
    with filled(tmp_path / "j", plan_of(), some_norms()) as journal:
        rdp, tight = journal.epsilons(method="rdp"), journal.epsilons()
        with pytest.raises(ValueError, match="2 parts with 2 different"):
            Epsilons.joined([rdp, tight])
        with pytest.raises(ValueError, match="0 parts"):
            Epsilons.joined([])
        with pytest.raises(ValueError, match="processes"):
            journal.epsilons(processes=0)
