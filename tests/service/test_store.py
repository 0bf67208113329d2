"""The store: all or nothing, one run each, and one answer for all tokens that don't hold."""

import os
import signal
import stat
import time

import pytest
from folders import make_run

from epsilons.service import Store
from epsilons.service.store import TokenRow

NOW = 1_800_000_000
DAY = 86400


def row(name, owner="person-1", expires=NOW + DAY):
    return TokenRow(name.encode().ljust(32, b"."), owner, NOW, expires)


def test_a_valid_token_finds_the_statement_of_its_owner_alone(store):
    mine, other = row("mine"), row("other", owner="person-2")
    store.change_tokens(NOW, added=[mine, other])
    digest, body = store.statement(mine.digest, NOW)
    assert digest == mine.digest
    assert '"owner": "person-1"' in body
    assert "person-2" not in body


def test_unknown_revoked_and_expired_tokens_find_nothing(store):
    revoked, expired = row("revoked", owner="household"), row("expired", expires=NOW)
    store.change_tokens(NOW, added=[revoked, expired])
    assert store.statement(revoked.digest, NOW) is not None
    assert store.change_tokens(NOW, revoked=["household"]) == 1
    assert store.statement(revoked.digest, NOW) is None
    assert store.statement(expired.digest, NOW) is None
    assert store.statement(expired.digest, NOW - 1) is not None
    assert store.statement(row("unknown").digest, NOW) is None
    assert "household" not in store.holders(NOW)


def test_statements_are_replaced_all_at_once_or_not_at_all(store):
    before = store.owners(), store.basis(), store.public()

    def broken():
        yield "someone else", "{}"
        raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        store.replace_statements("another", "{}", broken())
    assert (store.owners(), store.basis(), store.public()) == before


def test_killed_while_statements_are_replaced_it_has_the_old_ones(run, url, store):
    before = store.owners(), store.basis()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # a process of its own, killed in the middle of the transaction

        def endless():
            for k in range(10_000):
                yield f"new-{k}", "{}"
            os.write(writer, b"x")
            time.sleep(60)

        Store.of_run(run, url).replace_statements("another", "{}", endless())
        os._exit(1)
    assert os.read(reader, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    with Store.of_run(run, url) as reopened:
        assert (reopened.owners(), reopened.basis()) == before


def test_a_store_belongs_to_one_run(store, url, tmp_path):
    other = make_run(tmp_path / "other", n=60)
    with pytest.raises(ValueError, match="another run"):
        Store.of_run(other, url)


def test_the_file_of_a_run_is_for_its_owner_alone(tmp_path):
    other = make_run(tmp_path / "other", n=60)
    with Store.of_run(other):
        files = list(other.private.glob("service.sqlite*"))
        assert other.private / "service.sqlite" in files
        for file in files:
            assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("wrong", ["nonsense", "mysql://x/y", "oracle://tiger"])
def test_a_url_that_is_none_is_refused_without_being_repeated(run, wrong):
    with pytest.raises((ValueError, OSError)) as raised:
        Store.of_run(run, wrong)
    assert wrong not in str(raised.value)


def test_a_database_that_is_not_there_is_an_error_without_its_password(run):
    with pytest.raises(OSError, match="can't be opened") as raised:
        Store.of_run(run, "postgresql://someone:secret@127.0.0.1:1/nothing")
    assert "secret" not in str(raised.value)
