"""Fresh runs of a plan's settings, in a temporary folder: for neighbours, and for canaries."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.composition import NOTHING
from epsilons.accounting.plan import Plan
from epsilons.audit.curve import History
from epsilons.audit.draws import RecordedNoise
from epsilons.audit.neighbours import Play, Watch
from epsilons.audit.sidecar import SideCar, canary_data, log_likelihood_ratios, sidecar_loss
from epsilons.gradients.norms import LossFn
from epsilons.gradients.random_loss import NoDropout
from epsilons.noise import Keystream, Noise
from epsilons.runs import Run
from epsilons.training.played import Played
from epsilons.training.private_training import PrivateTraining
from epsilons.training.sampling import Collate

Array = NDArray[np.float64]
Build = Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
"""A model and its optimizer from a fresh start."""

WORST = "worst case"
_SHARES = (0.53, 0.27)  # of the clip bound: norms between levels
_RECORDED = 4_000_000  # numbers of noise, in the first steps of a run
_LARGER = 4.0  # times its norm at a refresh, a growing canary has between two
_SMALLER = 0.6  # of its norm at a refresh, it has at every second one
_EXCESS = 4.0  # times the clip bound, a canary at the bound has


def smaller_plan(plan: Plan, n: int, steps: int, *, sample_rate: float | None = None) -> Plan:
    """The same noise, bound, clipping and rounding for n examples and so many steps."""
    rate = plan.sample_rate if sample_rate is None else sample_rate
    every = _refresh_interval(plan)
    return Plan(
        n=n,
        sample_rate=rate,
        steps=steps,
        noise_multiplier=plan.noise_multiplier,
        max_grad_norm=plan.max_grad_norm,
        delta=plan.delta,
        clipping=plan.clipping,
        rounding=plan.rounding,
        levels=plan.levels,
        sums=plan.sums,
        refresh_every=every,
        refreshes_per_epoch=0 if every is None else None,
    )


def _refresh_interval(plan: Plan) -> int | None:
    """How many steps lie between two refreshes, about; None if there is none."""
    if plan.endless or plan.refresh_every is not None:
        return plan.refresh_every
    steps = plan.refresh_steps
    if not steps:
        return None
    return max(1, round(plan.steps / len(steps)))


def play_of(
    build: Build,
    loss_fn: LossFn,
    plan: Plan,
    folder: Path,
    *,
    collate_fn: Collate = default_collate,
    runs: list[Run],
) -> Play:
    """`PrivateTraining`, as `fit` iterates over it, for `check_neighbours`; `runs` get longer."""

    def play(train: Dataset[Any], *, sampling: Keystream, noise: Noise, watch: Watch) -> None:
        model, optimizer = build()
        training = PrivateTraining(
            model, optimizer, loss_fn, train, plan,
            out=folder / f"play-{len(runs)}", seed=0, collate_fn=collate_fn, compile=False,
        )  # fmt: skip
        training._played = Played(lambda own: noise, lambda own: sampling)
        device = next(model.parameters()).device.type
        with quiet(), NoDropout(device):
            for step in training:
                watch(step.model, step.optimizer)
        runs.append(training.run)

    return play


def charged_norms(run: Run, index: int) -> Array:
    """(steps,): what the example is charged for at each step, at most the clip bound."""
    plan, journal = run.plan, run.journal
    steps = journal.steps_charged
    found = np.array([plan.phase(t).max_grad_norm for t in range(steps)])
    if plan.clipping == "none" or journal.kind == "estimate":
        return found
    for t in journal.refreshes_now():
        if plan.clipping == "individual":
            changes = [t, *(p.first for p in plan.all_phases if p.first > t)]
            for first in changes:
                if first < steps:
                    found[first:] = journal.bounds(first, [index])[0]
        elif t < steps:  # norms of every step, else they were an estimate
            found[t] = np.fmin(journal.norms(t)[index], found[t])
    return found


@dataclass(frozen=True)
class Stratum:
    """Canaries that are judged together: `count` of them, members or not.

    `norms`: of the raw gradient before each step (steps,). `attacked`: what the attack expects of
    it (steps,), at most the clip bound.
    """

    name: str
    count: int
    norms: Array
    attacked: Array


@dataclass(frozen=True)
class CanaryRun:
    """What one fresh run of canaries gave, by stratum.

    `scores`, `members`: of each canary. `histories`: what a member is charged for, `claims`: its
    ε as the run states it. `added` (steps,): the most that a member added to a step, over the
    noise. `recorded`: sums and noise of the first steps; `drawn` (steps, members): who was drawn in
    them. `steps`: how many were taken.
    """

    scores: dict[str, Array]
    members: dict[str, NDArray[np.bool_]]
    histories: dict[str, History]
    claims: dict[str, float]
    added: dict[str, Array]
    recorded: RecordedNoise
    drawn: NDArray[np.bool_]
    steps: int


def strata(plan: Plan, canaries: int) -> list[Stratum]:
    """The strata that a plan's claims allow: the worst case, and smaller norms if they are claims.

    Individual ε's that are estimates are none. Thresholds that hold for several steps are attacked
    by canaries that grow in between. Norms lie between levels, so that rounding matters.
    """
    steps = plan.steps
    bounds = np.array([plan.phase(t).max_grad_norm for t in range(steps)])
    individual = plan.kind in ("exact", "bound") and bool(plan.refresh_steps)
    shares = (1.0, *_SHARES) if individual else (1.0,)
    between = ~np.isin(np.arange(steps), plan.refresh_steps)
    growing = individual and plan.clipping == "individual" and bool(between.any())
    count = max(20, canaries // (len(shares) + growing))
    found = [
        Stratum(
            WORST if share == 1 else f"norm {share:g}·C",
            count,
            bounds * (_EXCESS if share == 1 else share),
            bounds * share,
        )
        for share in shares
    ]
    if growing:
        refreshes = np.searchsorted(plan.refresh_steps, np.arange(steps), side="right") - 1
        base = bounds * _SHARES[-1] * np.where(refreshes % 2 == 0, 1.0, _SMALLER)
        grown = base * np.where(between, _LARGER, 1.0)
        found.append(Stratum(f"growing from {_SHARES[-1]:g}·C", count, grown, base))
    return found


def canary_run(
    plan: Plan, groups: Sequence[Stratum], folder: Path, *, seed: int | None = None
) -> CanaryRun:
    """Train nothing but canaries by the settings of a plan, and score them.

    `plan`: whose n is replaced by the number of members, drawn by fair coins.
    """
    m = sum(group.count for group in groups)
    members = np.random.default_rng(seed).random(m) < 0.5
    members[:2] = True, False  # somebody, and not everybody
    plan = _of_members(plan, int(members.sum()))
    car = SideCar(m)
    norms = np.stack([group.norms for group in groups], axis=1)  # (steps, groups)
    attacked = np.stack([group.attacked for group in groups], axis=1)
    group_of = np.repeat(np.arange(len(groups)), [group.count for group in groups])
    car.set_norms(norms[0, group_of])
    scores = np.zeros(m)
    watched = _Watched(len(groups), group_of)
    with quiet():
        training = PrivateTraining(
            car, torch.optim.SGD(car.parameters(), lr=1e-3), sidecar_loss, canary_data(members),
            plan, out=folder, seed=seed, compile=False,
        )  # fmt: skip
        training._played = Played(watched.around)
        for step in training:
            phase = plan.phase(step.number)
            x = car.gradient * phase.batch_size / phase.noise_std
            s = attacked[step.number, group_of] / phase.noise_std
            scores += log_likelihood_ratios(x, s, phase.sample_rate)
            if step.number + 1 < plan.steps:
                car.set_norms(norms[step.number + 1, group_of])
    return _judged(training.run, groups, members, scores, watched)


class _Watched:
    """The run's own noise, recorded in its first steps, and what the groups added in all."""

    def __init__(self, groups: int, group_of: NDArray[np.int64]) -> None:
        self.groups, self.group_of = groups, group_of
        self.recorded: RecordedNoise | None = None
        self.added: list[Array] = []  # (groups,) of each step, over the noise
        self._own: Noise | None = None

    def around(self, own: Noise) -> Noise:
        self._own = own
        if self.recorded is None:
            self.recorded = RecordedNoise(own)
        self.recorded.noise = own
        return self

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        assert self._own is not None
        assert self.recorded is not None
        size = next(iter(sums.values())).detach().double().abs().cpu().reshape(-1).numpy()
        most = np.zeros(self.groups)
        np.maximum.at(most, self.group_of, size)
        self.added.append(most / std)
        if self.recorded.kept * size.size < _RECORDED:
            return self.recorded.added_to(sums, std, divisor)
        return self._own.added_to(sums, std, divisor)


