"""Files as their publishers made them: found, checked against the published checksum, read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Publication:
    """A data set as published: its name, where to get it, and the MD5 of each of its files."""

    name: str
    source: str
    md5: Mapping[str, str]

    def read(self, path: Path, *, verified: bool = True) -> bytes:
        """The content of one file; ValueError unless it is the published one."""
        expected = self.md5[path.name]
        if not path.is_file():
            raise ValueError(
                f"{path} is not there; it belongs to {self.name}, which {self.source} has. "
                f"Its MD5 should be {expected}."
            )
        content = path.read_bytes()
        if verified and (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != (
            expected
        ):
            raise ValueError(self._complaint(path, len(content), found))
        return content

    def _complaint(self, path: Path, size: int, found: str) -> str:
        expected = self.md5[path.name]
        other = next((name for name, md5 in self.md5.items() if md5 == found), None)
        if other is not None:
            return f"{path} is {other} under another name; its MD5 should be {expected}"
        return (
            f"{path} is damaged or incomplete: its {size} bytes have MD5 {found}, and the file of "
            f"{self.name} has MD5 {expected}. Get it again from {self.source}."
        )


def below(folder: str | os.PathLike[str], places: Iterable[str], wanted: Iterable[str]) -> Path:
    """The first of `folder` and its `places` that has one of the `wanted` files.

    If none has: the first place, whose missing files are then named.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected the one that holds the data")
    names = tuple(wanted)
    candidates = [folder, *(folder / place for place in places)]
    for candidate in candidates:
        if any((candidate / name).is_file() for name in names):
            return candidate
    return candidates[1]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
