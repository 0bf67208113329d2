"""audit: every instrument on one plan, in a given time, and what came of it."""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from epsilons.accounting import checks
from epsilons.accounting.plan import Plan
from epsilons.audit.bounds import LEVEL, LowerBounds, ScaledClaim, lower_bounds
from epsilons.audit.checks import Check, Outcome, together
from epsilons.audit.draws import check_coins, check_keys, check_noise
from epsilons.audit.fresh import (
    WORST,
    Build,
    CanaryRun,
    Stratum,
    canary_run,
    charged_norms,
    play_of,
    smaller_plan,
    strata,
)
from epsilons.audit.neighbours import check_neighbours
from epsilons.audit.price import check_added, check_run_price
from epsilons.gradients.norms import LossFn
from epsilons.runs import Run
from epsilons.training.arguments import check_data_set
from epsilons.training.distributed import joined
from epsilons.training.sampling import Collate

VERDICT = 0.999  # of all strata together, before anything is called contradicted
ENOUGH = 0.5  # of the worst case, that the bound has to reach for the audit to say anything

_PLAYED_EXAMPLES, _PLAYED_STEPS, _PLAYED_BATCH = 64, 8, 16
_REFRESHES = 3  # steps between them when neighbours are played, if they are not of every step
_SHARE_OF_RUNS = 0.6  # of the time; the rest is for the other instruments
_CANARIES = 10_000
_MOST_RUNS = 40


@dataclass(frozen=True)
class StratumFound:
    """What planted examples of one kind came to.

    `name`: of the stratum. `claim`: the ε that is stated for it. `bounds`: lower bounds at 95 %.
    `verdict`: the best lower bound at the level of the verdict; above the claim it is contradicted.
    `trials`: how many planted examples.
    """

    name: str
    claim: float
    bounds: LowerBounds
    verdict: float
    trials: int

    @property
    def outcome(self) -> Outcome:
        """Whether the verdict's bound contradicts the claim."""
        return "contradicted" if self.verdict > self.claim else "kept"


