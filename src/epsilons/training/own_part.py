"""OwnPart: what one process adds to a step from its shards: clipped sums, norms of examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.plan import Phase, Plan
from epsilons.gradients.isolation import seed_generators
from epsilons.gradients.norms import LossFn
from epsilons.training.adaptive_bound import journal_unit
from epsilons.training.batches import Batches, Drawn
from epsilons.training.checkpoint import State
from epsilons.training.evaluation import to_device
from epsilons.training.noisy_sum import NoisySum, Report
from epsilons.training.norm_passes import NormPasses
from epsilons.training.shards import Shards
from epsilons.training.step import clipped_sum, without_out

# relative: by so much the norm of an example may differ between a pass over all and a step
_ROUNDING = 1e-3
_Indices = NDArray[np.int64]
_Norms = NDArray[np.float64]


class Part(NamedTuple):
    """What a process found besides its sums: who was drawn and followed, and their norms."""

    report: Report
    sampled: _Indices = np.empty(0, np.int64)
    norms: _Norms = np.empty(0)
    followed: _Indices = np.empty(0, np.int64)
    followed_norms: _Norms = np.empty(0)


@dataclass
class OwnPart:
    """The part of one process; the other fields are those of the loop."""

    plan: Plan
    state: State = field(repr=False)
    loss_fn: LossFn
    batches: Batches
    passes: NormPasses
    where: torch.device
    shards: Shards
    promised: Callable[[int, _Indices], _Norms] | None  # bounds that keep promises, at a step

    def __post_init__(self) -> None:
        self.norms: _Norms | None = None  # of this process's examples, as recorded
        self.norms_step: int | None = None  # of whose weights they are, if of the present ones
        self.norms_size = self.passes.micro_batch  # of the passes that measured them

    def take(self, step: int, phase: Phase, total: NoisySum, *, random: bool, digest: int) -> Part:
        """Add to `total` what this process's examples add at `step`.

        `phase`: of the step, with the clip bound that it has; norms come back in units in which it
        stays. `random`: whether norms of a refresh are known to differ from those of a step.
        `digest`: of the last release.
        """
        drawn = [self._within(step, each) for each in self.batches.take(self.state.streams, step)]
        followed, followed_norms = self._followed(step)
        found = self.passes.within_memory(partial(self._sums, step, drawn, phase, total), step)
        unit = journal_unit(self.plan, phase, step)
        sampled = torch.cat([each.indices for each in drawn]).numpy()
        norms = np.concatenate(found) / unit
        fresh = self.plan.clipping == "max" and self.norms_step == step and not random
        report = Report(
            larger=int(fresh and self._larger(step, sampled, norms)),
            reshaped=int(fresh and self.norms_size != self.passes.micro_batch),
            uncovered=int(not self.passes.covered),
            micro_batch=self.passes.micro_batch or 0,
            digest=digest,
        )
        return Part(report, sampled, norms, followed, followed_norms / unit)

    def says_more(self, random: bool) -> bool:
        """Whether the norms that a step computes say more than those of its refresh."""
        if self.plan.clipping != "max" or self.norms is None:
            return False
        return self.plan.refresh_every != 1 or random

    def _sums(self, step: int, drawn: list[Drawn], phase: Phase, total: NoisySum) -> list[_Norms]:
        """Add up the clipped sums of the shards; the norms in each."""
        total.clear()
        norms, state = [], self.state
        for shard, indices, batch in drawn:
            seed_generators(state.streams.loss_seed(step, shard))
            found = clipped_sum(
                state.model,
                state.optimizer,
                self.loss_fn,
                to_device(batch, self.where),
                phase,
                bounds=self._bounds(step, indices, phase.max_grad_norm),
                micro_batch=self.passes.micro_batch,
                shards=self.shards.count,
                compile=self.passes.compiled,
            )
            total.add(shard, found)
            norms.append(found.norms.cpu().numpy())
        return norms

    def _followed(self, step: int) -> tuple[_Indices, _Norms]:
        """The followed examples of this process, and their norms."""
        followed, streams = self.state.followed.numpy(), self.state.streams
        shares = [(shard, some) for shard, some in self.shards.among(followed) if len(some)]
        norms = [
            self.passes.of_some(some, step, streams.pass_seed(step, shard))
            for shard, some in shares
        ]
        which = [some for _, some in shares]
        return np.concatenate([followed[:0], *which]), np.concatenate([np.empty(0), *norms])

    def _within(self, step: int, drawn: Drawn) -> Drawn:
        """What was drawn, without the examples that have spent all that they were promised."""
        if self.plan.clipping != "filtered":
            return drawn
        bounds = self._bounds(step, drawn.indices, self.plan.phase(step).max_grad_norm)
        indices, batch, _ = without_out(drawn.indices, drawn.batch, bounds)
        return Drawn(drawn.shard, indices, batch)

    def _bounds(self, step: int, indices: Tensor, bound: float) -> float | Tensor:
        """Clip bounds of the drawn examples, or the common one."""
        if self.plan.clipping == "none":
            return float("inf")
        if self.promised is not None:
            return torch.from_numpy(self.promised(step, indices.numpy()))
        if self.plan.clipping == "max":
            return bound
        assert self.norms is not None  # thresholds are refreshed at step 0
        unmoved = self.plan.phase(step).max_grad_norm
        chosen = self.norms[indices.numpy() - self.shards.first]
        thresholds = clipping_thresholds(chosen, unmoved, self.plan.levels)
        return torch.from_numpy(np.minimum(thresholds * (bound / unmoved), bound))

    def _larger(self, step: int, indices: _Indices, norms: _Norms) -> bool:
        """Whether an example may have added more to this step than was charged just before."""
        assert self.norms is not None
        bound = self.plan.phase(step).max_grad_norm
        own = np.asarray(self._bounds(step, torch.from_numpy(indices), bound))
        added = np.where(np.isfinite(norms), np.minimum(norms, own), 0.0)
        charged = np.fmin(self.norms[indices - self.shards.first], own)  # own where there is none
        return bool((added > charged * (1 + _ROUNDING) + _ROUNDING**2 * bound).any())
