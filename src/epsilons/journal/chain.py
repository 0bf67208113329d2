"""Chain: an append-only SQLite table in which each entry's digest covers all before it.

The chain starts from a random salt, so that its head (the last digest) can be published and reveals
nothing; the file with length and head is the anchor. At the end of a run the chain is sealed: it
takes no more entries, and the digest of the whole file is added to the anchor.

A chain opened for reading is a snapshot, whoever appends meanwhile. Its anchor is read just before
it; since an anchor is published after its entry, the snapshot has at least as many entries.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from epsilons.files import public_file, sync

SALT_BYTES = 32
_LOCK_TIMEOUT = 120.0  # seconds; other processes hold the lock for milliseconds each

_SCHEMA = """
CREATE TABLE entry (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    facts TEXT NOT NULL,
    indices BLOB NOT NULL,
    norms BLOB NOT NULL,
    digest BLOB NOT NULL
)
"""

# How many chains of this process write to a file, by device and inode.
_written = Counter[tuple[int, int]]()


class Entry(NamedTuple):
    """One entry without its arrays, which are read by `Chain.indices` and `Chain.norms`."""

    number: int
    kind: str
    facts: dict[str, Any]


class Anchor(NamedTuple):
    """What is published of a chain: its length and head, and the digest of the sealed file."""

    length: int
    head: str
    seal: str | None = None


class Chain:
    """The entries of one SQLite file, and the anchor in which their head is published, if any."""

    def __init__(self, path: Path, anchor: Path | None, *, writable: bool = False) -> None:
        """Open for reading a snapshot; `writable`: for appending, unless the chain is sealed."""
        self.path = path
        self._anchor = anchor
        self._writable = writable
        self._anchor_content: bytes | None = None
        self._inode: tuple[int, int] | None = None  # of the file, while this writes to it
        if writable and _in_wal_mode(path):
            self._connection, self._inode = _connect(path), _inode(path)
            _written[self._inode] += 1
        elif writable:
            self._connection = _connect_sealed(path)
        else:
            self._connection, self._anchor_content = _snapshot(path, anchor)
        self._last_cache: dict[tuple[str, ...], tuple[int, Entry | None]] = {}

    @classmethod
    def create(
        cls,
        path: Path,
        anchor: Path | None,
        kind: str,
        facts: dict[str, Any],
        indices: bytes = b"",
        norms: bytes = b"",
    ) -> Self:
        """A new file of mode 0600 with its first entry; it appears complete or not at all."""
        if anchor is not None and anchor.exists() and not path.exists():
            raise ValueError(f"{path} is gone, and {anchor} says what it held; put it back")
        draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(draft)
        with connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_SCHEMA)
            _insert(connection, kind, facts, indices, norms)
        connection.close()
        try:
            os.link(draft, path)  # unlike replace, it raises if another process was first
        except FileExistsError:
            raise ValueError(f"{path} exists already; it is never overwritten") from None
        finally:
            draft.unlink()
        sync(path.parent)
        chain = cls(path, anchor, writable=True)
        chain.publish()
        return chain

    def close(self) -> None:
        self._connection.close()
        if self._inode is not None:
            _written[self._inode] -= 1
            self._inode = None

    def append(
        self,
        kind: str,
        facts: dict[str, Any],
        indices: bytes,
        norms: bytes,
        *,
        anchored: bool = True,
    ) -> None:
        """Append an entry, which is on disk when this returns, and publish the anchor.

        `anchored=False` leaves the anchor to a later entry. Whenever a signal comes, the entry is
        on disk or was never there: one statement writes it, outside any transaction.
        """
        self._begin_writing()
        appended = False
        while not appended:  # again if another process was first
            with suppress(sqlite3.IntegrityError):
                self.insert(kind, facts, indices, norms)
                appended = True
        if anchored:
            self.publish()

    def insert(self, kind: str, facts: dict[str, Any], indices: bytes, norms: bytes) -> None:
        """Append an entry inside `transaction`, after which the caller calls `publish`."""
        _insert(self._connection, kind, facts, indices, norms)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Lock out other writers until the block is left; then its entries are on disk."""
        self._begin_writing()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield
            self._connection.execute("COMMIT")
        finally:
            self._roll_back()

    def _begin_writing(self) -> None:
        if not self._writable:
            raise ValueError(f"{self.path} was opened for reading; open it with writable=True")
        self._roll_back()

    def _roll_back(self) -> None:
        """End a transaction that is open still; a signal may leave one between any two lines."""
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")
            self._last_cache.clear()

    def publish(self) -> None:
        """Write length and head of the chain to its anchor."""
        if self._anchor is not None:
            # Locked, so that of several processes the one that writes last writes the last head.
            with self.transaction():
                number, head = self._connection.execute(
                    "SELECT number, digest FROM entry ORDER BY number DESC LIMIT 1"
                ).fetchone()
                _write_anchor(self._anchor, Anchor(number + 1, head.hex()))

    def entries(self, *kinds: str) -> Iterator[Entry]:
        """All entries of these kinds, in order."""
        placeholders = ", ".join("?" * len(kinds))
        rows = self._connection.execute(
            f"SELECT number, kind, facts FROM entry WHERE kind IN ({placeholders}) ORDER BY number",
            kinds,
        )
        return (Entry(number, kind, json.loads(facts)) for number, kind, facts in rows)

    def last(self, *kinds: str) -> Entry | None:
        """The last entry of these kinds; cached, so that only entries appended since are read."""
        seen, found = self._last_cache.get(kinds, (-1, None))
        (newest,) = self._connection.execute("SELECT max(number) FROM entry").fetchone()
        placeholders = ", ".join("?" * len(kinds))
        row = self._connection.execute(
            f"SELECT number, kind, facts FROM entry WHERE number > ? AND kind IN ({placeholders}) "
            "ORDER BY number DESC LIMIT 1",
            (seen, *kinds),
        ).fetchone()
        if row is not None:
            found = Entry(row[0], row[1], json.loads(row[2]))
        self._last_cache[kinds] = (-1 if newest is None else newest, found)
        return found

    def indices(self, number: int) -> bytes:
        return self._column("indices", number)

    def norms(self, number: int) -> bytes:
        return self._column("norms", number)

    def part_of_norms(self, number: int, first: int, size: int) -> bytes:
        """`size` bytes of an entry's norms from byte `first`, without reading the others."""
        with self._connection.blobopen("entry", "norms", number, readonly=True) as blob:
            blob.seek(first)
            return blob.read(size)

    def seal(self) -> None:
        """Turn the chain into one read-only file without a WAL, and publish the file's digest.

        A copy is written and put in place of the old file, which processes may still be reading.
        """
        if _in_wal_mode(self.path):
            self.publish()
            draft = self.path.with_name(f".{self.path.name}.draft")
            draft.unlink(missing_ok=True)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            self._connection.execute("VACUUM INTO ?", (str(draft),))
            self.close()
            sync(draft)
            os.replace(draft, self.path)
            sync(self.path.parent)
            self._connection = _connect_sealed(self.path)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        if self._anchor is not None:
            published = _parsed_anchor(self._anchor, _read(self._anchor))
            _write_anchor(self._anchor, published._replace(seal=_file_digest(self.path)))

    @property
    def sealed(self) -> bool:
        """Whether the file on disk takes no more entries."""
        return not _in_wal_mode(self.path)

    def verify(self) -> tuple[int, bool]:
        """The number of entries and whether the file is sealed; ValueError if it was changed."""
        anchor = self._expected_anchor()
        sealed = anchor is not None and anchor.seal is not None
        if anchor is not None and sealed and _file_digest(self.path) != anchor.seal:
            raise ValueError(f"{self.path} is not the file that was sealed when the run ended")
        length, head, at_anchor = 0, b"", ""
        for number, kind, facts, indices, norms, stored in self._connection.execute(
            "SELECT number, kind, facts, indices, norms, digest FROM entry ORDER BY number"
        ):
            if number != length:
                raise ValueError(f"entry {length} of {self.path} is missing")
            head = _digest(head, number, kind, facts, indices, norms)
            if head != stored:
                raise ValueError(f"entry {number} of {self.path} was changed")
            length += 1
            if anchor is not None and length == anchor.length:
                at_anchor = head.hex()
        if length == 0:
            raise ValueError(f"{self.path} has no entries left")
        if anchor is not None and at_anchor != anchor.head:
            raise ValueError(f"{self.path} is not the journal that {self._anchor} anchors")
        if anchor is not None and sealed and length != anchor.length:
            raise ValueError(f"{self.path} has entries that its anchor doesn't know")
        return length, sealed

    def _column(self, name: str, number: int) -> bytes:
        (value,) = self._connection.execute(
            f"SELECT {name} FROM entry WHERE number = ?", (number,)
        ).fetchone()
        return bytes(value)

    def _expected_anchor(self) -> Anchor | None:
        """The anchor that this chain must agree with; None if it has none, or none yet."""
        if self._anchor is None:
            return None
        # Counted before the anchor is read: the first entry is anchored before a second one comes.
        (entries,) = self._connection.execute("SELECT count(*) FROM entry").fetchone()
        content = _read(self._anchor) if self._writable else self._anchor_content
        if content is None and entries == 1:
            return None  # a crash between the first entry and its anchor
        return _parsed_anchor(self._anchor, content)


