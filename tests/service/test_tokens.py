"""Tokens: given once, stored as keyed hashes, taken back at once."""

import base64
import stat
import time

import pytest
from folders import make_run
from served import issued

from epsilons.service import Keys, Store, issue, revoke, rotate


@pytest.fixture
def fresh(tmp_path):
    """A run, its keys and its store, with three owners."""
    run = make_run(tmp_path / "run", n=60)
    with Store.of_run(run) as store:
        store.replace_statements("a state", "{}", [(owner, "{}") for owner in "abc"])
        yield run, Keys.of_run(run), store


def holds(store, keys, token, later=0):
    return store.statement(keys.digest(token), int(time.time()) + later) is not None


def test_every_owner_gets_one_token_of_256_bits_that_is_nowhere_else(fresh, tmp_path):
    run, keys, store = fresh
    done = issue(store, keys, tmp_path / "tokens.csv")
    tokens = issued(tmp_path / "tokens.csv")
    assert done.issued == 3
    assert list(tokens) == ["a", "b", "c"]
    assert stat.S_IMODE((tmp_path / "tokens.csv").stat().st_mode) == 0o600
    stored = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    for token in tokens.values():
        assert len(base64.urlsafe_b64decode(token + "=")) == 32
        assert token.encode() not in stored
        assert base64.urlsafe_b64decode(token + "=") not in stored
        assert keys.digest(token) in stored
        assert holds(store, keys, token)
        assert holds(store, keys, f"  {token}\n")
        assert not holds(store, keys, token[:-1])


def test_hashes_need_the_key(fresh, tmp_path):
    _, keys, store = fresh
    issue(store, keys, tmp_path / "tokens.csv")
    other = Keys(b"x" * 32, b"y" * 32, b"z" * 32)
    for token in issued(tmp_path / "tokens.csv").values():
        assert not holds(store, other, token)
    assert "xx" not in repr(other)


def test_tokens_end_by_themselves(fresh, tmp_path):
    _, keys, store = fresh
    issue(store, keys, tmp_path / "tokens.csv", days=2)
    token = issued(tmp_path / "tokens.csv")["a"]
    assert holds(store, keys, token, later=2 * 86400 - 60)
    assert not holds(store, keys, token, later=2 * 86400)


def test_issuing_again_gives_tokens_to_those_without_one(fresh, tmp_path):
    _, keys, store = fresh
    assert issue(store, keys, tmp_path / "one.csv", owners=["b"]).issued == 1
    assert issue(store, keys, tmp_path / "rest.csv").issued == 2
    assert sorted(issued(tmp_path / "rest.csv")) == ["a", "c"]
    assert holds(store, keys, issued(tmp_path / "one.csv")["b"])
    with pytest.raises(ValueError, match="has a valid token already"):
        issue(store, keys, tmp_path / "none.csv")


def test_rotating_ends_old_tokens_and_begins_new_ones(fresh, tmp_path):
    _, keys, store = fresh
    issue(store, keys, tmp_path / "old.csv")
    done = rotate(store, keys, tmp_path / "new.csv", owners=["a", "c"])
    assert (done.issued, done.revoked) == (2, 2)
    old, new = issued(tmp_path / "old.csv"), issued(tmp_path / "new.csv")
    assert [holds(store, keys, old[owner]) for owner in "abc"] == [False, True, False]
    assert [holds(store, keys, new[owner]) for owner in "ac"] == [True, True]


def test_revoking_one_owner_leaves_the_others(fresh, tmp_path):
    _, keys, store = fresh
    issue(store, keys, tmp_path / "tokens.csv")
    tokens = issued(tmp_path / "tokens.csv")
    assert revoke(store, owners=["b"]).revoked == 1
    assert [holds(store, keys, tokens[owner]) for owner in "abc"] == [True, False, True]
    assert revoke(store, owners=None).revoked == 2
    assert not any(holds(store, keys, token) for token in tokens.values())


def test_a_file_that_is_there_is_not_overwritten_and_nothing_is_issued(fresh, tmp_path):
    _, keys, store = fresh
    (tmp_path / "tokens.csv").write_text("the only copy")
    with pytest.raises(ValueError, match="may be the only copy"):
        issue(store, keys, tmp_path / "tokens.csv")
    assert store.holders(int(time.time())) == set()


def test_strangers_get_no_token_and_are_not_named(fresh, tmp_path):
    _, keys, store = fresh
    with pytest.raises(ValueError, match="1 of the owners asked for") as raised:
        issue(store, keys, tmp_path / "tokens.csv", owners=["a", "stranger"])
    assert "stranger" not in str(raised.value)


def test_a_damaged_key_is_refused(fresh):
    run, _, _ = fresh
    (run.private / "service.key").write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        Keys.of_run(run)
