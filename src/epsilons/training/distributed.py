"""Ranks: the processes that train one model together, and what they tell each other.

One process is the rank 0 of one. The engine is torch.distributed, started by torchrun: gloo for
what lies on the CPU, nccl for sums on GPUs. Rank 0 has the journal and the run folder.

Every wait has an end: a rank that is killed, hangs or is cut off ends the others too, within the
timeout of the process group, with a sentence that names it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

Answer = TypeVar("Answer")

TIMEOUT = timedelta(seconds=120)  # of silence; a process group of your own has its own
BEAT_SECONDS = 30.0  # between signs of life while all examples are gone through
_ANSWER_SECONDS = 3.0  # within which a living rank answers when another one is lost
_BLOCK = 1 << 20  # numbers of an array that are sent at a time
# Of launchers that start several processes and name them in other ways than torchrun does.
_TASKS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
# Errors that are of the same kind on every rank.
_SAME_KIND = (ValueError, OSError, torch.OutOfMemoryError, MemoryError)


class RankLost(ConnectionError):
    """Another rank ended, hangs or can't be reached; `ranks`: which, as far as can be known."""

    def __init__(self, ranks: list[int], detail: str) -> None:
        super().__init__(detail)
        self.ranks = ranks


class Ranks:
    """The processes of one run. `rank`: this one's number. `count`: how many there are."""

    def __init__(self, group: Any = None) -> None:
        self.rank: int = 0 if group is None else dist.get_rank()
        self.count: int = 1 if group is None else group.size()
        self._group = group
        self._beat = time.monotonic()

    def __repr__(self) -> str:
        return f"<Ranks {self.rank} of {self.count}>"

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which has the run folder."""
        return self.rank == 0

    def first(self, work: Callable[[], Answer]) -> Answer:
        """What `work` returns on rank 0, where alone it is done; its error is raised by all."""
        if self.count == 1:
            return work()
        found, error = _attempted(work) if self.main else (None, None)
        told = [(found, _told(error))]
        self._wait(lambda: dist.broadcast_object_list(told, src=0, group=self._group))
        return self._settled([told[0]], error)[0]  # type: ignore[no-any-return]

    def together(self, work: Callable[[], Answer]) -> list[Answer]:
        """What `work` returns on each rank, in order; an error of one is raised by all."""
        if self.count == 1:
            return [work()]
        found, error = _attempted(work)
        while self._still_at_work(False):
            pass
        told: list[Any] = [None] * self.count
        self._wait(lambda: dist.all_gather_object(told, (found, _told(error)), group=self._group))
        return self._settled(told, error)

    def agree(self, what: str, value: Any) -> None:
        """ValueError, on all ranks, if some have another `value` than rank 0."""
        values = self.together(lambda: value)
        other = [rank for rank, its in enumerate(values) if its != values[0]]
        if other:
            raise ValueError(
                f"{what} is {values[other[0]]} on rank {other[0]} and {values[0]} on rank 0; the "
                "ranks of a job train one model, by the same call"
            )

    def beat(self) -> None:
        """A sign of life, every 30 s of long work that all ranks do `together`."""
        if self.count > 1 and time.monotonic() - self._beat >= BEAT_SECONDS:
            self._still_at_work(True)

    def _still_at_work(self, here: bool) -> bool:
        """Whether any rank is; each says it for itself."""
        at_work = torch.tensor([int(here)])
        self._wait(lambda: dist.all_reduce(at_work, group=self._group))
        self._beat = time.monotonic()
        return bool(at_work)

    def add_up(self, words: NDArray[np.int64], where: torch.device) -> None:
        """Replace whole numbers by their sums over all ranks: the barrier of every step."""
        if self.count == 1:
            return
        total = torch.from_numpy(words)
        if where.type == "cuda" and "nccl" in str(dist.get_backend_config()):
            there = total.to(where)
            self._wait(lambda: dist.all_reduce(there))
            total.copy_(there)
            return
        self._wait(lambda: dist.all_reduce(total, group=self._group))

    def agree_on(self, word: int) -> int:
        """Rank 0's word, in one small message."""
        if self.count == 1:
            return word
        told = torch.tensor([word])
        self._wait(lambda: dist.broadcast(told, src=0, group=self._group))
        return int(told)

    def all_words(self, *words: int) -> NDArray[np.int64]:
        """The words of every rank (ranks, words), in one small message."""
        mine = torch.tensor(words, dtype=torch.int64)
        if self.count == 1:
            return mine.numpy()[None]
        every = [torch.empty_like(mine) for _ in range(self.count)]
        self._wait(lambda: dist.all_gather(every, mine, group=self._group))
        return torch.stack(every).numpy()

    def gathered(self, value: Answer) -> list[Answer] | None:
        """On rank 0 the values of all ranks, in order."""
        if self.count == 1:
            return [value]
        every: list[Any] | None = [None] * self.count if self.main else None
        self._wait(lambda: dist.gather_object(value, every, dst=0, group=self._group))
        return every

    def from_first(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors, of the same shapes on all ranks, by those of rank 0."""
        if self.count == 1:
            return
        for tensor in tensors:
            here = tensor.detach().to("cpu", copy=True).contiguous()
            as_bytes = here.reshape(-1).view(torch.uint8)
            self._wait(partial(dist.broadcast, as_bytes, src=0, group=self._group))
            if not self.main:
                with torch.no_grad():
                    tensor.copy_(here)

    def to_first(self, part: NDArray[Any], edges: NDArray[np.int64]) -> NDArray[Any] | None:
        """On rank 0 the whole array, of which rank r has the numbers from edge r to edge r + 1."""
        if self.count == 1:
            return part
        if not self.main:
            self._send(part, 0)
            return None
        whole = np.empty((int(edges[-1]), *part.shape[1:]), part.dtype)
        whole[edges[0] : edges[1]] = part
        for rank in range(1, self.count):
            self._receive(whole[edges[rank] : edges[rank + 1]], rank)
        return whole

    def from_first_parts(
        self, whole: NDArray[np.float64] | None, edges: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """The reverse: this rank's part of rank 0's array."""
        if self.count == 1:
            assert whole is not None
            return whole
        if self.main:
            assert whole is not None
            for rank in range(1, self.count):
                self._send(whole[edges[rank] : edges[rank + 1]], rank)
            return whole[edges[0] : edges[1]].copy()
        part = np.empty(edges[self.rank + 1] - edges[self.rank])
        self._receive(part, 0)
        return part

    def fail(self, error: BaseException | None) -> NoReturn:
        """Raise the error that some ranks have, on all of them."""
        self.together(lambda: _raised(error))
        raise AssertionError("no rank has failed")

    def _send(self, part: NDArray[Any], to: int) -> None:
        for block in _blocks(part):
            sent = torch.from_numpy(np.array(block).view(np.uint8))
            self._wait(partial(dist.send, sent, to, group=self._group))

    def _receive(self, part: NDArray[Any], source: int) -> None:
        for block in _blocks(part):
            got = torch.empty(block.nbytes, dtype=torch.uint8)
            self._wait(partial(dist.recv, got, source, group=self._group))
            block[:] = got.numpy().view(block.dtype).reshape(block.shape)

    def _settled(self, told: list[Any], mine: BaseException | None) -> list[Any]:
        """The answers; if a rank has an error instead, that is raised, by its own rank as it is."""
        if mine is not None:
            raise mine
        for rank, (_, error) in enumerate(told):
            if error is not None:
                kind, text = error
                raise kind(f"rank {rank}: {text}")
        return [found for found, _ in told]

    def _wait(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            lost = self._silent()
            who = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}" if lost else "a rank"
            raise RankLost(
                lost,
                f"{who} ended, hangs or can't be reached. What may have been seen is charged; go "
                "on with the same command, or with another number of processes",
            ) from error

    def _silent(self) -> list[int]:
        """The ranks that don't answer, as far as the store that all of them know can tell."""
        others = [rank for rank in range(self.count) if rank != self.rank]
        try:
            store = dist.distributed_c10d._get_default_store()
            dist.destroy_process_group()  # who waits for this rank learns of it now
            store.set(f"epsilons/answers/{self.rank}", "1")
            until = time.monotonic() + _ANSWER_SECONDS
            while others and time.monotonic() < until:
                others = [r for r in others if not store.check([f"epsilons/answers/{r}"])]
                time.sleep(0.05)
        except (RuntimeError, AttributeError):
            return [0] if not self.main else []  # rank 0 held the store
        return others


ALONE = Ranks()


def joined() -> Ranks:
    """The ranks of this job, of which this process is one; the first call makes them known."""
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return ALONE
        return Ranks(dist.group.WORLD if "gloo" in str(dist.get_backend_config()) else _on_cpu())
    if not started_together():
        return ALONE
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if n not in os.environ]
    if missing:
        raise ValueError(
            f"this job has several processes without {', '.join(missing)} in the environment, so "
            "that they can't share a run: each would train a whole model on the same data. Start "
            "them by torchrun"
        )
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
        backend = "cpu:gloo,cuda:nccl"
    try:
        store, rank, count = next(rendezvous("env://", timeout=TIMEOUT))
        # what the processes before a restart wrote there would be taken for the others' addresses
        fresh = PrefixStore(f"epsilons {os.environ.get(_RESTARTS, '0')}", store)
        dist.init_process_group(backend, store=fresh, rank=rank, world_size=count, timeout=TIMEOUT)
    except RuntimeError as error:
        raise RankLost([], f"the ranks of this job did not find each other: {error}") from error
    return Ranks(dist.group.WORLD)


