"""Any change to a journal is found, live or sealed."""

import os
import shutil
import sqlite3
import subprocess
import sys

import numpy as np
import pytest

from epsilons import Journal, Plan
from epsilons.journal import chain

PLAN = Plan(
    n=3, sample_rate=0.5, steps=6, noise_multiplier=1.0, max_grad_norm=1.0, delta=1e-5,
    refresh_every=3,
)  # fmt: skip


def written(folder, salt=None):
    """A small journal with every kind of entry."""
    journal = Journal.create(folder / "j", PLAN, anchor=folder / "anchor.json", salt=salt)
    journal.record(0, [0.1, 0.2, np.nan])
    journal.charge(0, 2)
    journal.record_some("sampled", 0, [np.array([1]), np.array([0, 2])], [[0.3], [0.4, 0.5]])
    journal.record_some("followed", 0, [np.array([1])], [[0.3]])
    journal.restart(1)
    journal.charge(1, 2)
    journal.record(3, [0.1, 0.2, 0.3])
    journal.charge(3, 5)
    return journal


def reopened(folder, **how):
    return Journal.open(folder / "j", anchor=folder / "anchor.json", **how)


def found(folder):
    """Whether opening or verifying the journal raises ValueError."""
    try:
        with reopened(folder) as journal:
            journal.verify()
    except ValueError:
        return True
    return False


@pytest.fixture
def live(tmp_path):
    (tmp_path / "good").mkdir()
    written(tmp_path / "good").close()
    return tmp_path / "good"


@pytest.fixture
def altered(live, tmp_path):
    """Copies the journal, runs SQL on the copy, and gives its folder."""

    def alter(sql, *values):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(live, tmp_path / "bad")
        with sqlite3.connect(tmp_path / "bad" / "j") as connection:
            changed = connection.execute(sql, values).rowcount
        connection.close()
        assert changed
        return tmp_path / "bad"

    return alter


def test_an_untouched_journal_verifies_and_is_priced_anew(live):
    with reopened(live) as journal:
        verified = journal.verify()
    assert verified[:3] == (9, 6, False)
    assert len(verified.epsilons) == 3


def test_every_field_changed_is_found(altered):
    for number in range(9):
        assert found(altered("UPDATE entry SET number = number + 100 WHERE number = ?", number))
        for text in ("kind", "facts"):
            for change in (f"{text} || ' '", f"substr({text}, 2)", f"CAST({text} AS BLOB)"):
                sql = f"UPDATE entry SET {text} = {change} WHERE number = ?"
                assert found(altered(sql, number)), sql
        for blob in ("indices", "norms", "digest"):
            sql = f"UPDATE entry SET {blob} = CAST({blob} || x'00' AS BLOB) WHERE number = ?"
            assert found(altered(sql, number)), sql


def test_every_number_in_the_facts_changed_is_found(altered, live):
    with sqlite3.connect(live / "j") as connection:
        rows = connection.execute("SELECT number, facts FROM entry").fetchall()
    connection.close()
    for number, facts in rows:
        for place, character in enumerate(facts):
            if character.isdigit():
                other = facts[:place] + str((int(character) + 1) % 10) + facts[place + 1 :]
                assert found(altered("UPDATE entry SET facts = ? WHERE number = ?", other, number))


def test_every_entry_deleted_is_found(altered):
    for number in range(9):
        assert found(altered("DELETE FROM entry WHERE number = ?", number))
        assert found(altered("DELETE FROM entry WHERE number >= ?", number))


def test_an_entry_inserted_is_found(altered):
    copy = "SELECT kind, facts, indices, norms, digest FROM entry WHERE number = 2"
    assert found(altered(f"INSERT INTO entry SELECT 9, * FROM ({copy})"))


def test_entries_reordered_are_found(altered):
    swap = "UPDATE entry SET number = CASE number WHEN 2 THEN -3 ELSE -2 END WHERE number IN (2, 3)"
    folder = altered(swap)
    with sqlite3.connect(folder / "j") as connection:
        connection.execute("UPDATE entry SET number = -number WHERE number < 0")
    connection.close()
    assert found(folder)


def test_a_chain_rewritten_from_the_start_is_found_by_its_anchor(live):
    with sqlite3.connect(live / "j") as connection:
        salt = connection.execute("SELECT json_extract(facts, '$.salt') FROM entry").fetchone()[0]
    connection.close()
    (live / "j").unlink()
    forged = Journal.create(live / "j", PLAN, salt=bytes.fromhex(salt))
    forged.record(0, [0.0, 0.0, 0.0])
    for first in range(3):
        forged.charge(first)
    forged.close()
    assert found(live)


def test_another_anchor_is_found(live, tmp_path):
    (tmp_path / "other").mkdir()
    written(tmp_path / "other").close()
    shutil.copy(tmp_path / "other" / "anchor.json", live / "anchor.json")
    assert found(live)
    (live / "anchor.json").write_text("{}")
    assert found(live)


def test_entries_that_a_crash_left_unanchored_are_no_fault(live):
    before = (live / "anchor.json").read_text()
    with reopened(live, writable=True) as journal:
        journal.restart(6)
    (live / "anchor.json").write_text(before)
    assert not found(live)


