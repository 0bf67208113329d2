"""Checkpoints: everything that the next step depends on, written whole or not at all.

Loaded with `weights_only=True`, so that a file from elsewhere can't run code. Of the streams it
holds positions, not keys: every earlier checkpoint is still somewhere on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from epsilons.files import private_file
from epsilons.training.keys import Streams

_DIGEST = 32  # bytes


@dataclass
class Pending:
    """Norms of some examples at steps from `first` on that the journal does not have yet."""

    first: int = 0
    indices: list[NDArray[np.int64]] = field(default_factory=list)
    norms: list[NDArray[np.float64]] = field(default_factory=list)

    def add(self, step: int, indices: NDArray[np.int64], norms: NDArray[np.float64]) -> None:
        if not self.indices:
            self.first = step
        self.indices.append(indices)
        self.norms.append(norms)

    def to_plain(self) -> dict[str, Any]:
        return {
            "first": self.first,
            "indices": [torch.from_numpy(i.copy()) for i in self.indices],
            "norms": [torch.from_numpy(z.copy()) for z in self.norms],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Pending:
        indices, norms = ([t.numpy() for t in plain[name]] for name in ("indices", "norms"))
        return cls(plain["first"], indices, norms)


@dataclass
class State:
    """Where a run stands: before step `step`, with its objects, streams and unwritten norms."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    callback: object
    followed: Tensor
    streams: Streams = field(init=False)
    step: int = 0
    sampled_norms: Pending = field(default_factory=Pending)
    followed_norms: Pending = field(default_factory=Pending)

    def save(self, path: Path) -> None:
        content = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "callback": _callback_state(self.callback),
            "streams": self.streams.state(),
            "followed": self.followed,
            "sampled_norms": self.sampled_norms.to_plain(),
            "followed_norms": self.followed_norms.to_plain(),
        }
        with private_file(path) as file:
            torch.save(content, file)

    def load(self, content: dict[str, Any]) -> None:
        """Take over what `save` wrote, into the same objects; the streams are the caller's."""
        self.step = content["step"]
        self.model.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        if content["callback"] is not None:
            self.callback.load_state_dict(content["callback"])  # type: ignore[attr-defined]
        self.followed = content["followed"]
        self.sampled_norms = Pending.from_plain(content["sampled_norms"])
        self.followed_norms = Pending.from_plain(content["followed_norms"])


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a checkpoint; nothing in the file is executed."""
    try:
        # torch reads on where a byte has changed
        with zipfile.ZipFile(path) as parts:
            whole = parts.testzip() is None
        if not whole:
            raise ValueError("a checksum differs")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about how a file that we refuse was made
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, zipfile.BadZipFile,
    ) as error:  # fmt: skip
        raise ValueError(
            f"{path} is not a checkpoint of this library: it is damaged or holds more than data"
        ) from error
    if not isinstance(content, dict) or "streams" not in content:
        raise ValueError(
            f"{path} is not a checkpoint of this version; go on with the one that began the run"
        )
    return content


class ReplayDiffers(Exception):
    """A step that was released before would now be released differently."""


class Releases:
    """Digests of what each step released, so that a replayed step can be compared.

    Written before the weights change and not synced: they outlive the process, which is what a
    replay in the same boot needs. The first one is of the environment, this boot in it: in the
    same environment a step without a digest has released nothing.
    """

    def __init__(self, path: Path, environment: dict[str, str]) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._here = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).digest()

    def begin(self, step: int) -> None:
        """Start anew, here: nothing was released from `step` on."""
        os.ftruncate(self._file, 0)
        self._write(0, self._here)
        os.ftruncate(self._file, _offset(step))

    def known_from(self, step: int) -> bool:
        """Whether all that was released from `step` on is on record, and was released here."""
        whole = os.fstat(self._file).st_size >= _offset(step)
        return whole and os.pread(self._file, _DIGEST, 0) == self._here

    def has(self, step: int) -> bool:
        """Whether the digest of a step is on record."""
        return os.fstat(self._file).st_size >= _offset(step + 1)

    def witness(self, step: int, released: dict[str, Tensor]) -> None:
        """Note the digest of a release; ReplayDiffers if the step released something else."""
        hasher = hashlib.sha256()
        for tensor in released.values():
            hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        if not self.has(step):
            self._write(_offset(step), hasher.digest())
        elif os.pread(self._file, _DIGEST, _offset(step)) != hasher.digest():
            raise ReplayDiffers

    def close(self) -> None:
        os.close(self._file)

    def _write(self, offset: int, digest: bytes) -> None:
        if os.pwrite(self._file, digest, offset) < len(digest):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _offset(step: int) -> int:
    return (1 + step) * _DIGEST


def _callback_state(callback: object) -> Any:
    state_dict = getattr(callback, "state_dict", None)
    return None if state_dict is None else state_dict()
