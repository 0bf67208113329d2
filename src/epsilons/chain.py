"""A hash chain: each entry's digest covers its fields and the digest before it.

The chain starts from a random salt, so that its head, which is published, reveals nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from epsilons.files import public_file

SALT_BYTES = 32


class Anchor(NamedTuple):
    """What is published of a chain: how long it was, and its head then."""

    length: int
    head: str


def digest(previous: bytes, fields: Iterable[bytes]) -> bytes:
    """SHA-256 of the previous digest and the fields, each with its length before it."""
    hasher = hashlib.sha256(previous)
    for field in fields:
        hasher.update(len(field).to_bytes(8, "big"))
        hasher.update(field)
    return hasher.digest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_anchor(path: Path, anchor: Anchor, seal: str | None = None) -> None:
    """Publish the anchor and, when the run has ended, the digest of the whole file."""
    facts = {"length": anchor.length, "head": anchor.head}
    with public_file(path) as file:
        file.write(json.dumps(facts if seal is None else {**facts, "seal": seal}).encode())


def read_anchor(path: Path) -> tuple[Anchor, str | None]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        return Anchor(int(facts["length"]), str(facts["head"])), facts.get("seal")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the anchor of a journal: {error}") from error
