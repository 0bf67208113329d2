"""The loop of a run: refresh, charge, step, record; checkpoints between.

Steps are charged in ranges, ahead of the first of them, so that a crash may overcount and never
undercounts. Norms of single examples are written when a range is complete.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting.plan import Plan
from epsilons.files import private_file
from epsilons.gradients.isolation import own_generators
from epsilons.gradients.norms import LossFn, trainable
from epsilons.journal.run_entries import phase_end, record_move
from epsilons.noise.grid import GridNoise
from epsilons.release.ledger import renew_ledger
from epsilons.runs import CHECKPOINT, Run, publish_plan
from epsilons.training.adaptive_bound import journal_unit, released_count
from epsilons.training.batches import Batches
from epsilons.training.checkpoint import (
    RELEASES,
    BeforeBody,
    Pending,
    Releases,
    ReplayDiffers,
    State,
    release_digest,
)
from epsilons.training.distributed import Ranks
from epsilons.training.interrupt import Interrupted
from epsilons.training.keys import Streams, destroy_keys, kept_key, new_key
from epsilons.training.movement import MOVED_BY, Movement, Trained
from epsilons.training.noisy_sum import Report
from epsilons.training.norm_passes import NormPasses
from epsilons.training.own_part import OwnPart, Part
from epsilons.training.played import Played
from epsilons.training.shards import Shards
from epsilons.training.standing import Standing, range_end
from epsilons.training.step import apply
from epsilons.training.taken import Step

CHECKPOINT_SECONDS = 30.0
_WITNESSED, _DIFFERS, _FAILED = range(3)  # what rank 0 says of a release


@dataclass
class Loop:
    """One run being carried out, by this process and others."""

    run: Run  # on rank 0; others know the plan, and where it is
    plan: Plan
    state: State = field(repr=False)  # has norms of single examples
    loss_fn: LossFn
    batches: Batches
    passes: NormPasses
    seed: int | None
    where: torch.device
    environment: dict[str, str]
    ranks: Ranks
    shards: Shards
    played: Played
    refresh_seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: {"refresh": 0.0, "step": 0.0})

    def __post_init__(self) -> None:
        self.releases: Releases | None = None  # on rank 0
        if self.ranks.main:
            self.releases = Releases(self.run.private / RELEASES, self.environment)
        self.state.shards = self.shards.count
        self.own = OwnPart(
            self.plan, self.state, self.loss_fn, self.batches, self.passes, self.where, self.shards,
            self.run.journal.bounds if self.plan.budgets else None,
        )  # fmt: skip
        self._trained = Trained.of(self.state.model, self.state.optimizer)
        self._replaying = False  # with the key of an earlier process
        self._released = 0  # the first step that no earlier process can have released
        self._replay_until = 0  # the first whose release is not on record
        self._digest = 0  # of the last release
        self._movement: Movement | None = None
        self._saved = time.monotonic()

    def restore(self, content: dict[str, Any] | None) -> None:
        """Start where the run stands: at its checkpoint, if it has one, or at its beginning."""
        self._stand = self.ranks.first(lambda: Standing.of(self.run.journal))
        if content is not None:
            self.state.load(content)
            self.own.norms_size = content["micro_batch"]
            self.passes.micro_batch = self.state.micro_batch
            if self.state.step > self._next_step:
                raise ValueError(
                    f"{self.run.path} has a checkpoint of step {self.state.step} and a journal "
                    f"with {self._stand.charged} steps charged: it was copied while a process was "
                    "writing to it. Copy the folder again when none is"
                )
        left = self.ranks.first(partial(self._left, content))
        key, again, self._released, self._replay_until = left
        if again:
            self._renew()
        elif key is not None and content is not None:
            self.state.streams = self._streams(*key)
            self.state.streams.seek(content["streams"])
            self._replaying = self.seed is None
        else:
            self._take_key(self._stand.restarts)
        if self._stand.restarts:  # in case a crash came before
            self.ranks.first(lambda: publish_plan(self.run))
        self.own.norms = self._norms_at(self.state.step)
        if self.state.step < MOVED_BY:
            self._movement = Movement(self.state.model)

    def advance(self, last: int) -> bool:
        """Take the next step, with what is due before and after it.

        False if it was charged before and has to be charged again first.
        """
        step = self.state.step
        if step == self._stand.charged != self._next_step:
            self._pass_over(self._next_step)
            return False
        self._trained.expect_same(self.state.model, self.state.optimizer, step)
        with own_generators(self.where, seed=0):  # each part of the step seeds them
            if self._replaying and step >= self._replay_until:
                self._take_key(self._stand.restarts)
            self._refresh(step)
            if step == self._next_step:
                self._charge(step, self._range_end(step, last))
            began = time.monotonic()
            try:
                self._step(step)
            except ReplayDiffers:
                self._renew()
                self.ranks.first(lambda: renew_ledger(self.run))
                return False
        self.spent["step"] += time.monotonic() - began
        self.state.step += 1
        if self._movement is not None and self.ranks.main:
            self._movement = self._movement.after(self.state.step, last)
        if self.state.step == self._range_end(step, last) + 1:
            self._flush()
        return True

    @property
    def _next_step(self) -> int:
        """The step to be charged next."""
        return self.run.journal.next_step if self.plan.budgets else self._stand.charged

    def _pass_over(self, step: int) -> None:
        """Go on at `step`: repeated steps took the place of those before it."""
        self._flush()
        self.state.step = step
        cast(Releases, self.releases).begin(step)
        self.save()

    def present(self) -> Step:
        """The step that was taken last."""
        state, number = self.state, self.state.step - 1
        return Step(
            number, state.model, state.optimizer, state.loss, self.run, number < self._released,
            self.ranks.main, lambda: self.plan.worst_case(steps=self._stand.counts),
        )  # fmt: skip

    @property
    def save_is_due(self) -> bool:
        """Whether the last checkpoint is old."""
        return time.monotonic() - self._saved > CHECKPOINT_SECONDS

    def save(self, before: BeforeBody | None = None) -> bool:
        """Write a checkpoint, if weights and optimizer are as they were `before`.

        ValueError if those of two processes differ.
        """
        self._saved = time.monotonic()
        self._gather()
        if self.ranks.count > 1:
            self.ranks.agree("the checksum of weights and optimizer", self.state.checksum())
        return self.ranks.first(lambda: self.state.save(self.run.private / CHECKPOINT, before))

    def leave(self, before: BeforeBody) -> None:
        """Save the run as it was `before` the body of the step that was taken last."""
        self.state.unseen = True
        with suppress(OSError):  # else the last checkpoint stands, and steps are replayed
            if self.save(before):
                self._let_go()

    def stop(self, signal: int, *, unseen: bool) -> NoReturn:
        """Save, so that the run can be resumed, and say so; `unseen`: before the body of a step."""
        self.state.unseen = unseen
        self.save()
        self._let_go()
        raise Interrupted(self.run.path, self.state.step, signal)

    def finish_steps(self) -> None:
        """After the last step: nothing is left to replay, and no key is needed."""
        self._flush()
        self.save()
        self.ranks.first(self._end)
        self.state.streams.destroy()

    def close(self) -> None:
        self.batches.close()
        if self.releases is not None:
            self.releases.close()

    def _end(self) -> None:
        destroy_keys(self.run.private)
        with private_file(self.run.private / "timings.json") as file:
            file.write(json.dumps(self.spent).encode())

    def _charge(self, first: int, last: int) -> None:
        """Charge a range of steps. Nobody goes on to them before it is on disk."""
        self.ranks.first(lambda: self.run.journal.charge(first, last))
        self._stand.charge(self.plan, first, last)

    def _refresh(self, step: int) -> None:
        """Norms of all examples, if they are due."""
        if not self.plan.refresh_due(step):
            return
        if step not in self._stand.refreshes:  # else a replay: the facts stand
            began = time.monotonic()
            found = self.passes.of_all(step, partial(self.state.streams.pass_seed, step))
            self.own.norms_size = self.passes.micro_batch
            if self.state.micro_batch != self.own.norms_size:  # memory ran out
                self.state.micro_batch = self.own.norms_size
                self.save()  # before: a replay must know of what size these passes were
            found = found / journal_unit(self.plan, self._stand.phase(self.plan, step), step)
            whole = self.ranks.to_first(found, self.shards.rank_edges)
            self.ranks.first(lambda: self.run.journal.record(step, cast(Any, whole)))
            self._stand.refreshes.add(step)
            self._stand.random |= self.passes.random
            self.refresh_seconds = time.monotonic() - began
            self.spent["refresh"] += self.refresh_seconds
        self.own.norms, self.own.norms_step = self._recorded(step), step

    def _step(self, step: int) -> None:
        state, own = self.state, self.own
        phase = self._stand.phase(self.plan, step)
        total = self.played.total(trainable(state.model), phase, self.shards)
        part, failed = Part(report=Report(failed=1)), None
        try:
            part = own.take(step, phase, total, random=self._stand.random, digest=self._digest)
        except Exception as error:
            if self.ranks.count == 1:
                raise
            failed = error
            total.clear()
        total.over(self.ranks, GridNoise(state.streams.noise), part.report, self.where)
        reports = total.reports()
        if any(each.failed for each in reports):
            self.ranks.fail(failed)
        total.expect_one_model()
        if self.passes.covered and any(each.uncovered for each in reports):
            self.passes.not_covered(step)
        released = total.released()
        self._witness(step, released)
        self._move(step, released_count(released, phase))
        apply(state.model, state.optimizer, released)
        self.passes.micro_batch = state.micro_batch = total.micro_batch()
        state.loss = total.loss()
        if state.scheduler is not None:
            state.scheduler.step()
        self.passes.note_non_finite(step, part.sampled[~np.isfinite(part.norms)])
        self._note_larger(step, reports)
        if own.says_more(self._stand.random):
            state.sampled_norms.add(step, part.sampled, part.norms)
        if len(state.followed):
            state.followed_norms.add(step, part.followed, part.followed_norms)

    def _note_larger(self, step: int, reports: list[Report]) -> None:
        larger = any(each.larger for each in reports)
        if not larger and not any(each.reshaped for each in reports):
            return
        estimate = self.ranks.first(lambda: self.run.journal.kind == "estimate")
        if larger or not estimate:
            self.ranks.first(lambda: self.run.journal.record_random("norms", step))
            self._stand.random = True

    def _move(self, step: int, released: float | None) -> None:
        """Move a clip bound that adapts. Nobody uses it before what it follows from is on disk."""
        if released is not None:
            self.ranks.first(lambda: record_move(self.run.journal, step, released))
            self._stand.move(self.plan, step, released)

    def _witness(self, step: int, released: dict[str, Tensor]) -> None:
        """Note what is released before anyone can see it, here or on another rank."""
        verdict, failed, digest = _WITNESSED, None, b""
        try:
            if self.releases is not None:
                digest = self.releases.witness(step, released)
            else:
                digest = release_digest(released)
        except ReplayDiffers:
            verdict = _DIFFERS
        except OSError as error:
            if self.ranks.count == 1:
                raise
            verdict, failed = _FAILED, error
        verdict = self.ranks.agree_on(verdict)
        if verdict == _FAILED:
            self.ranks.fail(failed)
        if verdict == _DIFFERS:
            raise ReplayDiffers
        self._digest = int.from_bytes(digest[:8], "big") >> 1

    def _range_end(self, step: int, last: int) -> int:
        """The last step of the range that begins at `step`."""
        promised = phase_end(self.run.journal, step) if self.plan.budgets else last
        return range_end(self.plan, step, min(last, promised))

    def _gather(self) -> None:
        """Bring to rank 0 what others have of single examples."""
        state, mine = self.state, self.passes.non_finite
        parts = self.ranks.gathered((state.sampled_norms, state.followed_norms, mine))
        state.sampled_norms, state.followed_norms = Pending(), Pending()
        self.passes.non_finite = []
        if parts is not None:
            state.sampled_norms = Pending.joined([sampled for sampled, _, _ in parts])
            state.followed_norms = Pending.joined([followed for _, followed, _ in parts])
            for step, indices in (pair for *_, found in parts for pair in found):
                self.passes.note_non_finite(step, indices)

    def _flush(self) -> None:
        """Write the norms of single examples that the journal does not have yet."""
        self._gather()
        self.ranks.first(lambda: self.state.write_norms(self.run.journal))
        self.state.sampled_norms, self.state.followed_norms = Pending(), Pending()

    def _renew(self) -> None:
        """Take a fresh key from here on; what is replayed is charged again."""
        self._flush()
        # the old key is gone before the journal goes back: a crash never leaves it with it
        self._take_key(self._stand.restarts + 1)
        self._stand = self.ranks.first(self._restarted)
        self.own.norms = self._norms_at(self.state.step)

    def _restarted(self) -> Standing:
        """Where the journal stands once it has gone back to the present step."""
        assert self.releases is not None
        self.run.journal.restart(self.state.step)
        self.releases.begin(self.state.step)
        publish_plan(self.run)
        return Standing.of(self.run.journal)

    def _take_key(self, restarts: int) -> None:
        """Draw from a fresh key, or from the seed's; a checkpoint says so before its first step."""
        if self._replaying:
            self.state.streams.destroy()
        if self.seed is None:
            key = self.ranks.first(lambda: new_key(self.run.private))
        else:
            key = restarts, b""
        self.state.streams = self._streams(*key)
        self.save()
        self.ranks.first(lambda: destroy_keys(self.run.private, but=self.state.streams.number))
        self._replaying = False

    def _streams(self, number: int, key: bytes) -> Streams:
        return self.played.streams(self.seed, number, key)

    def _left(
        self, content: dict[str, Any] | None
    ) -> tuple[tuple[int, bytes] | None, bool, int, int]:
        """What an earlier process left: its key, if it is there; whether to charge again; and.

        The first step that it cannot have released, and the first that it has not on record.
        """
        assert self.releases is not None
        step, key = self.state.step, None
        if content is not None:
            number = content["streams"]["key"]
            kept = kept_key(self.run.private, number) if self.seed is None else b""
            key = None if kept is None else (number, kept)
        released = max(step, self.releases.count)
        if self._stand.charged <= step:
            self.releases.begin(step)  # nothing beyond the checkpoint can have been released
        again = not self.releases.known_from(step) or (key is None and self.releases.has(step))
        return key, again, released, self.releases.count

    def _norms_at(self, step: int) -> NDArray[np.float64] | None:
        """The norms of this process's examples that hold before `step`, from the journal."""
        earlier = [t for t in self._stand.refreshes if t < step]
        return self._recorded(max(earlier)) if earlier else None

    def _recorded(self, step: int) -> NDArray[np.float64]:
        whole = self.run.journal.norms(step) if self.ranks.main else None
        return self.ranks.from_first_parts(whole, self.shards.rank_edges)

    def _let_go(self) -> None:
        if self.releases is not None and not self.releases.has(self.state.step):
            destroy_keys(self.run.private)  # who resumes takes a fresh one
