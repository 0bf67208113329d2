"""Verification: the result of `Journal.verify`, and errors of a damaged file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from epsilons.accounting.results import Epsilons


class Verified(NamedTuple):
    """A journal that passed: its numbers of entries and charged steps, and its ε's priced anew."""

    entries: int
    steps: int
    sealed: bool
    epsilons: Epsilons


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Raise errors of SQLite or of malformed entries as ValueError that names the file."""
    try:
        yield
    except (sqlite3.DatabaseError, TypeError, KeyError) as error:
        raise ValueError(f"{path} was damaged: {error}") from error
