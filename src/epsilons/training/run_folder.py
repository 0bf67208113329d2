"""The folder of a run: begun, or opened again if it is the same run."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.margins import Margin
from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.files import destroy, private_file
from epsilons.gradients.norms import LossFn, trainable
from epsilons.journal.run_entries import record_identity, recorded_identity
from epsilons.randomness import Randomness
from epsilons.release.ledger import renew_ledger
from epsilons.runs import CHECKPOINT, Run, discard_unbegun
from epsilons.training.checkpoint import RELEASES, Stateful, plain_state, read_checkpoint
from epsilons.training.distributed import ALONE, Ranks
from epsilons.training.identity import LOSS, difference, with_digests
from epsilons.training.inspection import inspect_start
from epsilons.training.memory import halved
from epsilons.training.owners import Unit
from epsilons.training.sampling import Collate
from epsilons.training.step import most_examples, pass_sizes

_STATE = "state.pt"  # in the private half


def begin_run(
    out: Path,
    plan: Plan,
    model: nn.Module,
    loss_fn: LossFn,
    train: Dataset[Any],
    *,
    examples: Examples | None = None,
    seed: int | None = None,
    randomness: Randomness | None = None,
    micro_batch: int | None = None,
    own_steps: bool = True,
    collate_fn: Collate = default_collate,
    shards: int = 1,
    ranks: Ranks = ALONE,
) -> Run:
    """A new run folder, once model, loss and data are found to be fit for private training.

    `own_steps`: whether steps are `private_step`'s, whose noise is on a grid, with so many
    `shards`. All `ranks` look, and rank 0 makes the folder.
    """
    if shards < ranks.count:
        raise ValueError(
            f"shards={shards}, and there are {ranks.count} processes; expected at least one for "
            "each"
        )
    names = named(examples, plan, train)
    sizes = pass_sizes(plan, micro_batch, shards) if own_steps else set()
    every = ranks.together(
        lambda: inspect_start(
            model, loss_fn, train, most=micro_batch, sizes=sizes, collate_fn=collate_fn
        )
    )
    count = sum(p.numel() for p in trainable(model).values()) if own_steps else None
    if count is not None and plan.adaptive is not None:
        count *= 4  # in units of the bound the grid may be twice as coarse as at the first: 2√d
    digested = with_digests(names, train, ranks)
    run: Run | None = None

    def create() -> None:
        nonlocal run
        run = Run.create(
            out,
            plan,
            digested,
            random_loss=any(found.random_loss for found in every),
            random_data=any(found.random_data for found in every),
            batch_invariant=all(found.batch_invariant for found in every),
            margin=Margin(parameters=count),
            seed=seed,
            randomness=randomness,
        )

    ranks.first(create)
    return cast(Run, RunElsewhere(out)) if run is None else run


def reopened_or_begun(
    out: Path,
    me: Mapping[str, str],
    plan: Plan,
    model: nn.Module,
    unit: Unit,
    names: Examples,
    *,
    seed: int | None,
    shards: int,
    ranks: Ranks,
) -> tuple[Run, bool, int | None]:
    """The run at `out`, whether it was there, and the micro-batch, less if memory ran out."""
    run, micro_batch = cast(Run | None, None), unit.micro_batch

    def reopened() -> bool:
        nonlocal run
        run = reopened_run(out, me, seed, may_be_finished=True)
        return run is not None

    resumed = begun = ranks.first(reopened)
    while not begun:
        try:
            run = begin_run(
                out, plan, model, unit.loss_fn, unit.train, examples=names, seed=seed,
                randomness=Randomness.of_fit(seed), micro_batch=micro_batch,
                collate_fn=unit.collate_fn, shards=shards, ranks=ranks,
            )  # fmt: skip
            begun = True
        except (RuntimeError, MemoryError) as error:
            size = most_examples(plan.phase(0), micro_batch, shards)
            micro_batch = halved(error, size, "in the checks before training")

    def identified() -> None:
        assert run is not None
        if recorded_identity(run.journal) is None:
            record_identity(run.journal, me)

    ranks.first(identified)
    return cast(Run, RunElsewhere(out)) if run is None else run, resumed, micro_batch


def take_over(run: Run, model: nn.Module, kept: Sequence[Stateful], ranks: Ranks) -> None:
    """Load what a finished run has come to."""

    def result() -> tuple[Any, list[Any]]:
        weights = torch.load(run.model_file, map_location="cpu", weights_only=True)
        return weights, final_state(run, len(kept))

    weights, states = ranks.first(result)
    model.load_state_dict(weights)
    for each, state in zip(kept, states, strict=True):
        each.load_state_dict(state)


class RunElsewhere:
    """The run folder as other ranks than 0 have it: opened for reading whenever it is used.

    `path`: where rank 0 has it. ValueError if it can't be seen from here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            run = Run.open(self.path)
        except (ValueError, OSError) as error:
            raise ValueError(
                f"the run folder is rank 0's, and {self.path} can't be read here: {error}. Use it "
                "on rank 0 alone, if step.main"
            ) from error
        return getattr(run, name)


def named(examples: Examples | None, plan: Plan, train: Dataset[Any]) -> Examples:
    """The examples, numbered if no names are given; ValueError unless they are the plan's n."""
    n = len(train)  # type: ignore[arg-type]
    names = Examples.numbered(plan.n) if examples is None else examples
    if n != plan.n or len(names) != n:
        raise ValueError(f"the data set has {n} examples; the plan says n={plan.n}")
    return names


def reopened_run(
    out: Path, me: Mapping[str, str], seed: int | None, *, may_be_finished: bool = False
) -> Run | None:
    """The run at `out` for going on with it; None if nothing was begun there.

    ValueError with the difference if it is not the same run. A change of the loss is warned of.
    """
    if not (out / "private" / "journal.sqlite").exists():
        discard_unbegun(out)
        return None
    run = Run.open(out)
    if not run.finished:
        run.journal.close()
        run = Run.open(out, writable=True)
    elif not may_be_finished:
        raise ValueError(f"{out} is finished; there is nothing to resume")
    if run.journal.steps_charged:
        run.journal.check()  # bounds of individual clipping are read from it
    if run.seed != seed:
        secret, way = ("secret", "without a seed") if run.seed is None else ("no secret", "with it")
        raise ValueError(
            f"seed={seed}, and {out} was begun with seed={run.seed}: its sampling and noise are "
            f"{secret} and stay so. Go on {way}"
        )
    before = recorded_identity(run.journal)
    if before is None:
        if run.journal.steps_charged:
            raise ValueError(
                f"the journal of {out} doesn't say of which data set and model it is; go on with "
                "the version that began the run"
            )
        return run
    changed = difference(before, dict(me), besides=LOSS)
    if changed:
        raise ValueError(f"{out} is a run of something else: {changed}")
    if before[LOSS] != me[LOSS]:
        warnings.warn(
            f"{out} was begun with another loss: loss_fn was {before[LOSS]} and is {me[LOSS]}",
            stacklevel=4,
        )
    return run


def seal_run(run: Run, model: nn.Module, kept: Sequence[Stateful] = ()) -> None:
    """End a run: its weights are saved, its journal is sealed, and no step can be replayed.

    `kept`: objects whose final state is saved beside the weights.
    """
    if kept:
        with private_file(run.private / _STATE) as file:
            states = [each.state_dict() for each in kept]
            torch.save([plain_state(state, f"state[{k}]") for k, state in enumerate(states)], file)
    with private_file(run.model_file) as file:
        torch.save(model.state_dict(), file)
    _seal(run)


def end_sealed(path: Path) -> None:
    """Do what is left of `seal_run`, which was stopped after the journal was sealed."""
    run = Run.open(path, writable=True)
    checkpoint = run.private / CHECKPOINT
    if not run.model_file.exists():
        if not checkpoint.exists():
            raise ValueError(
                f"{path} is finished, and its weights are gone: {run.model_file} is not there; put "
                "it back from a copy"
            )
        with private_file(run.model_file) as file:
            torch.save(read_checkpoint(checkpoint)["model"], file)
    _seal(run)
    run.journal.close()


def final_state(run: Run, count: int) -> list[Any]:
    """The final states of the `count` objects that were given to `seal_run`; none if it is 0."""
    if not count:
        return []
    file = run.private / _STATE
    if not file.exists():
        raise ValueError(
            f"{run.path} is finished and has no final state of the objects in state: it was "
            "trained without them, or by an earlier version. Leave state out for the weights alone"
        )
    found: list[Any] = torch.load(file, map_location="cpu", weights_only=True)
    if len(found) != count:
        raise ValueError(
            f"the run keeps the state of {len(found)} objects, and state has {count}; give the "
            "same ones in the same order"
        )
    return found


def _seal(run: Run) -> None:
    run.journal.seal()
    renew_ledger(run)  # what the individual ε's are worth is known only now
    destroy(run.private / RELEASES)
    destroy(run.private / CHECKPOINT)
