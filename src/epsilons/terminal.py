"""Bars on the terminal, on stderr, and only where someone is looking."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)


def speaks() -> bool:
    """Whether this process is the one of its job that writes to the terminal: rank 0."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def counting(
    what: str, total: int, *columns: ProgressColumn, **fields: Any
) -> Iterator[Callable[..., None]]:
    """A bar from 0 to `total`; call what it yields with the number done (and new fields)."""
    console = Console(stderr=True)
    layout = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(),
    )
    with Progress(*layout, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, **fields)

        def advance(done: int, **news: Any) -> None:
            progress.update(task, completed=done, **news)

        yield advance
