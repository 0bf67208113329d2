"""Verification: what checking a journal finds to hold, and how damage is reported."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from epsilons.accounting.results import Epsilons


class Verified(NamedTuple):
    """What `verify` found to hold."""

    entries: int
    steps: int
    sealed: bool
    epsilons: Epsilons


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Errors of reading a file that is no journal any more, as ValueError."""
    try:
        yield
    except (sqlite3.DatabaseError, TypeError, KeyError) as error:
        raise ValueError(f"{path} was damaged: {error}") from error