@dataclass(frozen=True)
class Audit:
    """What came of the attempt to contradict the claims of a plan.

    `strata`: planted examples, `checks`: the other instruments. `delta`: of all ε's. `runs`: how
    many fresh runs, of `steps` steps. `seconds`: how long it took. `skipped`: what was not tried,
    and why.
    """

    strata: tuple[StratumFound, ...]
    checks: tuple[Check, ...]
    delta: float
    runs: int
    steps: int
    seconds: float
    skipped: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """Kept, contradicted, or inconclusive: too little was seen to say either."""
        found = [check.outcome for check in self.checks] + [s.outcome for s in self.strata]
        if "contradicted" in found:
            return "contradicted"
        worst = [s for s in self.strata if s.name == WORST]
        weak = not worst or worst[0].bounds.best < ENOUGH * worst[0].claim
        return "inconclusive" if weak or together(self.checks) != "kept" else "kept"

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is not kept: a sentence for each."""
        said = [
            f"{c.instrument}: {c.name}: {c.outcome}" + (f" ({c.reason})" if c.reason else "")
            for c in self.checks
            if c.outcome != "kept"
        ]
        said += [
            f"planted examples, {s.name}: at least {s.verdict:.4g} of the stated {s.claim:.4g}"
            for s in self.strata
            if s.outcome != "kept"
        ]
        if self.outcome == "inconclusive" and not said:
            said.append(
                "planted examples: too few trials to come near the stated ε; give more seconds"
            )
        return tuple(said)

    @property
    def sentence(self) -> str:
        """What may be said of it."""
        worst = next((s for s in self.strata if s.name == WORST), None)
        if self.outcome == "contradicted":
            tried = "We tried to contradict the guarantee, and could: " + "; ".join(
                self.reasons[:3]
            )
        elif worst is None:
            tried = "We tried to contradict the guarantee."
        else:
            tried = (
                "We tried to contradict the guarantee. Planted examples gave at least "
                f"{_down(worst.bounds.best)} of the stated {_up(worst.claim)}."
            )
        return (
            f"{tried} A lower bound never proves privacy: this tests this code, plan and machine "
            "against these attacks."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "outcome": self.outcome,
            "sentence": self.sentence,
            "reasons": list(self.reasons),
            "delta": self.delta,
            "strata": [
                {**dataclasses.asdict(s), "outcome": s.outcome} for s in self.strata
            ],
            "checks": [dataclasses.asdict(c) for c in self.checks],
            "runs": self.runs,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "skipped": list(self.skipped),
        }  # fmt: skip


def audit(
    build: Build,
    loss_fn: LossFn,
    train: Dataset[Any],
    plan: Plan,
    seconds: float = 60,
    *,
    canaries: int = _CANARIES,
    run: Run | None = None,
    collate_fn: Collate = default_collate,
    seed: int | None = None,
    progress: Callable[[float, str], None] | None = None,
) -> Audit:
    """Try to contradict what a plan and this library's training claim, in about so many `seconds`.

    Fresh runs in a temporary folder: of `build()` — a model and its optimizer, from the same fresh
    start each time — on some examples of `train` with `loss_fn`, with and without one of them; and
    of `canaries` planted examples alone, which depend on no data, as many runs as there is time
    for. Their noise, sampling rate, clip bound, clipping and number of steps are those of `plan`.
    `run`: one whose prices are computed again from its journal. `collate_fn`: as for a
    `DataLoader`. `seed`: of canaries, coins and noise, for tests; by default all are secret.
    `progress(share, what)` is called now and then. ValueError for a plan that claims nothing
    (`clipping="none"`), has no last step, budgets, `unit="owner"` or a clip bound that adapts, and
    in a job of several processes.
    """
    check_data_set("train", train)
    _check(plan, seconds, canaries)
    began, tell = time.monotonic(), progress or (lambda share, what: None)
    found: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="epsilons-audit-") as name:
        folder = Path(name)
        tell(0.0, "price")
        if run is not None:
            found += check_run_price(run)
        tell(0.02, "neighbours")
        found += _neighbours(build, loss_fn, train, plan, folder, collate_fn)
        groups = strata(plan, canaries)
        until = began + seconds * _SHARE_OF_RUNS
        runs: list[CanaryRun] = []
        while len(runs) < 2 or (time.monotonic() < until and len(runs) < _MOST_RUNS):
            share = min(0.9, (time.monotonic() - began) / seconds)
            tell(share, f"planted examples, run {len(runs) + 1}")
            its_seed = None if seed is None else seed + len(runs)
            runs.append(canary_run(plan, groups, folder / f"run-{len(runs)}", seed=its_seed))
    tell(0.9, "bounds")
    found += _draws(plan, runs)
    found += _added(plan, runs)
    strata_found = _bounds(plan, groups, runs)
    skipped = _skipped(plan)
    tell(1.0, "done")
    return Audit(
        strata_found, tuple(found), plan.delta, len(runs), plan.steps,
        time.monotonic() - began, skipped,
    )  # fmt: skip


def _check(plan: Plan, seconds: float, canaries: int) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan is {type(plan).__name__}; expected a Plan")
    if plan.clipping == "none":
        raise ValueError("clipping='none' is not private: there is no claim to contradict")
    if plan.endless or not plan.steps:
        raise ValueError("an audit needs a plan with steps: give steps or epochs")
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds={seconds}; expected a number > 0")
    checks.whole("canaries", canaries, 100)
    if plan.budgets:
        raise ValueError(
            f"budgets={plan.budgets}: planted examples have none, so what is promised can't be "
            "contradicted by them; audit the same plan without budgets"
        )
    if plan.unit == "owner":
        raise ValueError(
            "unit='owner': planted examples are records, not persons with several; audit the same "
            "plan with unit='record'"
        )
    if plan.adaptive is not None:
        raise ValueError(
            "max_grad_norm='adaptive': planted examples have norms that are prescribed for one "
            "bound; audit the same plan with a bound that stays"
        )
    if (count := joined().count) > 1:
        raise ValueError(f"an audit is made by one process, and this job has {count}; start one")


def _neighbours(
    build: Build,
    loss_fn: LossFn,
    train: Dataset[Any],
    plan: Plan,
    folder: Path,
    collate_fn: Collate,
) -> tuple[Check, ...]:
    n = min(_PLAYED_EXAMPLES, len(train))  # type: ignore[arg-type]
    if n < 2:
        return (Check("neighbours", "it trains", "inconclusive", reason="fewer than 2 examples"),)
    few = (
        TensorDataset(*(tensor[:n] for tensor in train.tensors))
        if isinstance(train, TensorDataset)
        else Subset(train, range(n))
    )
    rate = min(0.5, max(plan.sample_rate, _PLAYED_BATCH / n))
    small = smaller_plan(plan, n, _PLAYED_STEPS, sample_rate=rate)
    if (small.refresh_every or 0) > _REFRESHES:
        small = dataclasses.replace(small, refresh_every=_REFRESHES)
    runs: list[Run] = []
    index = n // 3

    def charged() -> Any:
        return charged_norms(runs[-4], index)  # of the play with everybody

    play = play_of(build, loss_fn, small, folder, collate_fn=collate_fn, runs=runs)
    return check_neighbours(play, few, index, charged, _PLAYED_STEPS, most=small.max_batch)


def _draws(plan: Plan, runs: Sequence[CanaryRun]) -> list[Check]:
    first = runs[0]
    found = list(check_noise(first.recorded.residuals, first.recorded.stds))
    rate = plan.phase(0).sample_rate
    steps = min(plan.phase(0).end, len(first.drawn))
    if not first.drawn[:steps].any():
        found.append(Check("coins", "rate", "inconclusive", reason="nobody was drawn"))
    elif rate < 1:
        found += check_coins(first.drawn[:steps], rate)
    for one, other in pairwise(runs):
        found += check_keys(one.recorded.residuals[:100], other.recorded.residuals[:100])
        found += check_draws_differ(one, other)
    return found


def check_draws_differ(one: CanaryRun, other: CanaryRun) -> list[Check]:
    """Whether the coins of two runs are not the same."""
    n = min(one.drawn.shape[1], other.drawn.shape[1])
    steps = min(len(one.drawn), len(other.drawn))
    a, b = one.drawn[:steps, :n], other.drawn[:steps, :n]
    if not a.any() or a.all():
        return []
    same = bool(np.array_equal(a, b))
    return [Check("keys", "coins of two runs", "contradicted" if same else "kept", float(same))]


def _added(plan: Plan, runs: Sequence[CanaryRun]) -> list[Check]:
    """The price of what the steps of one run really got."""
    first = runs[0]
    found = [
        check_added(
            added, [plan.phase(min(t, plan.steps - 1)).sample_rate for t in range(len(added))],
            first.claims[name], plan.delta, name=f"planted examples, {name}",
        )
        for name, added in first.added.items()
    ]  # fmt: skip
    if first.steps != plan.steps:
        reason = f"{first.steps} of {plan.steps} steps released something"
        found.append(Check("price", "steps", "contradicted", first.steps, plan.steps, reason))
    return found


def _bounds(
    plan: Plan, groups: Sequence[Stratum], runs: Sequence[CanaryRun]
) -> tuple[StratumFound, ...]:
    level = 1 - (1 - VERDICT) / (2 * len(groups))  # two bounds of each stratum
    found = []
    for group in groups:
        name = group.name
        scores = np.concatenate([run.scores[name] for run in runs])
        members = np.concatenate([run.members[name] for run in runs])
        history = runs[0].histories[name]
        claim = ScaledClaim(history, plan.delta)
        known = lower_bounds(
            scores, members, history, plan.delta, level=LEVEL, claim=claim,
            dependent=name == WORST,
        )  # fmt: skip
        sure = lower_bounds(
            scores, members, history, plan.delta, level=level, claim=claim, dependent=False
        )
        found.append(
            StratumFound(name, runs[0].claims[name], known, sure.best, len(scores))
        )  # fmt: skip
    return tuple(found)


def _skipped(plan: Plan) -> tuple[str, ...]:
    said = []
    if plan.kind == "estimate":
        said.append("individual ε's: they are estimates, which can't be contradicted")
    if plan.sample_rate == 1:
        said.append("coins: everybody is drawn at every step")
    return tuple(said)


def _down(value: float) -> str:
    return f"{math.floor(value * 100) / 100:.2f}"


def _up(value: float) -> str:
    return f"{math.ceil(value * 100 - 1e-7) / 100:.2f}"
