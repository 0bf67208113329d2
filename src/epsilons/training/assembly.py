"""A loop put together: what is trained, its passes and batches, and what it depends on."""

from __future__ import annotations

import torch

from epsilons.accounting.plan import Plan
from epsilons.gradients.compile import Compile
from epsilons.runs import Run
from epsilons.training.batches import Batches
from epsilons.training.checkpoint import State
from epsilons.training.distributed import Ranks
from epsilons.training.environment import environment, environment_of_all
from epsilons.training.loop import Loop
from epsilons.training.norm_passes import PASS_BATCH, NormPasses
from epsilons.training.owners import Unit
from epsilons.training.played import Played
from epsilons.training.shards import Shards


def assembled(
    run: Run,
    plan: Plan,
    state: State,
    unit: Unit,
    *,
    num_workers: int,
    seed: int | None,
    where: torch.device,
    compile: Compile,
    shards: Shards,
    ranks: Ranks,
    played: Played,
) -> Loop:
    """The loop of a run that stands nowhere yet; all ranks make theirs together."""
    passes = NormPasses(
        run, state.model, unit.loss_fn, unit.train, plan=plan, micro_batch=state.micro_batch,
        batch_size=max(1, PASS_BATCH // plan.records_at_once), collate_fn=unit.collate_fn,
        num_workers=num_workers, shards=shards, ranks=ranks,
    )  # fmt: skip
    passes.within_memory(lambda: passes.compile_if(compile), 0)
    passes.settle()
    batches = Batches(unit.train, plan, shards, collate_fn=unit.collate_fn, num_workers=num_workers)
    here = environment_of_all(ranks, shards, environment(where, passes.compiled))
    return Loop(
        run, plan, state, unit.loss_fn, batches, passes, seed, where, here, ranks, shards, played
    )  # fmt: skip