def _read(file: Path | None) -> bytes | None:
    try:
        return None if file is None else file.read_bytes()
    except FileNotFoundError:
        return None


def _parsed_anchor(path: Path, content: bytes | None) -> Anchor:
    try:
        if content is None:
            raise ValueError("it is not there")
        facts = json.loads(content)
        return Anchor(int(facts["length"]), str(facts["head"]), facts.get("seal"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the anchor of a journal: {error}") from error


def _write_anchor(path: Path, anchor: Anchor) -> None:
    with public_file(path) as file:
        file.write(json.dumps(anchor._asdict()).encode() + b"\n")


def _insert(
    connection: sqlite3.Connection, kind: str, facts: dict[str, Any], indices: bytes, norms: bytes
) -> None:
    last = connection.execute(
        "SELECT number, digest FROM entry ORDER BY number DESC LIMIT 1"
    ).fetchone()
    number, previous = (0, b"") if last is None else (last[0] + 1, last[1])
    text = json.dumps(facts, sort_keys=True)
    head = _digest(previous, number, kind, text, indices, norms)
    connection.execute(
        "INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?)", (number, kind, text, indices, norms, head)
    )


def _digest(previous: bytes, *fields: object) -> bytes:
    """SHA-256 of the previous digest and the fields, each with its type and length before it."""
    hasher = hashlib.sha256(previous)
    for field in fields:
        content = field if isinstance(field, bytes) else str(field).encode()
        hasher.update(f"{type(field).__name__}:{len(content)}:".encode())
        hasher.update(content)
    return hasher.digest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _in_wal_mode(path: Path) -> bool:
    """Whether the chain is not sealed: bytes 18 and 19 of an SQLite file are 2 in WAL mode.

    A file that this process writes to is not opened for that: closing it would take its locks away.
    """
    if _written[_inode(path)]:
        return True
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _inode(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_LOCK_TIMEOUT, isolation_level=None)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _connect_sealed(path: Path) -> sqlite3.Connection:
    """A connection to a file that never changes; a WAL file beside it is ignored."""
    return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)


def _snapshot(path: Path, anchor: Path | None) -> tuple[sqlite3.Connection, bytes | None]:
    """A connection for reading one snapshot, and the content of the anchor from before it.

    Repeated if meanwhile sealing replaced the file, or the first anchor was written.
    """
    while True:
        anchored, before = _read(anchor), path.stat()
        connection, error = None, None
        try:
            connection = _at_this_moment(path)
        except sqlite3.Error as failed:
            error = failed
        same = os.path.samestat(before, path.stat())
        if same and error is not None:
            raise error
        if connection is not None:
            if same and not (anchored is None and _read(anchor) is not None):
                return connection, anchored
            connection.close()


def _at_this_moment(path: Path) -> sqlite3.Connection:
    if not _in_wal_mode(path):
        return _connect_sealed(path)
    name = path.absolute().as_uri()
    connection = sqlite3.connect(
        f"{name}?mode=ro", uri=True, timeout=_LOCK_TIMEOUT, isolation_level=None
    )
    try:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        return connection
    except sqlite3.OperationalError as error:
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise sqlite3.OperationalError(
                f"{error}; if its folder can't be written to, read a copy of the run folder"
            ) from error
        # A read-only folder has no room for WAL files; every entry is in the main file.
        return _connect_sealed(path)