_on_cpu_groups: list[Any] = []


def _on_cpu() -> Any:
    if not _on_cpu_groups:
        _on_cpu_groups.append(dist.new_group(backend="gloo"))
    return _on_cpu_groups[0]


def started_together() -> bool:
    """Whether this process was started as one of several."""
    given = [name for name in ("WORLD_SIZE", *_TASKS) if name in os.environ]
    return bool(given) and os.environ[given[0]].isdigit() and int(os.environ[given[0]]) > 1


def local_rank() -> int:
    """Which of this machine's processes this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def restarted() -> bool:
    """Whether torchrun has started the processes of this job again after one was lost."""
    return int(os.environ.get(_RESTARTS) or "0") > 0


class Said(NamedTuple):
    """What the ranks say after the body of a step.

    `left`: one has left the loop. `finish`: one has ended the run. `signal`: that stops all, or 0.
    `save`: rank 0's last checkpoint is old.
    """

    left: bool
    finish: bool
    signal: int
    save: bool


def said(
    ranks: Ranks,
    *,
    left: bool = False,
    finish: bool = False,
    signal: int | None = None,
    save: bool = False,
) -> Said:
    """What all ranks say, this one among them."""
    words = ranks.all_words(int(left), int(finish), signal or 0, int(save))
    most = words.max(axis=0).tolist()
    return Said(bool(most[0]), bool(most[1]), most[2], bool(words[0, 3]))


def job_name() -> str | None:
    """What torchrun calls this job, in all its restarts; None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def expect_one_process(what: str, way_out: str) -> None:
    """A `ValueError` in a job of several processes, which `what` would not let share a run."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if together or started_together():
        raise ValueError(
            f"{what} is for one process, and this job has several: each would keep a run of its "
            f"own, as if the data were used once. {way_out}"
        )


def _attempted(work: Callable[[], Answer]) -> tuple[Answer | None, Exception | None]:
    try:
        return work(), None
    except RankLost:
        raise
    except Exception as error:
        return None, error


def _told(error: Exception | None) -> tuple[type[Exception], str] | None:
    """What the other ranks raise when one has this error."""
    if error is None:
        return None
    for kind in _SAME_KIND:
        if isinstance(error, kind):
            return kind, str(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


def _raised(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _blocks(part: NDArray[Any]) -> list[NDArray[Any]]:
    return [part[start : start + _BLOCK] for start in range(0, len(part), _BLOCK)]