def test_a_charge_without_anchor_is_on_disk_and_anchored_by_the_seal(tmp_path):
    anchor = tmp_path / "anchor.json"
    with Journal.create(tmp_path / "j", PLAN, anchor=anchor) as journal:
        before = anchor.read_bytes()
        journal.charge(0, anchored=False)
        assert anchor.read_bytes() == before
        with reopened(tmp_path) as other:
            assert other.verify().steps == 1
        journal.seal()
        assert journal.verify()[:3] == (2, 1, True)


def test_head_reveals_nothing_about_the_data(tmp_path):
    heads = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        written(tmp_path / name).close()
        heads.add((tmp_path / name / "anchor.json").read_text())
    assert len(heads) == 2


def test_sealed_journal_is_one_file_that_takes_no_more(tmp_path):
    journal = written(tmp_path)
    journal.seal()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["anchor.json", "j"]
    assert journal.verify().sealed
    for journal_again in (journal, reopened(tmp_path, writable=True)):
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            journal_again.restart(0)
    assert not found(tmp_path)


def test_a_reader_is_not_in_the_way_of_sealing(tmp_path):
    journal = written(tmp_path)
    with reopened(tmp_path) as reader:
        before = reader.epsilons().values
        journal.seal()
        np.testing.assert_array_equal(reader.epsilons().values, before)
    assert not found(tmp_path)


def test_an_anchor_published_after_a_reader_opened_is_no_fault(tmp_path):
    with written(tmp_path) as journal, reopened(tmp_path) as reader:
        journal.restart(3)
        assert reader.verify()[:3] == (9, 6, False)
        with reopened(tmp_path) as later:
            assert later.verify()[:3] == (10, 3, False)


def test_sealed_while_a_reader_opens_it_the_sealed_file_is_read(tmp_path, monkeypatch):
    journal = written(tmp_path)
    (tmp_path / "old").mkdir()
    for suffix in ("-wal", "-shm"):
        shutil.copy(tmp_path / f"j{suffix}", tmp_path / "old")
    journal.restart(3)
    look = chain._at_this_moment

    def sealed_meanwhile(path):
        connection = look(path)
        monkeypatch.undo()
        journal.seal()
        return connection

    monkeypatch.setattr(chain, "_at_this_moment", sealed_meanwhile)
    with reopened(tmp_path) as reader:
        assert reader.verify().sealed
    # a crash between the two steps of sealing leaves the WAL of the old file beside the new one
    for file in (tmp_path / "old").iterdir():
        shutil.copy(file, tmp_path)
    assert not found(tmp_path)


def test_a_crash_before_the_first_anchor_is_no_fault_and_a_lost_anchor_is(live, tmp_path):
    with Journal.create(tmp_path / "j", PLAN, anchor=tmp_path / "anchor.json") as journal:
        (tmp_path / "anchor.json").unlink()
        assert not found(tmp_path)
        journal.charge(0)
        assert not found(tmp_path)
        (tmp_path / "anchor.json").unlink()
        assert found(tmp_path)


def test_a_file_that_is_gone_is_not_made_anew(live):
    (live / "j").unlink()
    with pytest.raises(ValueError, match="is gone"):
        Journal.create(live / "j", PLAN, anchor=live / "anchor.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_journal_in_a_folder_that_cannot_be_written_is_read(live):
    live.chmod(0o500)
    try:
        assert not found(live)
    finally:
        live.chmod(0o700)


def test_every_byte_of_a_sealed_journal_flipped_is_found(tmp_path):
    journal = written(tmp_path)
    journal.seal()
    journal.close()
    file = tmp_path / "j"
    whole = file.read_bytes()
    for place in range(len(whole)):
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(bytes([whole[place] ^ 1]))
        assert found(tmp_path), place
        with file.open("r+b") as stream:
            stream.seek(place)
            stream.write(whole[place : place + 1])
    assert not found(tmp_path)


def test_charges_reach_the_disk_after_a_signal_left_a_transaction_open(live):
    """A Ctrl-C came while SQLite began one: what followed joined it, and was never committed."""
    journal = reopened(live, writable=True)
    journal.restart(3)
    journal._chain._connection.execute("BEGIN IMMEDIATE")
    journal.charge(3, 4)
    with reopened(live) as other:
        assert other.steps_charged == journal.steps_charged == 5
    journal.charge(5)
    journal.seal()
    assert reopened(live).verify().sealed


def test_of_two_that_append_at_once_both_entries_stay(live, monkeypatch):
    one, other = reopened(live, writable=True), reopened(live, writable=True)
    insert = chain._insert

    def overtaken(connection, *entry):
        monkeypatch.setattr(chain, "_insert", insert)
        before = one._chain.last("charge").number
        other.record_random("loss", 6)
        assert one._chain.last("charge").number == before
        raise sqlite3.IntegrityError("UNIQUE constraint failed: entry.number")

    monkeypatch.setattr(chain, "_insert", overtaken)
    one.record_random("data", 6)
    with reopened(live) as journal:
        assert set(journal.random) == {"loss", "data"}
        journal.verify()


_LOCKED = """
import fcntl, os, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 510, 0x40000002, os.SEEK_SET)
    except OSError:
        print("locked")
"""


def test_reading_ones_own_journal_leaves_its_locks(live):
    """Without SQLite's lock another process may take the journal for closed, and its WAL away."""

    def locked():
        command = [sys.executable, "-c", _LOCKED, str(live / "j")]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    writer = reopened(live, writable=True)
    writer.restart(3)
    assert locked() == "locked\n"
    with reopened(live) as reader:
        assert reader.steps_charged == 3
    assert locked() == "locked\n"
    writer.charge(3)
