"""Verification: the result of `Journal.verify`, and errors of a damaged file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from epsilons.accounting.results import Epsilons


class Verified(NamedTuple):
    """What was found of a journal that passed `Journal.verify`.

    `entries`: how many it has. `steps`: how many are charged. `sealed`: whether it has ended.
    `epsilons`: ε of every example, priced anew.
    """

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
