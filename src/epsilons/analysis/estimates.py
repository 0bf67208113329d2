"""How good the estimates are: against exact ε's, and under other schedules of refreshes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.holding import held
from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.analysis.correlation import pearson
from epsilons.analysis.replay import (
    Replay,
    from_norms,
    priced_together,
    random_examples,
    replayed,
)
from epsilons.runs import Run

# Examples compared where none were followed.
EXAMPLES = 2000
FEWER = (1, 2, 4, 8)
_NOTABLE = 0.01


@dataclass(frozen=True)
class Agreement:
    """Estimated minus exact ε: Pearson's r, mean and worst absolute error, mean error.

    Over `n` examples: `pearson` (None: not defined), `mean_error`, `worst_error` and `bias`, the
    mean of the differences with their signs. `below`: the share of estimates more than 1 % below
    the exact ε. `lowest`: how far below the lowest of them is, as an ε; 0 if none is below.
    """

    n: int
    pearson: float | None
    mean_error: float
    worst_error: float
    bias: float
    below: float
    lowest: float

    @classmethod
    def of(cls, estimated: NDArray[np.float64], exact: NDArray[np.float64]) -> Agreement:
        """The agreement of ε's `estimated` (n,) with `exact` ones (n,).

        >>> Agreement.of(np.array([1.0, 2.5]), np.array([1.0, 2.0]))
        Agreement(n=2, pearson=1.0, mean_error=0.25, worst_error=0.5, bias=0.25, below=0.0, \
lowest=0.0)
        """
        error = estimated - exact
        found = pearson(estimated, exact)
        return cls(
            n=len(error),
            pearson=None if found is None else round(found, 12),
            mean_error=float(np.abs(error).mean()),
            worst_error=float(np.abs(error).max()),
            bias=float(error.mean()),
            below=float((estimated < (1 - _NOTABLE) * exact).mean()),
            lowest=float(max(0.0, -error.min())),
        )


@dataclass(frozen=True)
class ScheduleRow:
    """What `refreshes` refreshes under `schedule` would have given.

    `agreement`: with the reference.
    """

    schedule: str
    refreshes: int
    agreement: Agreement


@dataclass(frozen=True, eq=False)
class EstimateError:
    """Estimates against a better reference, for some examples; their values are private.

    `reference`: `"every step"` (exact, for followed examples) or `"all refreshes"` (itself an
    estimate; then `estimated` is from every second refresh). `others`: from the same journal, under
    fewer refreshes and both schedules. `agreement`: of `estimated` (m,) with the reference, `exact`
    (m,). `cautious`: the agreement of the other reading, where the reference is exact.
    `worst_case`: of an example at the clip bound.
    """

    reference: str
    agreement: Agreement
    cautious: Agreement | None
    others: tuple[ScheduleRow, ...]
    worst_case: float
    estimated: NDArray[np.float64] = field(repr=False)
    exact: NDArray[np.float64] = field(repr=False)


def estimate_error(
    run: Run, method: Method = METHODS[0], *, epsilons: Epsilons | None = None
) -> EstimateError:
    """Estimated against exact ε of the examples whose norms were recorded at every step.

    The estimate is the run's own, by the norm nearest in time. `others`: ε of the followed norms at
    the refreshes of other schedules alone, as such a run would have had it without norms of sampled
    examples. `epsilons`: the run's ε's by the same method, if they are at hand. `run`: with
    followed examples. `method`: the accountant, `"tight"` (the default), `"rdp"` or
    `"rdp-classic"`. ValueError without them, and under individual clipping.
    """
    plan, journal = run.plan, run.journal
    if plan.clipping != "max":
        raise ValueError(
            f"clipping={plan.clipping!r} leaves no estimates to check: "
            "thresholds are charged as they were used"
        )
    chosen, norms = journal.followed()
    exact = journal.followed_epsilons(method=method)
    every = journal.epsilons(method=method) if epsilons is None else epsilons
    estimated = every.values[chosen]
    rows: list[ScheduleRow] = []
    # With phases and restarts a charged step does not tell its phase.
    if len(plan.all_phases) == 1 or not journal.restarts:
        schedules = _schedules(plan, len(norms))
        replays = [_refreshed_at(plan, chosen, norms, steps) for _, steps in schedules]
        rows = [
            ScheduleRow(name, len(steps), Agreement.of(priced.values, exact.values))
            for (name, steps), priced in zip(
                schedules, priced_together(replays, method), strict=True
            )
        ]
    return EstimateError(
        reference="every step",
        agreement=Agreement.of(estimated, exact.values),
        cautious=Agreement.of(every.cautious[chosen], exact.values),
        others=tuple(rows),
        worst_case=exact.worst_case,
        estimated=estimated,
        exact=exact.values,
    )


def fewer_refreshes(
    run: Run, method: Method = METHODS[0], *, examples: int = EXAMPLES, seed: int = 0
) -> EstimateError:
    """ε from every second, fourth and eighth refresh against ε from all, for random examples.

    For runs in which nobody was followed: where halving the refreshes changes little, doubling them
    would have changed less. Norms of drawn examples are left out. `run`: with at least three
    records of norms, else ValueError. `method`: the accountant, `"tight"` (the default), `"rdp"` or
    `"rdp-classic"`. `examples`: how many at most, drawn by `seed`; by default 2000.
    """
    if run.plan.clipping != "max":
        raise ValueError(f"clipping={run.plan.clipping!r} leaves no estimates to check")
    chosen = random_examples(run.plan.n, examples, seed)
    every = replayed(run.journal, chosen, sampled=False, hold="previous")
    rows = len(every.norms)
    if rows < 3 or not every.length:
        raise ValueError(f"{rows} records of norms; expected at least three to leave some out")
    thinned = [(k, _thinned(every, k)) for k in FEWER if k < rows]
    exact, *others = priced_together([replay for _, replay in thinned], method)
    found = [
        ScheduleRow(
            f"every {k}{'nd' if k == 2 else 'th'} refresh",
            len(replay.norms),
            Agreement.of(priced.values, exact.values),
        )
        for (k, replay), priced in zip(thinned[1:], others, strict=True)
    ]
    return EstimateError(
        reference="all refreshes",
        agreement=found[0].agreement,
        cautious=None,
        others=tuple(found),
        worst_case=exact.worst_case,
        estimated=others[0].values,
        exact=exact.values,
    )


def _schedules(plan: Plan, taken: int) -> list[tuple[str, NDArray[np.int64]]]:
    """Both schedules with as many refreshes as planned, and a half, a quarter, an eighth."""
    planned = sum(plan.refresh_due(step) for step in range(taken)) or 1
    found = []
    for fewer in FEWER:
        m = planned // fewer
        if m < 1:
            continue
        for schedule in ("early", "uniform"):
            other = dataclasses.replace(
                plan,
                steps=taken,
                epochs=taken * plan.sample_rate,
                refresh_every=None,
                refreshes_per_epoch=m / (taken * plan.sample_rate),
                refresh_schedule=schedule,
                phases=(),
            )
            found.append((schedule, np.array(other.refresh_steps, dtype=np.int64)))
    return found


def _refreshed_at(
    plan: Plan, chosen: NDArray[np.int64], norms: NDArray[np.float64], steps: NDArray[np.int64]
) -> Replay:
    """A replay of `norms` (all steps, m) with refreshes at the given steps alone."""
    return _nearest(plan, chosen, norms[steps], steps, len(norms))


def _thinned(every: Replay, k: int) -> Replay:
    """A replay of every k-th refresh alone; `every` has all of them, each up to the next."""
    starts = np.cumsum(every.steps[:, 0]) - every.steps[:, 0]
    return _nearest(every.plan, every.chosen, every.norms[::k], starts[::k], every.length)


def _nearest(
    plan: Plan,
    chosen: NDArray[np.int64],
    records: NDArray[np.float64],
    at: NDArray[np.int64],
    length: int,
) -> Replay:
    """A replay of `length` steps, each charged the record nearest in time."""
    norms, lengths = held(records, at, length)
    starts = np.cumsum(lengths) - lengths if len(plan.all_phases) > 1 else np.zeros_like(lengths)
    return from_norms(plan, chosen, norms, np.broadcast_to(lengths[:, None], norms.shape), starts)
