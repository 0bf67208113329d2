"""Checkpoints: everything that the next step depends on, written whole or not at all.

Loaded with `weights_only=True`, so that a file from elsewhere can't run code. Of the streams it
holds positions, not keys: every earlier checkpoint is still somewhere on the disk.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import pickle
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from epsilons.files import private_file
from epsilons.gradients.trees import tensors_in
from epsilons.journal import Journal, SomeKind
from epsilons.journal.run_entries import recorded_now
from epsilons.training.checksum import checksum
from epsilons.training.keys import Streams

RELEASES = "releases.bin"  # in the private half

_DIGEST = 32  # bytes


@runtime_checkable
class Stateful(Protocol):
    """What has a state that checkpoints keep: an average of weights, a scheduler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


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
    def joined(cls, parts: Sequence[Pending]) -> Pending:
        """Those of several processes as one, step by step in the order of the processes."""
        whole = cls()
        for step in sorted({p.first + k for p in parts for k in range(len(p.indices))}):
            here = [(p, step - p.first) for p in parts if 0 <= step - p.first < len(p.indices)]
            whole.add(
                step,
                np.concatenate([p.indices[k] for p, k in here]),
                np.concatenate([p.norms[k] for p, k in here]),
            )
        return whole

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Pending:
        indices, norms = ([t.numpy() for t in plain[name]] for name in ("indices", "norms"))
        return cls(plain["first"], indices, norms)


class BeforeBody(NamedTuple):
    """What the body of a loop may change, as it was before the body of a step."""

    kept: list[Any]
    param_groups: list[dict[str, Any]]
    scheduler: Any
    modes: list[bool]
    checksums: list[Tensor]


@dataclass
class State:
    """Where a run stands: before step `step`, with its objects, streams and unwritten norms."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None
    kept: Sequence[Stateful]
    followed: Tensor
    micro_batch: int | None
    shards: int = 1
    streams: Streams = field(init=False)
    step: int = 0
    loss: float = float("nan")  # of the step before
    unseen: bool = False  # whether that step was not shown to the loop's body
    sampled_norms: Pending = field(default_factory=Pending)
    followed_norms: Pending = field(default_factory=Pending)

    def before_body(self) -> BeforeBody:
        """Copies of what is small, and checksums of what is not."""
        return BeforeBody(
            copy.deepcopy([each.state_dict() for each in self.kept]),
            copy.deepcopy(self.optimizer.state_dict()["param_groups"]),
            copy.deepcopy(None if self.scheduler is None else self.scheduler.state_dict()),
            [module.training for module in self.model.modules()],
            [checksum(tensor) for tensor in self._large()],
        )

    def save(self, path: Path, before: BeforeBody | None = None) -> bool:
        """Write a checkpoint, as things are or as they were `before` the body of a loop.

        False, and none is written, if the body changed weights or optimizer since: the one before
        stands.
        """
        now = self.before_body()
        if before is not None:
            if not _equal(before.checksums, now.checksums):
                return False
            now = before
        with private_file(path) as file:
            torch.save(self.content(now), file)
        return True

    def content(self, now: BeforeBody) -> dict[str, Any]:
        """What a checkpoint holds, with what the body may change as it is `now`."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "modes": now.modes,
            "optimizer": self.optimizer.state_dict()
            | {"param_groups": plain_state(now.param_groups, "the optimizer")},
            "scheduler": plain_state(now.scheduler, "the scheduler"),
            "scheduled_by": type(self.scheduler).__name__,
            "kept": [plain_state(state, f"state[{k}]") for k, state in enumerate(now.kept)],
            "micro_batch": self.micro_batch,
            "shards": self.shards,
            "loss": self.loss,
            "unseen": self.unseen,
            "streams": self.streams.state(),
            "followed": self.followed,
            "sampled_norms": self.sampled_norms.to_plain(),
            "followed_norms": self.followed_norms.to_plain(),
        }

    def load(self, content: dict[str, Any]) -> None:
        """Take over what `save` wrote, into the same objects; the streams are the caller's."""
        self.step = content["step"]
        if (now := type(self.scheduler).__name__) != content["scheduled_by"]:
            raise ValueError(
                f"the run was begun with scheduler={content['scheduled_by']}, and this is {now}; "
                "give the same one"
            )
        self.model.load_state_dict(content["model"])
        for module, training in zip(self.model.modules(), content["modes"], strict=True):
            module.training = training
        groups = self.optimizer.param_groups
        self.optimizer.load_state_dict(content["optimizer"])
        for group, loaded in zip(groups, self.optimizer.param_groups, strict=True):
            group |= loaded  # the very dictionary that the body may have hold of
        self.optimizer.param_groups = groups
        if self.scheduler is not None:
            self.scheduler.load_state_dict(content["scheduler"])
        if len(content["kept"]) != len(self.kept):
            raise ValueError(
                f"the run keeps the state of {len(content['kept'])} objects, and state has "
                f"{len(self.kept)}; give the same ones in the same order"
            )
        for each, state in zip(self.kept, content["kept"], strict=True):
            each.load_state_dict(state)
        # passes as they were give the bits that were; a smaller size was asked for, or needed
        given = [size for size in (self.micro_batch, content["micro_batch"]) if size is not None]
        self.micro_batch = min(given, default=None)
        self.loss, self.unseen = content["loss"], content["unseen"]
        self.followed = content["followed"]
        self.sampled_norms = Pending.from_plain(content["sampled_norms"])
        self.followed_norms = Pending.from_plain(content["followed_norms"])

    def write_norms(self, journal: Journal) -> None:
        """Write the norms of single examples that the journal does not have yet."""
        waiting: dict[SomeKind, Pending] = {
            "sampled": self.sampled_norms,
            "followed": self.followed_norms,
        }
        for kind, norms in waiting.items():
            if norms.indices and not recorded_now(journal, kind, norms.first):
                journal.record_some(kind, norms.first, norms.indices, norms.norms)

    def checksum(self) -> str:
        """A digest of weights and optimizer, for comparison with other processes."""
        sums = [checksum(tensor).cpu() for tensor in self._large()]
        return hashlib.sha256(torch.stack(sums).numpy().tobytes()).hexdigest()[:16]

    def _large(self) -> list[Tensor]:
        return list(tensors_in((self.model.state_dict(), self.optimizer.state_dict()["state"])))


