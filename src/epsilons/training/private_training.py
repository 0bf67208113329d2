"""PrivateTraining: a loop over private steps, each refreshed, charged and noised before it is seen.

    for step in PrivateTraining(model, optimizer, loss_fn, train, plan, out="runs/mine"):
        ...

What may have been seen of a step is charged, however the loop ends; what was not is taken anew.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from epsilons.accounting import checks
from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.files import alone_in, needing_room
from epsilons.gradients.compile import Compile, check_compile
from epsilons.gradients.isolation import own_generators
from epsilons.gradients.norms import LossFn, check_loss_fn
from epsilons.journal import Journal
from epsilons.journal.run_entries import record_identity, recorded_identity
from epsilons.noise.keystream import Keystream
from epsilons.randomness import Randomness
from epsilons.release.ledger import renew_ledger
from epsilons.runs import Run
from epsilons.training.arguments import (
    check_all_trained,
    check_kinds,
    check_max_epsilon,
    check_scheduler,
    check_state,
)
from epsilons.training.batches import Batches
from epsilons.training.checkpoint import RELEASES, State, Stateful
from epsilons.training.environment import environment, usable_device
from epsilons.training.identity import LOSS, identity, loss_identity
from epsilons.training.interrupt import interruptible
from epsilons.training.loop import Loop, Played, Step
from epsilons.training.memory import halved
from epsilons.training.norm_passes import NormPasses
from epsilons.training.run_folder import (
    begin_run,
    end_sealed,
    final_state,
    named,
    reopened_run,
    seal_run,
)
from epsilons.training.sampling import Collate
from epsilons.training.step import most_examples

_GO_ON = "go on: `epsilons resume {0}`, or the same call again"


class PrivateTraining:
    """An iterable over the steps of a plan, which trains `model` in place as it is iterated over.

    Each step records the gradient norms of all examples if a refresh is due, charges the journal,
    draws its Poisson batch, clips, sums, adds noise and calls `optimizer.step()`; then the body of
    the loop sees it as a `Step`.

    `loss_fn(model, batch)`: one loss per example (B,). `train`: a map-style data set of `plan.n`
    examples. `out`: the run folder, new, or that of this very run: then it is gone on with. A
    folder of another plan, data set, model or seed is refused; a finished one yields no steps and
    its weights are loaded.
    `scheduler`: stepped after every step. `state`: further objects with `state_dict` and
    `load_state_dict` that checkpoints keep (averaged weights, a scheduler that the body steps).
    `examples`: names of the training examples (ids, owners, groups); by default 0 to n − 1.
    `seed`: sampling and noise can be reproduced, and are no secret; by default they are secret.
    `device`: where the model is put; by default where it is. `micro_batch`: the most examples in a
    pass; halved when memory runs out. `collate_fn`, `num_workers`: as for a `DataLoader`.
    `follow`: so many random examples have their norms recorded at every step, for comparison.
    `max_epsilon`: the run ends before its worst case would exceed it.
    `compile`: whether passes are compiled by torch; `"auto"`: if the plan has so many that it
    repays (`docs/norms.md`).

    Leaving the body by `break`, Ctrl-C, an exception or kill -9 leaves a run that the same call
    goes on with; the step at which it was left is shown again, with `replayed`. With a seed it ends
    with the same weights and journal; without, steps that were released are replayed and the
    others have fresh noise: every step is charged at least once, and no noise is used twice.

    Privacy: the weights after each step, and so the trajectory, are (ε, `plan.delta`)-DP for
    add/remove neighbours, with ε = `run.journal.worst_case()`: the plan's, unless steps had to be
    charged again. What the body computes of weights alone is as private; losses are not.
    """

    _played: Played | None = None  # set by an audit, before the first step

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        train: Dataset[Any],
        plan: Plan,
        *,
        out: str | os.PathLike[str],
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        state: Sequence[Stateful] = (),
        examples: Examples | None = None,
        seed: int | None = None,
        device: torch.device | str | None = None,
        micro_batch: int | None = None,
        collate_fn: Collate = default_collate,
        num_workers: int = 0,
        follow: int = 0,
        max_epsilon: float | None = None,
        compile: Compile = "auto",
    ) -> None:
        check_kinds(model, optimizer, train, plan, examples, collate_fn)
        check_loss_fn(loss_fn)
        check_compile(compile)
        if plan.endless:
            raise ValueError("training needs a plan with steps or epochs")
        self._seed = None if seed is None else checks.whole("seed", seed, 0)
        if micro_batch is not None:
            checks.whole("micro_batch", micro_batch, 1)
        checks.whole("num_workers", num_workers, 0)
        checks.whole("follow", follow, 0)
        check_state(state)
        check_scheduler(scheduler, optimizer)
        check_max_epsilon(max_epsilon, plan)
        where = usable_device(device) if device is not None else next(model.parameters()).device
        model.to(where)
        check_all_trained(model, optimizer)
        names = named(examples, plan, train)
        if follow > plan.n:
            raise ValueError(f"follow={follow}; expected at most the {plan.n} examples of the data")
        path = Path(out).absolute()  # the body may change the working directory

        with own_generators(where, seed=0), needing_room(path, _GO_ON.format(path)):
            me = identity(plan, model, optimizer, train, names)
            me[LOSS] = loss_identity(loss_fn)
            run = reopened_run(path, me, self._seed, may_be_finished=True)
            self._resumed = run is not None
            while run is None:
                try:
                    run = begin_run(
                        path,
                        plan,
                        model,
                        loss_fn,
                        train,
                        examples=examples,
                        seed=self._seed,
                        randomness=Randomness.of_fit(self._seed),
                        micro_batch=micro_batch,
                        collate_fn=collate_fn,
                    )
                except (RuntimeError, MemoryError) as error:
                    size = most_examples(plan.phase(0), micro_batch)
                    micro_batch = halved(error, size, "in the checks before training")
            if recorded_identity(run.journal) is None:
                record_identity(run.journal, me)
        self.run: Run = run
        """The run folder: plan, journal, examples."""
        self._model, self._optimizer, self._loss_fn, self._train = model, optimizer, loss_fn, train
        self._scheduler, self._kept, self._where = scheduler, tuple(state), where
        self._micro_batch, self._collate_fn, self._num_workers = (
            micro_batch, collate_fn, num_workers,
        )  # fmt: skip
        self._followed = _chosen(plan.n, int(follow), self._seed)
        self._max_epsilon, self._compile = max_epsilon, compile
        self._loop: Loop | None = None  # while it is iterated over
        self._here = os.getpid(), threading.get_ident()
        self._begun = False  # whether this object has trained
        self._stands: Loop | None = None  # the loop whose step is in memory, if that is known
        self._left: tuple[int, ...] | None = None  # the folder when the loop was left

    def __repr__(self) -> str:
        return f"<PrivateTraining {self.run}>"

    def __iter__(self) -> Iterator[Step]:
        with self._alone():
            if self.run.finished:
                self._take_over_result()
                return
            with self._restored() as loop:
                last = self.last_step
                if loop.state.unseen:
                    yield from self._show(loop)
                while loop.state.step < last and not self.run.finished:
                    self._stands = None
                    with interruptible() as interrupted:
                        taken = loop.advance(last)
                    self._stands = loop
                    if (signal := interrupted()) is not None:
                        loop.stop(signal, unseen=taken)
                    if taken:
                        yield from self._show(loop)
                    else:
                        last = self.last_step
                if not self.run.finished:
                    self._end(loop)

    @property
    def last_step(self) -> int:
        """How many steps the run will have: the plan's, or fewer with `max_epsilon`."""
        return _last_step(self.run.journal, self._max_epsilon)

    @property
    def refresh_seconds(self) -> float:
        """How long the latest refresh took; 0 if there was none since the loop began."""
        return 0.0 if self._loop is None else self._loop.refresh_seconds

    def epsilons(self, delta: float | None = None, method: Method = "tight") -> Epsilons:
        """ε of every training example for the steps charged so far, in data set order.

        `delta`: by default the plan's. `method`: the accountant, `"tight"` (the default), `"rdp"`
        or `"rdp-classic"`.
        """
        self._expect_here()
        return self.run.epsilons(delta, method)

    def finish(self) -> None:
        """End the run where it stands, inside the loop or after it: the journal is sealed.

        The weights are saved as this object has trained them, or as they were when the run was left
        if it has not; the keys of the noise are destroyed, and no further step can be taken. Steps
        that were charged ahead, 31 at most, stay charged. ValueError if the loop was left inside a
        step: then the weights may be those of no step. Again: nothing happens.
        """
        self._expect_here()
        if self._loop is not None and self._stands is self._loop:
            self._end(self._loop)
            return
        with self._alone():
            if self.run.finished:
                return
            if not self._begun:
                with self._restored() as loop:
                    self._end(loop)
            elif self._stands is not None and self._left == self._folder():
                self._end(self._stands)
            else:
                raise ValueError(
                    f"of which step the weights are is not known: {self.run.path} was left inside "
                    "a step, or another loop went on with it. Iterate on, then finish()"
                )

    def _before_sealing(self) -> None:
        """Called at the end of the run, when something may still be recorded."""

    def _signal_during_body(self) -> int | None:
        """A signal that came while the body ran and was deferred; by default it is not."""
        return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """The run folder for this object alone, with the run as it is now."""
        self._expect_here()
        if self._loop is not None:
            raise ValueError(
                f"{self.run.path} is being trained by this object; end that loop first"
            )
        with needing_room(self.run.path, _GO_ON.format(self.run.path)), alone_in(self.run.private):
            if self.run.journal.sealed and not self.run.finished:
                end_sealed(self.run.path)
            if self.run.finished:
                self.run.journal.close()
                self.run = Run.open(self.run.path)
            yield

    def _forked(self) -> bool:
        """Whether this is a copy in a child process, to which nothing of the run belongs."""
        return os.getpid() != self._here[0]

    def _expect_here(self) -> None:
        if (os.getpid(), threading.get_ident()) != self._here:
            raise ValueError(
                f"the training of {self.run.path} was begun in another process or thread; go on "
                "with it there. Run.open reads the folder from anywhere"
            )

    def _folder(self) -> tuple[int, ...]:
        """What is another once another loop has taken a step in the folder."""
        journal, releases = self.run.journal, self.run.private / RELEASES
        return journal.steps_charged, journal.restarts, releases.stat().st_mtime_ns

    @contextmanager
    def _restored(self) -> Iterator[Loop]:
        """The loop, at the checkpoint of the run."""
        state = State(
            self._model, self._optimizer, self._scheduler, self._kept, self._followed,
            self._micro_batch,
        )  # fmt: skip
        passes = NormPasses(
            self.run,
            self._model,
            self._loss_fn,
            self._train,
            micro_batch=self._micro_batch,
            collate_fn=self._collate_fn,
            num_workers=self._num_workers,
        )
        passes.within_memory(lambda: passes.compile_if(self._compile), 0)
        batches = Batches(
            self._train, self.run.plan, collate_fn=self._collate_fn, num_workers=self._num_workers
        )
        loop = Loop(
            self.run, state, self._loss_fn, batches, passes, self._seed, self._where,
            environment(self._where, passes.compiled), self._played,
        )  # fmt: skip
        self._begun, self._stands = True, None
        try:
            loop.restore()
            if self._resumed:
                passes.test_bits_again(state.step)
            self._resumed = True  # the next time
            renew_ledger(self.run)
            self._loop = self._stands = loop
            yield loop
        finally:
            self._loop = None
            if not self._forked():
                loop.close()
                self._left = None
                with suppress(OSError, sqlite3.Error):  # the run has ended, or its folder is gone
                    self._left = self._folder()

    def _show(self, loop: Loop) -> Iterator[Step]:
        """The step before, for the body; if that is left, the run is saved as it was before it."""
        before = loop.state.before_body()
        try:
            yield loop.present()
        except GeneratorExit:
            if not self._forked() and not self.run.finished:
                loop.leave(before)
            raise
        self._expect_here()
        if not self.run.finished:
            loop.state.unseen = False
            if (signal := self._signal_during_body()) is not None:
                loop.stop(signal, unseen=False)
            loop.save_in_time()

    def _end(self, loop: Loop) -> None:
        loop.state.unseen = False
        loop.finish_steps()
        self._before_sealing()
        seal_run(self.run, self._model, self._kept)

    def _take_over_result(self) -> None:
        result = torch.load(self.run.model_file, map_location=self._where, weights_only=True)
        self._model.load_state_dict(result)
        for each, state in zip(self._kept, final_state(self.run, len(self._kept)), strict=True):
            each.load_state_dict(state)


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
