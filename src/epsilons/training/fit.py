"""fit: a plan carried out. Loader → step → journal, and what the run leaves behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset

from epsilons.accounting import checks
from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.files import alone_in, destroy, needing_room, private_file
from epsilons.gradients.norms import LossFn, check_loss_fn, trainable
from epsilons.journal import Journal
from epsilons.noise.keystream import Keystream
from epsilons.randomness import Randomness
from epsilons.release.ledger import renew_ledger
from epsilons.runs import Run
from epsilons.training.checkpoint import State
from epsilons.training.environment import environment, usable_device
from epsilons.training.evaluation import CorrectFn, outcomes
from epsilons.training.identity import (
    LOSS,
    difference,
    identity,
    loss_identity,
    with_digests,
)
from epsilons.training.inspection import inspect_start
from epsilons.training.interrupt import interruptible
from epsilons.training.loop import Loop, Step
from epsilons.training.progress import training_bar
from epsilons.training.step import check_optimizer, pass_sizes

GO_ON = "go on: `epsilons resume {0}`, or fit(…, resume=True)"
PASS_BATCH = 256  # examples at a time in passes over all of them


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    train: Dataset[Any],
    plan: Plan,
    *,
    out: str | os.PathLike[str],
    examples: Examples | None = None,
    test: Dataset[Any] | None = None,
    test_examples: Examples | None = None,
    correct_fn: CorrectFn | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    micro_batch: int | None = None,
    follow: int = 0,
    on_step: Callable[[Step], None] | None = None,
    evaluate_every: int | None = None,
    max_epsilon: float | None = None,
    resume: bool = False,
) -> Run:
    """Train `model` as `plan` says and leave a run folder at `out`.

    `loss_fn(model, batch)` gives one loss per example, `correct_fn(model, batch)` whether each was
    right. `examples` names the training data (ids, owners, groups), `test_examples` the held-out
    data. `micro_batch` bounds the examples in memory at a time. `follow` random examples have
    their norms recorded at every step, for comparison. `on_step` is called after every step; if it
    has `state_dict` and `load_state_dict`, they are part of the checkpoints. `evaluate_every` so
    many steps the accuracy on `test` is shown. `max_epsilon` ends the run before the worst case
    would exceed it. With a `seed`, sampling and noise are reproducible, and no secret.

    `resume=True` goes on with the unfinished run at `out`; if there is none, a new one begins, and
    that is said. With a seed, the same call after a crash, Ctrl-C or SIGTERM ends with the same
    weights and the same journal; without, steps that were released are replayed and the others
    have fresh noise: every step is charged at least once, and no noise is used twice. A run of
    another plan, data set, model or seed, and one that another process is training, are refused.

    Privacy: the weights after each step, and so the trajectory, are (ε, `plan.delta`)-DP for
    add/remove neighbours, with ε = `run.journal.worst_case()`: the plan's, unless steps had to be
    charged again.
    """
    check_loss_fn(loss_fn)
    if plan.endless:
        raise ValueError("fit needs a plan with steps or epochs")
    if seed is not None:
        seed = checks.whole("seed", seed, 0)
    where = usable_device(device) if device is not None else next(model.parameters()).device
    model.to(where)
    _expect_all_trained(model, optimizer)
    names = Examples.numbered(plan.n) if examples is None else examples
    n = len(train)  # type: ignore[arg-type]
    if n != plan.n or len(names) != n:
        raise ValueError(f"the data set has {n} examples; the plan says n={plan.n}")
    if not 0 <= follow <= n:
        raise ValueError(f"follow={follow}; expected at most the {n} examples of the data set")
    me = {**identity(plan, model, optimizer, train, names), LOSS: loss_identity(loss_fn)}
    here = environment(where)
    run = _opened(Path(out), me, seed) if resume else None
    resumed = run is not None

    with ExitStack() as alone, needing_room(Path(out), GO_ON.format(out)):
        with torch.random.fork_rng(), interruptible() as interrupted:
            if run is None:
                sizes = pass_sizes(plan, micro_batch)
                found = inspect_start(model, loss_fn, train, sizes=sizes)
                run = Run.create(
                    out,
                    plan,
                    with_digests(names, train),
                    **found._asdict(),
                    seed=seed,
                    randomness=Randomness.of_fit(seed),
                )
            chosen = _chosen(n, follow, seed)
            state = State(model, optimizer, scheduler, on_step, chosen)
            loop = Loop(
                run=run,
                state=state,
                loss_fn=loss_fn,
                train=train,
                seed=seed,
                where=where,
                micro_batch=micro_batch,
                pass_batch=micro_batch or PASS_BATCH,
                environment=here,
            )
            with closing(loop):
                alone.enter_context(alone_in(run.path / "private"))
                _expect_unfinished(run)
                if run.journal.identity is None:
                    run.journal.identify(me)
                loop.restore()
                if resumed:
                    loop.test_again()
                renew_ledger(run)
                last = _last_step(run.journal, max_epsilon)
                with training_bar(run.journal, last) as show:
                    while state.step < last:
                        if not loop.advance(last):
                            renew_ledger(run)
                            last = _last_step(run.journal, max_epsilon)
                        accuracy = None
                        if evaluate_every and test is not None and state.step % evaluate_every == 0:
                            right = outcomes(model, loss_fn, correct_fn, test, PASS_BATCH, where)[1]
                            accuracy = None if right is None else float(right.mean())
                        show(state.step, loop.loss, accuracy, loop.refresh_seconds)
                        if (signal := interrupted()) is not None:
                            loop.stop(signal)
                loop.finish_steps()
        _leave_behind(run, model, loss_fn, correct_fn, train, test, test_examples, where)
    return run


def _expect_all_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = trainable(model)
    check_optimizer(model, optimizer, parameters)
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in parameters.items() if id(p) not in in_optimizer]
    if left_out:
        raise ValueError(
            f"the optimizer leaves out {', '.join(left_out)}: clipping would count their gradients "
            "for nothing. Set requires_grad=False on them, or give them to the optimizer."
        )


def _expect_unfinished(run: Run) -> None:
    if run.finished:
        raise ValueError(f"{run.path} is finished; there is nothing to resume")


def _opened(out: Path, me: dict[str, str], seed: int | None) -> Run | None:
    """The unfinished run at `out`, if it is the same run; None if nothing was begun there."""
    if not (out / "private" / "journal.sqlite").exists():
        Run.discard_unbegun(out)
        talk = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        talk.print(f"nothing to resume at {out}: a new run begins")
        return None
    run = Run.open(out, writable=True)
    _expect_unfinished(run)
    if run.journal.steps_charged:
        run.journal.check()  # bounds of individual clipping are read from it
    if run.seed != seed:
        secret, way = ("secret", "without a seed") if run.seed is None else ("no secret", "with it")
        raise ValueError(
            f"seed={seed}, and {out} was begun with seed={run.seed}: its sampling and noise are "
            f"{secret} and stay so. Go on {way}"
        )
    before = run.journal.identity
    if before is None:
        if run.journal.steps_charged:
            raise ValueError(
                f"the journal of {out} doesn't say of which data set and model it is; go on with "
                "the version that began the run"
            )
        return run
    changed = difference(before, me, besides=LOSS)
    if changed:
        raise ValueError(f"{out} is a run of something else: {changed}")
    if before[LOSS] != me[LOSS]:
        warnings.warn(
            f"{out} was begun with another loss: loss_fn was {before[LOSS]} and is {me[LOSS]}",
            stacklevel=3,
        )
    return run


def _chosen(n: int, follow: int, seed: int | None) -> Tensor:
    """The examples to follow, ascending."""
    stream = Keystream.secret(b"other") if seed is None else Keystream.seeded(seed, b"other")
    return torch.from_numpy(stream.uniforms(n)).argsort()[:follow].sort().values


def _last_step(journal: Journal, max_epsilon: float | None) -> int:
    """The number of steps that keeps the worst case within `max_epsilon`; what is paid is taken."""
    steps = journal.plan.steps
    if max_epsilon is None or journal.worst_case(until=steps) <= max_epsilon:
        return steps
    enough, too_many = journal.steps_charged, steps
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if journal.worst_case(until=middle) <= max_epsilon:
            enough = middle
        else:
            too_many = middle
    return enough


def _leave_behind(
    run: Run,
    model: nn.Module,
    loss_fn: LossFn,
    correct_fn: CorrectFn | None,
    train: Dataset[Any],
    test: Dataset[Any] | None,
    test_examples: Examples | None,
    where: torch.device,
) -> None:
    """Every example's final loss and correctness, the model; then no key is left."""
    losses, correct = outcomes(model, loss_fn, correct_fn, train, PASS_BATCH, where)
    held_out = None
    if test is not None:
        named = test_examples or Examples.numbered(len(test))  # type: ignore[arg-type]
        held_out = named.with_outcomes(
            *outcomes(model, loss_fn, correct_fn, test, PASS_BATCH, where)
        )
    run.record_outcomes(losses, correct, held_out)
    with private_file(run.model_file) as file:
        torch.save(model.state_dict(), file)
    run.journal.seal()
    renew_ledger(run)  # what the individual ε's are worth is known only now
    destroy(run.releases_file)
    destroy(run.checkpoint_file)
