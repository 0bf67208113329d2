"""The loop of a run: refresh, charge, step, record; checkpoints between.

Steps are charged in ranges, ahead of the first of them, so that a crash may overcount and never
undercounts. Norms of single examples are written when a range is complete.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from epsilons.accounting.histories import clipping_thresholds
from epsilons.files import private_file
from epsilons.gradients.compile import Clipped
from epsilons.gradients.isolation import own_generators, seed_generators
from epsilons.gradients.norms import LossFn, trainable
from epsilons.journal import SomeKind
from epsilons.journal.run_entries import recorded_now
from epsilons.noise.grid import GridNoise
from epsilons.release.ledger import renew_ledger
from epsilons.runs import CHECKPOINT, Run, publish_plan
from epsilons.training.adaptive_bound import ClipBound
from epsilons.training.batches import Batches
from epsilons.training.checkpoint import (
    RELEASES,
    BeforeBody,
    Pending,
    Releases,
    ReplayDiffers,
    State,
    read_checkpoint,
)
from epsilons.training.evaluation import to_device
from epsilons.training.interrupt import Interrupted
from epsilons.training.keys import Streams, destroy_keys, kept_key, new_key
from epsilons.training.movement import MOVED_BY, Movement
from epsilons.training.norm_passes import NormPasses
from epsilons.training.step import taken_step

RANGE = 32  # steps charged ahead at most
CHECKPOINT_SECONDS = 30.0
# relative: by so much the norm of an example may differ between a pass over all and a step
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Step:
    """The step just taken.

    `number`: from 0. `loss`: mean of the batch, before the step; private, NaN of an empty batch.
    `replayed`: a process that was stopped had released this step, and may have shown it already.
    `model` and `optimizer`: as the step left them. `run`: the run folder.
    """

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: float = field(repr=False)
    run: Run
    replayed: bool

    @property
    def worst_case(self) -> float:
        """ε that the run guarantees for what is charged: up to this step, and a few ahead."""
        return self.run.journal.worst_case()


@dataclass
class Loop:
    """One run being carried out."""

    run: Run
    state: State = field(repr=False)  # has norms of single examples
    loss_fn: LossFn
    batches: Batches
    passes: NormPasses
    seed: int | None
    where: torch.device
    environment: dict[str, str]
    refresh_seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: {"refresh": 0.0, "step": 0.0})

    def __post_init__(self) -> None:
        self.plan = self.run.plan
        self.journal = self.run.journal
        self.releases = Releases(self.run.private / RELEASES, self.environment)
        self.bound = ClipBound(self.journal)
        self.norms: NDArray[np.float64] | None = None  # of all examples, as recorded
        self._norms_step: int | None = None  # of whose weights they are, if of the present ones
        self._norms_size = self.passes.micro_batch  # of the passes that measured them
        self._trained = self._what_is_trained()
        self._replaying = False  # with the key of an earlier process
        self._released = 0  # the first step that no earlier process can have released
        self._movement: Movement | None = None
        self._saved = time.monotonic()

    def restore(self) -> None:
        """Start where the run stands: at its checkpoint, or at its beginning."""
        charged, old = self.journal.steps_charged, None
        checkpoint = self.run.private / CHECKPOINT
        if checkpoint.exists():
            content = read_checkpoint(checkpoint)
            self.state.load(content)
            self._norms_size = content["micro_batch"]
            self.passes.micro_batch = self.state.micro_batch
            if self.state.step > charged:
                raise ValueError(
                    f"{self.run.path} has a checkpoint of step {self.state.step} and a journal "
                    f"with {charged} steps charged: it was copied while a process was writing to "
                    "it. Copy the folder again when none is"
                )
            old = self._streams(content["streams"])
        step = self.state.step
        self._released = max(step, self.releases.count)
        if charged == step:
            self.releases.begin(step)  # nothing beyond the checkpoint can have been released
        if not self.releases.known_from(step) or (old is None and self.releases.has(step)):
            self._renew()
        elif old is not None:
            self.state.streams, self._replaying = old, self.seed is None
        else:
            self._take_key(self.journal.restarts)
        if self.journal.restarts:
            publish_plan(self.run)  # in case a crash came before
        self.norms = self._norms_at(self.state.step)
        if self.state.step < MOVED_BY:
            self._movement = Movement(self.state.model)

    def advance(self, last: int) -> bool:
        """Take the next step, with what is due before and after it.

        False if it was charged before and has to be charged again first.
        """
        step = self.state.step
        if self._what_is_trained() != self._trained:
            raise ValueError(
                f"before step {step} the loop changed which parameters are trained, or which the "
                "optimizer has; they are fixed for a run. Freeze and unfreeze between two runs"
            )
        with own_generators(self.where, seed=0):  # each part of the step seeds them
            if self._replaying and not self.releases.has(step):
                self._take_key(self.journal.restarts)
            self._refresh(step)
            if step == self.journal.steps_charged:
                self.journal.charge(step, self._range_end(step, last))
            began = time.monotonic()
            try:
                self._step(step)
            except ReplayDiffers:
                self._renew()
                renew_ledger(self.run)
                return False
        self.spent["step"] += time.monotonic() - began
        self.state.step += 1
        if self._movement is not None:
            self._movement = self._movement.after(self.state.step, last)
        if self.state.step == self._range_end(step, last) + 1:
            self._flush()
        return True

    def present(self) -> Step:
        """The step that was taken last."""
        state = self.state
        number = state.step - 1
        return Step(
            number, state.model, state.optimizer, state.loss, self.run, number < self._released
        )

    def save_in_time(self) -> None:
        """Write a checkpoint if the last one is old."""
        if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
            self._save()

    def leave(self, before: BeforeBody) -> None:
        """Save the run as it was `before` the body of the step that was taken last."""
        self.state.unseen = True
        with suppress(OSError):  # else the last checkpoint stands, and steps are replayed
            if self._save(before):
                self._let_go()

    def stop(self, signal: int, *, unseen: bool) -> None:
        """Save, so that the run can be resumed, and say so; `unseen`: before the body of a step."""
        self.state.unseen = unseen
        self._save()
        self._let_go()
        raise Interrupted(self.run.path, self.state.step, signal)

    def finish_steps(self) -> None:
        """After the last step: nothing is left to replay, and no key is needed."""
        self._flush()
        self._save()
        destroy_keys(self.run.private)
        self.state.streams.destroy()
        with private_file(self.run.private / "timings.json") as file:
            file.write(json.dumps(self.spent).encode())

    def close(self) -> None:
        self.batches.close()
        self.releases.close()

    def _what_is_trained(self) -> tuple[list[str], list[int]]:
        groups = self.state.optimizer.param_groups
        return list(trainable(self.state.model)), [id(p) for g in groups for p in g["params"]]

    def _refresh(self, step: int) -> None:
        """Norms of all examples, if they are due."""
        if not self.plan.refresh_due(step):
            return
        if step not in self.journal.refreshes_now():  # else a replay: the facts stand
            began = time.monotonic()
            found = self.passes.of_all(step, self.state.streams.pass_seed(step))
            self._norms_size = self.passes.micro_batch
            if self.state.micro_batch != self._norms_size:  # memory ran out
                self.state.micro_batch = self._norms_size
                self._save()  # before: a replay must know of what size these passes were
            self.journal.record(step, found / self.bound.unit(step))
            self.refresh_seconds = time.monotonic() - began
            self.spent["refresh"] += self.refresh_seconds
        self.norms, self._norms_step = self.journal.norms(step), step

    def _step(self, step: int) -> None:
        state, phase, unit = self.state, self.bound.phase(step), self.bound.unit(step)
        indices, batch = self.batches.take(state.streams, step)
        if batch is not None:
            batch = to_device(batch, self.where)
        if len(state.followed):
            followed = self.passes.of_some(
                state.followed.numpy(), step, state.streams.pass_seed(step)
            )
        noise = _RecordedNoise(GridNoise(state.streams.noise), self.releases, step)

        def take() -> Clipped:
            seed_generators(state.streams.loss_seed(step))
            return taken_step(
                state.model,
                state.optimizer,
                self.loss_fn,
                batch,
                phase,
                noise=noise,
                bounds=self._bounds(step, indices, phase.max_grad_norm),
                micro_batch=self.passes.micro_batch,
                compile=self.passes.compiled,
            )

        taken = self.passes.within_memory(take, step, begun=lambda: noise.drawn)
        self.bound.move(step, taken.sums)
        state.micro_batch = self.passes.micro_batch
        state.loss = float(taken.losses.mean()) if len(indices) else float("nan")
        if state.scheduler is not None:
            state.scheduler.step()
        found = taken.norms.cpu().numpy()
        self.passes.note_non_finite(step, indices.numpy()[~np.isfinite(found)])
        found = found / unit  # as in the journal
        if self.plan.clipping == "max" and self._norms_step == step and not self.journal.random:
            same = self._norms_size == state.micro_batch
            self._expect_charged(step, indices.numpy(), found, same=same)
        if self._records_sampled():
            state.sampled_norms.add(step, indices.numpy(), found)
        if len(state.followed):
            state.followed_norms.add(step, state.followed.numpy(), followed / unit)

    def _expect_charged(
        self, step: int, indices: NDArray[np.int64], norms: NDArray[np.float64], *, same: bool
    ) -> None:
        """Note it if an example may have added more to this step than was charged just before.

        `same`: its pass was of the shape of the refresh.
        """
        assert self.norms is not None
        bound = self.plan.phase(step).max_grad_norm
        added = np.where(np.isfinite(norms), np.minimum(norms, bound), 0.0)
        charged = np.nan_to_num(self.norms[indices], nan=bound)
        more = (added > charged * (1 + _ROUNDING) + _ROUNDING**2 * bound).any()
        if more or (not same and self.journal.kind != "estimate"):
            self.journal.record_random("norms", step)

    def _records_sampled(self) -> bool:
        """Whether the norms that a step computes say more than those of its refresh."""
        if self.plan.clipping != "max" or self.norms is None:
            return False
        return self.plan.refresh_every != 1 or bool(self.journal.random)

    def _bounds(self, step: int, indices: Tensor, bound: float) -> float | Tensor:
        """Clip bounds of the drawn examples, or the common one, `bound`."""
        if self.plan.clipping == "none":
            return float("inf")
        if self.plan.clipping == "max":
            return bound
        assert self.norms is not None  # thresholds are refreshed at step 0
        chosen, unit = self.norms[indices.numpy()], self.plan.phase(step).max_grad_norm
        thresholds = clipping_thresholds(chosen, unit, self.plan.levels)
        return torch.from_numpy(np.minimum(thresholds * (bound / unit), bound))

    def _range_end(self, step: int, last: int) -> int:
        """The last step of the range that begins at `step`: within one refresh and phase."""
        end, phase = min(step - step % RANGE + RANGE, last), self.plan.phase(step)
        others = (
            t for t in range(step + 1, end) if self.plan.refresh_due(t) or not phase.count(t, t + 1)
        )
        return next(others, end) - 1

    def _flush(self) -> None:
        """Write the norms of single examples that the journal does not have yet."""
        waiting: dict[SomeKind, Pending] = {
            "sampled": self.state.sampled_norms,
            "followed": self.state.followed_norms,
        }
        for kind, norms in waiting.items():
            if norms.indices and not recorded_now(self.journal, kind, norms.first):
                self.journal.record_some(kind, norms.first, norms.indices, norms.norms)
        self.state.sampled_norms, self.state.followed_norms = Pending(), Pending()

    def _renew(self) -> None:
        """Take a fresh key from here on; what is replayed is charged again."""
        self._flush()
        # the old key is gone before the journal goes back: a crash never leaves it with it
        self._take_key(self.journal.restarts + 1)
        self.journal.restart(self.state.step)
        self.releases.begin(self.state.step)
        publish_plan(self.run)
        self.norms = self._norms_at(self.state.step)

    def _take_key(self, restarts: int) -> None:
        """Draw from a fresh key, or from the seed's; a checkpoint says so before its first step."""
        if self._replaying:
            self.state.streams.destroy()
        if self.seed is None:
            self.state.streams = new_key(self.run.private)
        else:
            self.state.streams = Streams.seeded(self.seed, restarts)
        self._save()
        destroy_keys(self.run.private, but=self.state.streams.number)
        self._replaying = False

    def _streams(self, state: dict[str, int]) -> Streams | None:
        """The streams of a checkpoint; None if their key is gone."""
        if self.seed is None:
            streams = kept_key(self.run.private, state["key"])
        else:
            streams = Streams.seeded(self.seed, state["key"])
        if streams is not None:
            streams.seek(state)
        return streams

    def _norms_at(self, step: int) -> NDArray[np.float64] | None:
        """The norms of all examples that hold before `step`, from the journal."""
        earlier = [t for t in self.journal.refreshes_now() if t < step]
        return self.journal.norms(earlier[-1]) if earlier else None

    def _let_go(self) -> None:
        if not self.releases.has(self.state.step):
            destroy_keys(self.run.private)  # who resumes takes a fresh one

    def _save(self, before: BeforeBody | None = None) -> bool:
        self._saved = time.monotonic()
        return self.state.save(self.run.private / CHECKPOINT, before)


class _RecordedNoise:
    """Noise whose results are noted before anyone can see them."""

    def __init__(self, noise: GridNoise, releases: Releases, step: int) -> None:
        self._noise, self._releases, self._step = noise, releases, step
        self.drawn = False

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        self.drawn = True
        released = self._noise.added_to(sums, std, divisor)
        self._releases.witness(self._step, released)
        return released