def _of_members(plan: Plan, n: int) -> Plan:
    """The plan for n examples at the same sample rates."""
    phases = tuple(
        (first, {k: (v / plan.n * n if k == "batch_size" else v) for k, v in changes.items()})
        for first, changes in plan.phases
    )
    constants = plan.to_dict() | {"n": n, "batch_size": None, "epochs": None, "phases": phases}
    constants |= {"refreshes_per_epoch": None, "max_records_per_owner": None}
    constants |= {"clip_bound_mu": 0.0, "clip_bound_distance": 0.0}
    every = _refresh_interval(plan)
    return Plan(
        **constants | {"refresh_every": every, "refreshes_per_epoch": 0 if every is None else None}
    )


def _judged(
    run: Run,
    groups: Sequence[Stratum],
    members: NDArray[np.bool_],
    scores: Array,
    watched: _Watched,
) -> CanaryRun:
    """The scores by stratum, beside what the run states of each."""
    journal, recorded = run.journal, watched.recorded
    assert recorded is not None
    individual = journal.kind in ("exact", "bound") and bool(journal.refreshes)
    added = np.stack(watched.added)
    by_name: dict[str, Any] = {
        part: {} for part in ("scores", "members", "histories", "claims", "added")
    }
    for k, group in enumerate(groups):
        here = watched.group_of == k
        inside = np.flatnonzero(here & members)
        by_name["scores"][group.name], by_name["members"][group.name] = scores[here], members[here]
        by_name["added"][group.name] = added[:, k]
        if group.name == WORST or not individual or not inside.size:
            history, claim = worst_history(run), journal.worst_case(releases=NOTHING)
        else:
            number = int(members[: inside[0]].sum())  # of a member, in the data set
            history = charged_history(run, number)
            stated = journal.epsilons(only=np.array([number]), releases=NOTHING)
            claim = float(stated.values[0])
        by_name["histories"][group.name], by_name["claims"][group.name] = history, claim
    sums = np.stack([next(iter(each.values())) for each in recorded.sums])
    return CanaryRun(
        **by_name, recorded=recorded, drawn=sums[:, members] != 0, steps=len(watched.added)
    )


def charged_history(run: Run, index: int) -> History:
    """What an example is charged for, from the journal."""
    steps = range(run.journal.steps_charged)
    phases = [run.plan.phase(t) for t in steps]
    noise = np.array([phase.noise_std for phase in phases])
    return History(charged_norms(run, index) / noise, [p.sample_rate for p in phases], 1)


def worst_history(run: Run) -> History:
    """What an example at the clip bound is charged for, those of restarts twice."""
    phases = run.plan.all_phases
    return History(
        [1 / phase.noise_multiplier for phase in phases],
        [phase.sample_rate for phase in phases],
        list(run.journal.charged()),
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings about a model that is only played with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield
