"""The keys of a run: the streams of each, and the file that holds a secret one.

Every call of `fit` in a secret run takes a fresh key, from the first step whose result is not on
record.
The key is on disk before its first step, so that a crash can be replayed, and is destroyed as soon
as nothing has to be. Checkpoints hold positions in its streams, never the key.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from epsilons.files import destroy, sync
from epsilons.noise.keystream import KEY_BYTES, Keystream

_STEPS = 1 << 40  # more than any run has: words of the seed streams for each shard


class Streams:
    """What the steps draw from one key: coins, noise, and seeds for the loss (dropout).

    `number` says which key it is: the name of its file or, in a seeded run, how often the run had
    been restarted. Seeds depend on the key, the step and the shard alone, so that passes over the
    data that only measure change no weight, and it is one whichever process has the shard.
    """

    def __init__(self, number: int, key: Keystream) -> None:
        self.number = number
        self.sampling, self.noise = key.fork(b"sampling"), key.fork(b"noise")
        self._losses, self._passes = key.fork(b"losses"), key.fork(b"passes")
        self._data = key.fork(b"data")
        key.destroy()

    @classmethod
    def seeded(cls, seed: int, restarts: int) -> Streams:
        return cls(restarts, Keystream.seeded(seed + (restarts << 64), b"key"))

    @classmethod
    def of(cls, number: int, key: bytes) -> Streams:
        """Those of a secret key."""
        return cls(number, Keystream(key, b"key"))

    def loss_seed(self, step: int, shard: int = 0) -> int:
        """A seed of torch's generators for what the loss draws at `step` in a shard."""
        return _word_at(self._losses, step + shard * _STEPS)

    def pass_seed(self, step: int, shard: int = 0) -> int:
        """The same for the passes before `step` that measure norms."""
        return _word_at(self._passes, step + shard * _STEPS)

    def data_seed(self, step: int, shard: int = 0) -> int:
        """The same for what the data set draws when the batch of `step` is fetched."""
        return _word_at(self._data, step + shard * _STEPS)

    def state(self) -> dict[str, Any]:
        """Which key, and how far its streams were read: no secret."""
        positions = {"sampling": self.sampling.position, "noise": self.noise.position}
        return {"key": self.number, **positions}

    def seek(self, state: dict[str, Any]) -> None:
        self.sampling.seek(state["sampling"])
        self.noise.seek(state["noise"])

    def destroy(self) -> None:
        for stream in (self.sampling, self.noise, self._losses, self._passes, self._data):
            stream.destroy()


def new_key(folder: Path) -> tuple[int, bytes]:
    """Number and bytes of a fresh secret key, whose file (mode 0600) is on disk."""
    key, number = os.urandom(KEY_BYTES), secrets.randbits(63)
    # under its own name at once: a draft left by a crash would keep the key
    descriptor = os.open(_file(folder, number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
        file.flush()
        os.fsync(descriptor)
    sync(folder)
    return number, key


def kept_key(folder: Path, number: int) -> bytes | None:
    """A key whose file is there; None if it is not, or no longer."""
    file = _file(folder, number)
    key = file.read_bytes() if file.exists() else b""
    return key if len(key) == KEY_BYTES and any(key) else None


def destroy_keys(folder: Path, but: int | None = None) -> None:
    """Overwrite and remove every key file, except of the key `but`."""
    for file in folder.glob("key-*.bin"):
        if but is None or file != _file(folder, but):
            destroy(file)


def _file(folder: Path, number: int) -> Path:
    return folder / f"key-{number:016x}.bin"


def _word_at(stream: Keystream, index: int) -> int:
    stream.seek(8 * index)
    return int(stream.words(1)[0] >> 1)  # torch takes signed seeds
