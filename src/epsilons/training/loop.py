"""The loop of a run: refresh, charge, step, record; checkpoints between.

Steps are charged in ranges, ahead of the first of them, so that a crash may overcount and never
undercounts. Norms of single examples are written when a range is complete.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from epsilons.accounting.histories import clipping_thresholds
from epsilons.gradients.model_checks import MixedExamples
from epsilons.gradients.norms import LossFn, gradient_norms
from epsilons.journal import SomeKind
from epsilons.noise.grid import GridNoise
from epsilons.noise.keystream import poisson_draw
from epsilons.release.ledger import renew_ledger
from epsilons.runs import Run
from epsilons.training.checkpoint import Pending, Releases, ReplayDiffers, State, read_checkpoint
from epsilons.training.evaluation import to_device
from epsilons.training.inspection import bits_agree, inspect_refresh
from epsilons.training.interrupt import Interrupted
from epsilons.training.keys import Streams, destroy_keys, kept_key, new_key
from epsilons.training.sampling import batch_of
from epsilons.training.step import charged_norms, pass_sizes, refresh_examples, taken_step

RANGE = 32  # steps charged ahead at most
CHECKPOINT_SECONDS = 30.0
# relative: by so much the norm of an example may differ between a pass over all and a step
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Step:
    """What `on_step` is told: the step just taken (from 0). The loss is private."""

    number: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: float
    run: Run


@dataclass
class Loop:
    """One run being carried out."""

    run: Run
    state: State
    loss_fn: LossFn
    train: Dataset[Any]
    seed: int | None
    where: torch.device
    micro_batch: int | None
    pass_batch: int
    environment: dict[str, str]
    loss: float = float("nan")
    refresh_seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: {"refresh": 0.0, "step": 0.0})

    def __post_init__(self) -> None:
        self.plan = self.run.plan
        self.journal = self.run.journal
        self.releases = Releases(self.run.releases_file, self.environment)
        self.norms: NDArray[np.float64] | None = None  # of all examples, as recorded
        self._norms_step: int | None = (
            None  # the step whose model they are of, if that is the present one
        )
        self._replaying = False  # with the key of an earlier call of `fit`
        self._saved = time.monotonic()

    def restore(self) -> None:
        """Start where the run stands: at its checkpoint, or at its beginning."""
        charged, old = self.journal.steps_charged, None
        if self.run.checkpoint_file.exists():
            content = read_checkpoint(self.run.checkpoint_file)
            self.state.load(content)
            if self.state.step > charged:
                raise ValueError(
                    f"{self.run.path} has a checkpoint of step {self.state.step} and a journal "
                    f"with {charged} steps charged: it was copied while a process was writing to "
                    "it. Copy the folder again when none is"
                )
            old = self._streams(content["streams"])
        step = self.state.step
        if charged == step:
            self.releases.begin(step)  # nothing beyond the checkpoint can have been released
        if not self.releases.known_from(step) or (old is None and self.releases.has(step)):
            self._renew()
        elif old is not None:
            self.state.streams, self._replaying = old, self.seed is None
        else:
            self._take_key(self.journal.restarts)
        if self.journal.restarts:
            self.run.publish_plan()  # in case a crash came before
        self.norms = self._norms_at(self.state.step)

    def test_again(self) -> None:
        """Test batch invariance as before training: machine, threads or passes may be others."""
        sizes = pass_sizes(self.plan, self.micro_batch)
        covered = self.journal.sums_covered
        if covered and not bits_agree(self.state.model, self.loss_fn, self.train, sizes):
            self.journal.record_batch_dependence(self.state.step)
            renew_ledger(self.run)

    def advance(self, last: int) -> bool:
        """Take the next step, with what is due before and after it.

        False if it was charged before and has to be charged again first.
        """
        step = self.state.step
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
            return False
        self.spent["step"] += time.monotonic() - began
        self.state.step += 1
        if self.state.step == self.journal.steps_charged:
            self._flush()
        if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
            self._save()
        return True

    def stop(self, signal: int) -> None:
        """Save, so that the run can be resumed, and say so."""
        self._save()
        if not self.releases.has(self.state.step):
            destroy_keys(self.run.private)  # the next call takes a fresh one
        raise Interrupted(self.run.path, self.state.step, signal)

    def finish_steps(self) -> None:
        """After the last step: nothing is left to replay, and no key is needed."""
        self._flush()
        self._save()
        destroy_keys(self.run.private)
        self.state.streams.destroy()
        self.run.save_timings(self.spent)

    def close(self) -> None:
        self.releases.close()

    def _refresh(self, step: int) -> None:
        """Norms of all examples, if they are due; at a phase, the bounds that go on holding."""
        due = self.plan.refresh_due(step)
        boundary = step > 0 and self.plan.phase(step).first == step
        if not due and (self.norms is None or not boundary):
            return
        if step in self.journal.refreshes_now():
            self.norms = self.journal.norms(step)  # a replay: the facts stand
            self._norms_step = step if due else None
            return
        began = time.monotonic()
        if due or self.norms is None:
            self._inspect(step)
            found = gradient_norms(
                self.state.model,
                self.loss_fn,
                self.train,
                batch_size=refresh_examples(self.plan, step, self.micro_batch, self.pass_batch),
                seed=self.state.streams.pass_seed(step),
            )
            self._note_non_finite(step, np.flatnonzero(~np.isfinite(found)))
            self.norms = self._charged(found, step)
            self._norms_step = step
        elif self.plan.clipping == "individual":
            before = self.plan.phase(step - 1)
            self.norms = clipping_thresholds(self.norms, before.max_grad_norm, self.plan.levels)
        self.journal.record(step, self.norms)
        self.refresh_seconds = time.monotonic() - began
        self.spent["refresh"] += self.refresh_seconds

    def _inspect(self, step: int) -> None:
        """Note what is random or no longer covered; a loss that mixes examples ends the run."""
        sizes = pass_sizes(self.plan, self.micro_batch) if self.journal.sums_covered else ()
        try:
            found = inspect_refresh(
                self.state.model,
                self.loss_fn,
                self.train,
                step,
                most=self.pass_batch,
                sizes=sizes,
            )
        except MixedExamples:
            if self.journal.steps_charged:
                self.journal.record_mixing(step)
            raise
        if found.random_loss:
            self.journal.record_random("loss", step)
        if found.random_data:
            self.journal.record_random("data", step)
        if sizes and not found.batch_invariant:
            self.journal.record_batch_dependence(step)
            renew_ledger(self.run)

    def _step(self, step: int) -> None:
        state, phase = self.state, self.plan.phase(step)
        torch.manual_seed(state.streams.loss_seed(step))
        indices = poisson_draw(state.streams.sampling, self.plan.n, phase.sample_rate)
        batch = to_device(batch_of(self.train, indices), self.where) if len(indices) else None
        if len(state.followed):
            followed = gradient_norms(
                state.model,
                self.loss_fn,
                Subset(self.train, state.followed.tolist()),
                batch_size=self.pass_batch,
                seed=state.streams.pass_seed(step),
            )
        taken = taken_step(
            state.model,
            state.optimizer,
            self.loss_fn,
            batch,
            phase,
            noise=_RecordedNoise(GridNoise(state.streams.noise), self.releases, step),
            bounds=self._bounds(indices, phase.max_grad_norm),
            micro_batch=self.micro_batch,
        )
        if len(indices):
            self.loss = float(taken.losses.mean())
        if state.scheduler is not None:
            state.scheduler.step()
        found = taken.norms.cpu().numpy()
        self._note_non_finite(step, indices.numpy()[~np.isfinite(found)])
        if self.plan.clipping == "max" and self._norms_step == step and not self.journal.random:
            self._expect_charged(step, indices.numpy(), found)
        if self._records_sampled():
            state.sampled_norms.add(step, indices.numpy(), self._charged(found, step))
        if len(state.followed):
            state.followed_norms.add(step, state.followed.numpy(), self._charged(followed, step))
        if callable(state.callback):
            state.callback(Step(step, state.model, state.optimizer, self.loss, self.run))

    def _expect_charged(
        self, step: int, indices: NDArray[np.int64], norms: NDArray[np.float64]
    ) -> None:
        """Note it if an example added more to this step than was charged for it just before."""
        assert self.norms is not None
        bound = self.plan.phase(step).max_grad_norm
        added = np.where(np.isfinite(norms), np.minimum(norms, bound), 0.0)
        charged = np.nan_to_num(self.norms[indices], nan=bound)
        if (added > charged * (1 + _ROUNDING) + _ROUNDING**2 * bound).any():
            self.journal.record_random("norms", step)

    def _records_sampled(self) -> bool:
        """Whether the norms that a step computes say more than those of its refresh."""
        if self.plan.clipping != "max" or self.norms is None:
            return False
        return self.plan.refresh_every != 1 or bool(self.journal.random)

    def _charged(self, norms: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        return charged_norms(norms, self.state.model, self.plan.phase(step))

    def _bounds(self, indices: Tensor, bound: float) -> float | Tensor:
        """Clip bounds of the drawn examples, or the common one."""
        if self.plan.clipping == "none":
            return float("inf")
        if self.plan.clipping == "max":
            return bound
        assert self.norms is not None  # thresholds are refreshed at step 0
        chosen = self.norms[indices.numpy()]
        return torch.from_numpy(clipping_thresholds(chosen, bound, self.plan.levels))

    def _range_end(self, step: int, last: int) -> int:
        """The last step of the range that begins at `step`: within one refresh and phase."""
        end = min(step - step % RANGE + RANGE, last, self.plan.phase(step).end)
        return next((t for t in range(step + 1, end) if self.plan.refresh_due(t)), end) - 1

    def _flush(self) -> None:
        """Write the norms of single examples that the journal does not have yet."""
        waiting: dict[SomeKind, Pending] = {
            "sampled": self.state.sampled_norms,
            "followed": self.state.followed_norms,
        }
        for kind, norms in waiting.items():
            if norms.indices and not self.journal.recorded_now(kind, norms.first):
                self.journal.record_some(kind, norms.first, norms.indices, norms.norms)
        self.state.sampled_norms, self.state.followed_norms = Pending(), Pending()

    def _renew(self) -> None:
        """Take a fresh key from here on; what is replayed is charged again."""
        self._flush()
        # the old key is gone before the journal goes back: a crash never leaves it with it
        self._take_key(self.journal.restarts + 1)
        self.journal.restart(self.state.step)
        self.releases.begin(self.state.step)
        self.run.publish_plan()
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

    def _streams(self, state: dict[str, Any]) -> Streams | None:
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

    def _note_non_finite(self, step: int, indices: NDArray[np.int64]) -> None:
        """Name the examples without a finite gradient, in private."""
        if len(indices):
            ids = self.run.examples.ids[indices].tolist()
            self.run.append_line("non_finite.jsonl", json.dumps({"step": step, "ids": ids}))

    def _save(self) -> None:
        self.state.save(self.run.checkpoint_file)
        self._saved = time.monotonic()


class _RecordedNoise:
    """Noise whose results are noted before anyone can see them."""

    def __init__(self, noise: GridNoise, releases: Releases, step: int) -> None:
        self._noise, self._releases, self._step = noise, releases, step

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        released = self._noise.added_to(sums, std, divisor)
        self._releases.witness(self._step, released)
        return released
