"""Files that are written whole or not at all, for their owner alone or for everyone."""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

fcntl: Any
try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None

_held: set[tuple[int, int, int]] = set()  # process, and device and inode of the folder it holds


def private_file(path: Path) -> AbstractContextManager[IO[bytes]]:
    """A new file of mode 0600 that takes its name only once it is complete and on disk."""
    return _whole_file(path, 0o600)


def public_file(path: Path) -> AbstractContextManager[IO[bytes]]:
    """The same, of mode 0644."""
    return _whole_file(path, 0o644)


def private_folder(path: Path) -> Path:
    """The folder, made with mode 0700 if it is not there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """The folder for this block alone; a `ValueError` while it is held already.

    A process that ends, in whatever way, holds it no longer. Where the system has no `flock`,
    nobody is kept out.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    at = os.fstat(descriptor)
    held = os.getpid(), at.st_dev, at.st_ino
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ours = "this process, by a loop that has not ended; end it, or drop its iterator"
            theirs = "another process; wait until it ends, or stop it"
            raise ValueError(f"{folder} is in use by {ours if held in _held else theirs}") from None
        _held.add(held)
        try:
            yield
        finally:
            _held.discard(held)
    finally:
        os.close(descriptor)


def destroy(path: Path) -> None:
    """Overwrite the file and remove it. Best effort: a file system may keep old blocks."""
    if path.exists():
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


def disk_is_full(error: BaseException) -> bool:
    """Whether the error says that no room was left, in the words of the system or of SQLite."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def needing_room(path: Path, way_out: str) -> Iterator[None]:
    """An `OSError` in one sentence, with the way out, if the block finds the disk full."""
    try:
        yield
    except (OSError, sqlite3.Error, RuntimeError) as error:
        found: BaseException | None = error
        while found is not None and not disk_is_full(found):
            found = found.__cause__ or found.__context__  # torch raises another one on top
        if found is None:
            raise
        raise OSError(f"no room is left on the disk of {path}. Make room, and {way_out}") from error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _whole_file(path: Path, mode: int) -> Iterator[IO[bytes]]:
    draft = path.with_name(f".{path.name}.draft")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        sync(path.parent)  # the new name is on disk too
    finally:
        draft.unlink(missing_ok=True)
