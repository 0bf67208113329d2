"""Chain: an append-only SQLite table in which each entry's digest covers all before it.

The chain starts from a random salt, so that its head can be published (the anchor) and reveals
nothing. When nothing more will come, the file is sealed: its own digest is published as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from epsilons.files import public_file, sync

SALT_BYTES = 32

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


class Entry(NamedTuple):
    """One entry without its arrays: they are read when they are needed."""

    number: int
    kind: str
    facts: dict[str, Any]


class Anchor(NamedTuple):
    """What is published of a chain: its length and head, and the digest of the sealed file."""

    length: int
    head: str
    seal: str | None = None


class Chain:
    """The entries of one file, and the file in which their head is published, if any."""

    def __init__(self, path: Path, anchor: Path | None) -> None:
        self.path = path
        self._anchor = anchor
        self._connection = _connect(path)
        self._looked_up: dict[tuple[str, ...], tuple[int, Entry | None]] = {}

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
        if path.exists():
            raise ValueError(f"{path} exists already; it is never overwritten")
        draft = path.with_name(f".{path.name}.draft")
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(draft)
        with connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_SCHEMA)
            _insert(connection, kind, facts, indices, norms)
        connection.close()
        os.replace(draft, path)
        chain = cls(path, anchor)
        chain._publish()
        return chain

    def close(self) -> None:
        self._connection.close()

    def append(
        self,
        kind: str,
        facts: dict[str, Any],
        indices: bytes,
        norms: bytes,
        *,
        anchored: bool = True,
    ) -> None:
        """One more entry, on disk when this returns; anchored then, or with a later one."""
        with self._connection:
            _insert(self._connection, kind, facts, indices, norms)
        if anchored:
            self._publish()

    def entries(self, *kinds: str) -> Iterator[Entry]:
        marks = ", ".join("?" * len(kinds))
        rows = self._connection.execute(
            f"SELECT number, kind, facts FROM entry WHERE kind IN ({marks}) ORDER BY number", kinds
        )
        return (Entry(number, kind, json.loads(facts)) for number, kind, facts in rows)

    def last(self, *kinds: str) -> Entry | None:
        """The last entry of these kinds; only what was appended since the last call is read."""
        seen, found = self._looked_up.get(kinds, (-1, None))
        (newest,) = self._connection.execute("SELECT max(number) FROM entry").fetchone()
        marks = ", ".join("?" * len(kinds))
        row = self._connection.execute(
            f"SELECT number, kind, facts FROM entry WHERE number > ? AND kind IN ({marks}) "
            "ORDER BY number DESC LIMIT 1",
            (seen, *kinds),
        ).fetchone()
        if row is not None:
            found = Entry(row[0], row[1], json.loads(row[2]))
        self._looked_up[kinds] = (-1 if newest is None else newest, found)
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
        """Make one file of it, publish its digest, and take no more entries.

        The file is written anew and takes the old one's place, so that whoever still reads the
        old one is not in the way.
        """
        self._publish()
        if _live(self.path):
            draft = self.path.with_name(f".{self.path.name}.draft")
            draft.unlink(missing_ok=True)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            self._connection.execute("VACUUM INTO ?", (str(draft),))
            self._connection.close()
            sync(draft)
            os.replace(draft, self.path)
            sync(self.path.parent)
            self._connection = _connect(self.path)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        if self._anchor is not None:
            published = read_anchor(self._anchor)
            _write_anchor(self._anchor, published._replace(seal=_file_digest(self.path)))

    def verify(self) -> tuple[int, bool]:
        """The number of entries and whether the file is sealed; ValueError if it was changed."""
        anchor = None if self._anchor is None else read_anchor(self._anchor)
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

    def _publish(self) -> None:
        if self._anchor is not None:
            number, head = self._connection.execute(
                "SELECT number, digest FROM entry ORDER BY number DESC LIMIT 1"
            ).fetchone()
            _write_anchor(self._anchor, Anchor(number + 1, head.hex()))


def read_anchor(path: Path) -> Anchor:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Anchor(int(facts["length"]), str(facts["head"]), facts.get("seal"))
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _live(path: Path) -> bool:
    """Whether entries can be added: bytes 18 and 19 of the header say 2 for a file in WAL mode."""
    with path.open("rb") as file:
        return file.read(20)[18:20] == b"\x02\x02"


def _connect(path: Path) -> sqlite3.Connection:
    """A connection for writing, or for reading only if the file is sealed."""
    if not _live(path):
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA synchronous = FULL")
    return connection