def _equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def plain_state(value: Any, owner: str) -> Any:
    """The value of what a checkpoint can hold; numbers of NumPy become Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (dict, OrderedDict, Counter):
        return type(value)({key: plain_state(part, owner) for key, part in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(plain_state(part, owner) for part in value)
    if value is None or isinstance(value, (Tensor, bool, int, float, complex, str, bytes)):
        return value
    raise ValueError(
        f"the state_dict of {owner} holds a {type(value).__name__}, which a checkpoint can't; "
        "expected tensors, numbers, text, and lists and dictionaries of them"
    )


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
    if not isinstance(content, dict) or "modes" not in content:
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

    @property
    def count(self) -> int:
        """The first step without a digest, whether or not the others are of this environment."""
        return max(0, os.fstat(self._file).st_size // _DIGEST - 1)

    def has(self, step: int) -> bool:
        """Whether the digest of a step is on record."""
        return os.fstat(self._file).st_size >= _offset(step + 1)

    def witness(self, step: int, released: dict[str, Tensor]) -> bytes:
        """Note the digest of a release; ReplayDiffers if the step released something else."""
        digest = release_digest(released)
        if not self.has(step):
            self._write(_offset(step), digest)
        elif os.pread(self._file, _DIGEST, _offset(step)) != digest:
            raise ReplayDiffers
        return digest

    def close(self) -> None:
        os.close(self._file)

    def _write(self, offset: int, digest: bytes) -> None:
        if os.pwrite(self._file, digest, offset) < len(digest):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def release_digest(released: dict[str, Tensor]) -> bytes:
    """SHA-256 of what a step released."""
    hasher = hashlib.sha256()
    for tensor in released.values():
        hasher.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return hasher.digest()


def _offset(step: int) -> int:
    return (1 + step) * _DIGEST
