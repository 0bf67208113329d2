"""Tokens: who holds one sees the statement of its owner.

A token is 256 random bits, shown once. What is stored is its keyed hash, so that neither a copy of
the database nor of the key alone lets anyone in.
"""

from __future__ import annotations

import csv
import hashlib
import hmac
import io
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from epsilons.files import private_file
from epsilons.runs import Run
from epsilons.service.store import Store, TokenRow

KEY_FILE = "service.key"
_BYTES = 32
_DAY = 86400
_LONGEST = 3650  # days


@dataclass(frozen=True, repr=False)
class Keys:
    """The service's secret keys: for hashes of `tokens`, for `sessions`, for `addresses` in logs.

    All three come from one secret file in the private half of the run.
    """

    tokens: bytes
    sessions: bytes
    addresses: bytes

    @classmethod
    def of_run(cls, run: Run) -> Self:
        """The keys of `run`; made where there are none yet. ValueError if the file is damaged."""
        file = run.private / KEY_FILE
        if not file.exists():
            _make(file)
        secret = file.read_bytes()
        if len(secret) != _BYTES:
            raise ValueError(
                f"{file} is damaged: it has {len(secret)} bytes; expected {_BYTES}. Restore it "
                "from a copy, or delete it and issue all tokens anew"
            )
        return cls(*(hmac.digest(secret, use, "sha256") for use in (b"tokens", b"sessions", b"ip")))

    def digest(self, token: str) -> bytes:
        """The keyed hash of a `token` as someone gave it, whatever it is."""
        return hmac.digest(self.tokens, token.strip().encode("utf-8", "replace"), "sha256")


@dataclass(frozen=True)
class Issued:
    """What was done: how many tokens were `issued`, how many `revoked`, and when they `expire`."""

    issued: int
    revoked: int
    expire: str | None


def issue(
    store: Store,
    keys: Keys,
    out: str | os.PathLike[str],
    *,
    owners: Sequence[str] = (),
    days: float = 90.0,
) -> Issued:
    """Give a token to every owner who has none, and write them to a new CSV file of mode 0600.

    `store`, `keys`: those of the run. `out`: the file, with a row per owner; it is the only place
    where the tokens are. `owners`: only to these. `days`: how long the tokens hold, by default 90.
    ValueError if `out` is there already, if nobody is left without a token, or for strangers.
    """
    asked = _known(store, owners)
    now = int(time.time())
    having = store.holders(now)
    without = [owner for owner in asked if owner not in having]
    if not without:
        raise ValueError(
            "everyone asked for has a valid token already; `epsilons tokens rotate` gives them new "
            "ones"
        )
    return _give(store, keys, Path(out), without, days, now, revoked=())


def rotate(
    store: Store,
    keys: Keys,
    out: str | os.PathLike[str],
    *,
    owners: Sequence[str] = (),
    days: float = 90.0,
) -> Issued:
    """Revoke the tokens of everyone, or of `owners`, and give them new ones.

    `store`, `keys`, `out`, `days` and errors as for `issue`. Old tokens end when new ones begin.
    """
    asked = _known(store, owners)
    now = int(time.time())
    return _give(store, keys, Path(out), asked, days, now, revoked=asked)


def revoke(store: Store, *, owners: Sequence[str] | None) -> Issued:
    """Revoke the tokens of `owners` in `store`, at once; None: everyone's.

    A service that is running sees it at its next request.
    """
    count = store.change_tokens(int(time.time()), revoked=owners)
    return Issued(0, count, None)


def _give(
    store: Store,
    keys: Keys,
    out: Path,
    owners: Sequence[str],
    days: float,
    now: int,
    revoked: Sequence[str],
) -> Issued:
    if not 0 < days <= _LONGEST:
        raise ValueError(f"days={days:g} is not how long a token can hold; expected up to 3650")
    if out.exists():
        raise ValueError(
            f"{out} exists, and may be the only copy of tokens that were issued; give another name"
        )
    expires = now + int(days * _DAY)
    until = datetime.fromtimestamp(expires, UTC).isoformat(timespec="seconds")
    tokens = [secrets.token_urlsafe(_BYTES) for _ in owners]
    with private_file(out) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        rows = csv.writer(text)
        rows.writerow(["owner", "token", "expires"])
        rows.writerows((o, token, until) for o, token in zip(owners, tokens, strict=True))
        text.detach()
    # After the file is on disk: a crash in between leaves tokens that don't work, and no token that
    # works and nobody knows.
    added = [
        TokenRow(keys.digest(token), owner, now, expires)
        for owner, token in zip(owners, tokens, strict=True)
    ]
    count = store.change_tokens(now, revoked=revoked, added=added)
    return Issued(len(added), count, until)


def _known(store: Store, owners: Sequence[str]) -> list[str]:
    """The owners asked for, by default all; ValueError for one who has no statement."""
    known = store.owners()
    if not owners:
        return known
    strangers = len(set(owners) - set(known))
    if strangers:
        raise ValueError(
            f"{strangers} of the owners asked for have no statement in this run; expected names as "
            "in the run's column of owners, or ids of records where it has none"
        )
    return sorted(set(owners))


def _make(file: Path) -> None:
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft")
    with private_file(draft) as content:
        content.write(secrets.token_bytes(_BYTES))
    try:
        os.link(draft, file)  # unlike replace, it raises if another process was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def same(one: bytes, other: bytes) -> bool:
    """Whether two hashes are equal, in a time that doesn't depend on where they differ."""
    return hmac.compare_digest(one, other)


def short_hash(key: bytes, text: str) -> str:
    """A name for logs that tells nobody what it stands for."""
    return hashlib.blake2s(text.encode(), key=key, digest_size=6).hexdigest()
