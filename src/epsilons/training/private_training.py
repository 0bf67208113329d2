"""PrivateTraining: a loop over private steps, each refreshed, charged and noised before it is seen.

    for step in PrivateTraining(model, optimizer, loss_fn, train, plan, out="runs/mine"):
        ...

What may have been seen of a step is charged, however the loop ends; what was not is taken anew.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from epsilons.gradients.trees import tensors_in
from epsilons.noise.keystream import Keystream
from epsilons.release.ledger import renew_ledger
from epsilons.runs import CHECKPOINT, Run
from epsilons.training.arguments import (
    check_all_trained,
    check_kinds,
    check_max_epsilon,
    check_scheduler,
    check_state,
)
from epsilons.training.assembly import assembled
from epsilons.training.checkpoint import RELEASES, BeforeBody, State, Stateful, read_checkpoint
from epsilons.training.distributed import RankLost, Said, joined, said
from epsilons.training.environment import usable_device
from epsilons.training.identity import LOSS, expect_one_call, identity, loss_identity
from epsilons.training.interrupt import interruptible
from epsilons.training.loop import Loop
from epsilons.training.owners import unit_of
from epsilons.training.played import Played
from epsilons.training.run_folder import (
    end_sealed,
    named,
    reopened_or_begun,
    seal_run,
    take_over,
)
from epsilons.training.sampling import Collate
from epsilons.training.shards import given_shards, shards_of
from epsilons.training.standing import last_step
from epsilons.training.taken import Step

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
    `examples`: names of the training examples (ids, owners, groups); by default 0 to n − 1. With
    `plan.unit="owner"` the examples of the run are their owners, and `train` has all their records.
    `seed`: sampling and noise can be reproduced, and are no secret; by default they are secret.
    `device`: where the model is put; by default where it is. `micro_batch`: the most records in a
    pass; halved when memory runs out. `collate_fn`, `num_workers`: as for a `DataLoader`.
    `follow`: so many random examples have their norms recorded at every step, for comparison.
    `max_epsilon`: the run ends before its worst case would exceed it.
    `compile`: whether passes are compiled by torch; `"auto"`: if the plan has so many that it
    repays (`docs/norms.md`). `shards`: the contiguous parts that the data set is cut into, at least
    one for each process; by default as many as the run begins with. It keeps them, and its bits,
    with fewer processes (`docs/guides/distributed.md`).

    Under torchrun the processes train one model together, each with its shards of the data, and all
    of them make the same calls: the body of the loop runs in each, `step.main` says in which one
    writes, and leaving it in one ends the loop in all, at the same step. The folder is rank 0's.

    Leaving the body by `break`, Ctrl-C, an exception or kill -9 leaves a run that the same call
    goes on with; the step at which it was left is shown again, with `replayed`. With a seed it ends
    with the same weights and journal; without, steps that were released are replayed and the
    others have fresh noise: every step is charged at least once, and no noise is used twice.

    Privacy: the weights after each step, and so the trajectory, are (ε, `plan.delta`)-DP for
    add/remove neighbours, with ε = `run.journal.worst_case()`: the plan's, unless steps had to be
    charged again. What the body computes of weights alone is as private; losses are not.
    """

    _played = Played()  # set by an audit, before the first step

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
        shards: int | None = None,
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
        self._ranks = ranks = joined()
        if shards is not None:
            checks.whole("shards", shards, 1)
        first_shards = given_shards(shards, ranks.count, plan)
        where = usable_device(device) if device is not None else next(model.parameters()).device
        if ranks.count > 1 and where.type == "cuda":
            where = torch.device("cuda", torch.cuda.current_device())
        model.to(where)
        check_all_trained(model, optimizer)
        self._unit = unit = unit_of(plan, train, loss_fn, examples, collate_fn, micro_batch)
        names = named(unit.examples, plan, unit.train)
        if follow > plan.n:
            raise ValueError(f"follow={follow}; expected at most the {plan.n} examples of the data")
        path = Path(out).absolute()  # the body may change the working directory

        with own_generators(where, seed=0), needing_room(path, _GO_ON.format(path)):
            me = identity(plan, model, optimizer, unit.train, names)
            me[LOSS] = loss_identity(loss_fn)
            given = dict(
                out=os.fspath(out), seed=seed, micro_batch=micro_batch, follow=follow,
                max_epsilon=max_epsilon, shards=first_shards, compile=compile, device=where.type,
            )  # fmt: skip
            expect_one_call(ranks, me, given)
            ranks.from_first(list(tensors_in(model.state_dict())))
            run, self._resumed, fewer = reopened_or_begun(
                path, me, plan, model, unit, names, seed=self._seed, shards=first_shards,
                ranks=ranks,
            )  # fmt: skip
            self._unit = unit._replace(micro_batch=fewer)
            self.run: Run = run
            """The run folder: plan, journal, examples. Rank 0's; on others for reading."""
        self._plan, self._owners, self._shards_given = plan, names.owners, first_shards
        self._shards = shards_of(plan, first_shards, names.owners, ranks)
        self._ended, self._last = False, plan.steps  # as they were when last looked at
        self._model, self._optimizer, self._num_workers = model, optimizer, num_workers
        self._scheduler, self._kept, self._where = scheduler, tuple(state), where
        self._followed = ranks.first(lambda: _chosen(plan.n, int(follow), self._seed))
        self._max_epsilon, self._compile = max_epsilon, compile
        self._loop: Loop | None = None  # while it is iterated over
        self._here = os.getpid(), threading.get_ident()
        self._signal: Callable[[], int | None] = lambda: None  # that came, if several wait for it
        self._begun = False  # whether this object has trained
        self._stands: Loop | None = None  # the loop whose step is in memory, if that is known
        self._left: tuple[int, ...] | None = None  # the folder when the loop was left

    def __repr__(self) -> str:
        return f"<PrivateTraining {self.run}>"

    def __iter__(self) -> Iterator[Step]:
        with self._alone():
            if self._ended:
                take_over(self.run, self._model, self._kept, self._ranks)
                return
            several = self._ranks.count > 1  # then signals wait for the body: all stop at one step
            with self._restored() as loop, interruptible(several) as self._signal:
                self._find_last()
                if loop.state.unseen and (yield from self._show(loop)):
                    return
                while loop.state.step < self._last and not self._ended:
                    self._stands = None
                    with interruptible(not several) as interrupted:
                        taken = loop.advance(self._last)
                    self._stands = loop
                    if (signal := interrupted()) is not None:
                        loop.stop(signal, unseen=taken)
                    if not taken:
                        self._find_last()
                    elif (yield from self._show(loop)):
                        return
                if not self._ended:
                    self._end(loop)

    @property
    def last_step(self) -> int:
        """How many steps the run will have: the plan's, or fewer with `max_epsilon`."""
        if self._ranks.main:
            return last_step(self.run.journal, self._max_epsilon)
        return self._last

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
            said(self._ranks, finish=True)
            self._end(self._loop)
            return
        with self._alone():
            if self._ended:
                return
            if not self._begun:
                with self._restored() as loop:
                    self._end(loop)
            elif self._ranks.first(lambda: self._left == self._folder()) and self._stands:
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
        with ExitStack() as held:
            self._ended = self._ranks.first(lambda: self._entered(held))
            yield

    def _entered(self, held: ExitStack) -> bool:
        """On rank 0: hold the folder, and take the run as it is now; whether it has ended."""
        held.enter_context(needing_room(self.run.path, _GO_ON.format(self.run.path)))
        held.enter_context(alone_in(self.run.private))
        if self.run.journal.sealed and not self.run.finished:
            end_sealed(self.run.path)
        if self.run.finished:
            self.run.journal.close()
            self.run = Run.open(self.run.path)
        return self.run.finished

    def _find_last(self) -> None:
        self._last = self._ranks.first(lambda: last_step(self.run.journal, self._max_epsilon))

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
        ranks = self._ranks
        content = ranks.first(self._checkpoint)
        begun_with = self._shards_given if content is None else content.get("shards", 1)
        self._shards = shards_of(self._plan, begun_with, self._owners, ranks)
        state = State(
            self._model, self._optimizer, self._scheduler, self._kept, self._followed,
            self._unit.micro_batch,
        )  # fmt: skip
        loop = assembled(
            self.run, self._plan, state, self._unit, num_workers=self._num_workers,
            seed=self._seed, where=self._where, compile=self._compile, shards=self._shards,
            ranks=ranks, played=self._played,
        )  # fmt: skip
        self._begun, self._stands = True, None
        try:
            loop.restore(content)
            if self._resumed:
                loop.passes.test_bits_again(state.step)
            self._resumed = True  # the next time
            ranks.first(lambda: renew_ledger(self.run))
            self._loop = self._stands = loop
            yield loop
        finally:
            self._loop = None
            if not self._forked():
                loop.close()
                self._left = None
                # the run has ended, its folder is gone, or it is rank 0's
                with suppress(OSError, sqlite3.Error):
                    self._left = self._folder() if ranks.main else None

    def _checkpoint(self) -> dict[str, Any] | None:
        checkpoint = self.run.private / CHECKPOINT
        return read_checkpoint(checkpoint) if checkpoint.exists() else None

    def _show(self, loop: Loop) -> Generator[Step, None, bool]:
        """The step before, for the body; if that is left, the run is saved as it was before it.

        Whether the loop ends, because another process has left it.
        """
        before = loop.state.before_body()
        try:
            yield loop.present()
        except GeneratorExit:
            if not self._forked() and not self._ended:
                with suppress(RankLost):
                    self._follow(loop, before, said(self._ranks, left=True))
            raise
        self._expect_here()
        if self._ended:
            return False
        signal = self._signal() or self._signal_during_body()
        return self._follow(loop, before, said(self._ranks, signal=signal, save=loop.save_is_due))

    def _follow(self, loop: Loop, before: BeforeBody, orders: Said) -> bool:
        """Do what was said, with the others; whether the loop ends by that."""
        if orders.finish:
            self._end(loop)
        elif orders.left:
            loop.leave(before)
            return True
        else:
            loop.state.unseen = False
            if orders.signal:
                loop.stop(orders.signal, unseen=False)
            if orders.save:
                loop.save()
        return False

    def _end(self, loop: Loop) -> None:
        loop.state.unseen = False
        loop.finish_steps()
        self._before_sealing()
        self._ranks.first(lambda: seal_run(self.run, self._model, self._kept))
        self._ended = True


def _chosen(n: int, follow: int, seed: int | None) -> Tensor:
    """The examples to follow, ascending."""
    stream = Keystream.secret(b"other") if seed is None else Keystream.seeded(seed, b"other")
    return torch.from_numpy(stream.uniforms(n)).argsort()[:follow].sort().values
