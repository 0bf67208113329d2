"""What one owner is told about their own records.

The guarantee is the worst case. An individual ε is a statement about the models observed, and
telling it to its owner costs no other record anything, since it is a function of that owner's
record and of models that count as released (paper, Theorem 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from epsilons.randomness import Randomness
from epsilons.release.budget import Spent
from epsilons.release.total import CombinedRuns, common_delta, expect_different, matched
from epsilons.runs import Run

FALSE_ALARMS = 0.01
LEAST_DELTA = 1e-24  # no δ below is asked for: see `accounting.sums.delta_within_cap`


@dataclass(frozen=True)
class Record:
    """One record: ε along the observed training, alone and with everything let out since.

    `id`: its name. `training_epsilon`: of the training alone. `epsilon`: with everything let out.
    """

    id: str
    training_epsilon: float
    epsilon: float


@dataclass(frozen=True)
class Statement:
    """An owner's statement; `wording` says it in words.

    `worst_case` and `individual`: ε of all the owner's records together at `delta`, composed with
    the clip bound and all publications up to `date`; for one record, that record's.
    `repeated_steps` were charged again after restarts, and are paid for beside `steps`. `others`:
    runs whose cost is added up; `unmatched` records were not found in all of them, and `elsewhere`
    records of the owner in them are not in this run: their ε there is in the worst case alone.
    `owner`: whose it is. `steps`: how many were taken, of `planned_steps` (None: unknown length).
    `kind` and `method`: as of the run's ε's. `releases`: how many publications and clip bounds are
    in the figures. `randomness`: where noise and coins came from. `sums_covered`: whether
    floating-point effects of sums are within what is charged. `training_worst_case`: ε of one
    record without releases. `records`: each of the owner's. `unit`: the plans'; where it is
    `"owner"`, the only one of `records` stands for all that the owner has. `promised`: ε of all the
    owner's records together that this run promised before training; None without budgets.
    """

    owner: str
    date: str
    steps: int
    planned_steps: int | None
    repeated_steps: int
    delta: float
    kind: str
    method: str
    releases: int
    randomness: Randomness
    sums_covered: bool
    training_worst_case: float
    worst_case: float
    individual: float
    records: tuple[Record, ...]
    others: tuple[str, ...] = ()
    unmatched: int = 0
    elsewhere: int = 0
    unit: str = "record"
    promised: float | None = None

    @property
    def own_guarantee(self) -> float:
        """ε that holds for this owner whatever they contain: promised, else the worst case.

        What was promised is of this run alone: with other runs added up it is the worst case.
        """
        if self.promised is None or self.others:
            return self.worst_case
        return min(self.promised, self.worst_case)

    @property
    def guarantee(self) -> float:
        """The most that a detector with 1 % false alarms finds, for certain."""
        return detection(self.own_guarantee, self.delta)

    @property
    def together(self) -> bool:
        """Whether the figures are those of several records together."""
        return self.unit == "owner" or len(self.records) > 1

    @property
    def along_trajectory(self) -> float:
        """The bound of `guarantee` along the trajectory observed: not a guarantee."""
        return detection(self.individual, self.delta)

    @property
    def meaningful(self) -> bool:
        """Whether the guarantee says anything: a detector that finds everyone is not ruled out."""
        return meaningful(self.own_guarantee, self.delta)

    def to_dict(self) -> dict[str, Any]:
        """The statement as plain values, for JSON; an ε without a bound is None."""
        fields = asdict(self)
        fields["per"] = "person" if self.together else "record"
        fields["randomness"]["secret"] = self.randomness.secret
        fields["detection"] = {
            "false_alarms": FALSE_ALARMS,
            "guarantee": self.guarantee,
            "meaningful": self.meaningful,
            "along_trajectory": self.along_trajectory,
            "along_trajectory_is": "approximate" if self.kind == "estimate" else self.kind,
        }
        finite: dict[str, Any] = _finite(fields)
        return finite


def owner_statement(
    run: Run, owner: str, *, delta: float | None = None, others: Sequence[Run] = ()
) -> Statement:
    """What the run says to `owner` about their records, as of today.

    `owner` is one of the examples' owners; where the run has none, the id of a record. `delta`: the
    plan's unless given. Several records are bounded together by `chain_rule`. `others`: runs on the
    same data, whose costs are added up for the records that are in all of them (see `total`).
    ValueError for a record of a known owner (it names the owner), for one that was held out, and
    for a stranger. Open `run` by `Run.checked`, so that nothing altered is stated.
    """
    rows, runs = _rows(run, owner), (run, *others)
    expect_different(runs)
    at = common_delta(runs) if delta is None else float(delta)
    here, added = CombinedRuns([run]), CombinedRuns(runs)
    places, elsewhere = _in_all(runs, rows, owner)
    facts = common_facts(added, at)
    return stated(here, added, facts, str(owner), rows, places, elsewhere)


def common_facts(added: CombinedRuns, delta: float) -> dict[str, Any]:
    """Those fields of a `Statement` that are the same for every owner of the first run."""
    runs = added.runs
    run = runs[0]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "steps": run.journal.steps_charged,
        "planned_steps": None if run.plan.endless else run.plan.steps,
        "repeated_steps": run.journal.repeated,
        "delta": delta,
        "kind": added.kind,
        "method": added.method,
        "releases": sum(Spent.of_run(one.path).questions for one in runs),
        "randomness": next(
            (one.journal.randomness for one in runs if not one.journal.randomness.secret),
            run.journal.randomness,
        ),
        "sums_covered": all(one.journal.sums_covered for one in runs),
        "training_worst_case": added.training.worst_case(delta),
        "others": tuple(str(one.path) for one in runs[1:]),
        "unit": run.plan.unit,
    }


def stated(
    here: CombinedRuns,
    added: CombinedRuns,
    facts: Mapping[str, Any],
    owner: str,
    rows: NDArray[np.int64],
    places: Sequence[Sequence[int]],
    elsewhere: int,
) -> Statement:
    """The statement of the owner of the records at `rows`, priced by `here` and `added`.

    `places`: where each record is in all runs, or in the first alone. `elsewhere`: how many more
    the other runs have.
    """
    run, at = added.runs[0], facts["delta"]
    in_all = [k for k, place in enumerate(places) if len(place) == len(added.runs)]
    alone, found = np.empty(len(rows)), np.empty(len(rows))
    for way, some in (
        (added, in_all),
        (here, [k for k in range(len(rows)) if k not in in_all]),
    ):
        if some:
            at_places = list(np.array([places[k] for k in some]).T)
            found[some] = way.epsilons(at_places, at).values
            alone[some] = way.training.epsilons(at_places, at).values
    worst = added.worst_case(at)
    worst_together, together = worst, float(found[0])
    if run.plan.unit == "record" and len(rows) + elsewhere > 1:
        worst_together = chain_rule([added.worst_case] * (len(rows) + elsewhere), at)
    if len(rows) > 1:
        # Small ε's first: each weighs on the δ's of those after it.
        order = np.argsort(found, kind="stable")
        together = chain_rule(
            [(added if k in in_all else here).epsilon_at(places[k]) for k in order], at
        )
    promised = _promised(run, rows, at)
    limit = (
        worst_together if promised is None or len(added.runs) > 1 else min(promised, worst_together)
    )
    return Statement(
        owner=owner,
        worst_case=worst_together,
        individual=min(together, limit),
        records=tuple(
            Record(str(run.examples.ids[row]), float(training), float(min(total, worst)))
            for row, training, total in zip(rows, alone, found, strict=True)
        ),
        unmatched=len(rows) - len(in_all),
        elsewhere=elsewhere,
        promised=promised,
        **facts,
    )


def _promised(run: Run, rows: NDArray[np.int64], delta: float) -> float | None:
    """What the run promised for all these records together, at δ; None without budgets."""
    budgets = run.examples.budgets
    if budgets is None:
        return None
    by_budget = {promise.budget: promise for promise in run.promises}
    # small ε's first: each weighs on the δ's of those after it
    return chain_rule([by_budget[budget].at for budget in sorted(budgets[rows].tolist())], delta)


def _in_all(
    runs: Sequence[Run], rows: NDArray[np.int64], owner: str
) -> tuple[list[list[int]], int]:
    """Where each record is in all runs, or in the first alone; how many more the others have."""
    if len(runs) == 1:
        return [[int(row)] for row in rows], 0
    same, _ = matched(runs)
    by_row = {int(where[0]): [int(place) for place in where] for where in zip(*same, strict=True)}
    places = [by_row.get(int(row), [int(row)]) for row in rows]
    more = 0
    for k, run in enumerate(runs[1:], start=1):
        known = {place[k] for place in places if len(place) > 1}
        names = run.examples.ids if run.examples.owners is None else run.examples.owners
        more += sum(int(row) not in known for row in _named(names, str(owner)))
    return places, more


def chain_rule(epsilons_at: Sequence[Callable[[float], float]], delta: float) -> float:
    """ε at δ of several records together: Σ_k ε_k, each at its own δ_k.

    Taking the records out one by one, P(D₀) ≤ e^{ε₁}P(D₁) + δ₁ ≤ e^{ε₁+ε₂}P(D₂) + e^{ε₁}δ₂ + δ₁ …,
    so together they are (Σ ε_k, Σ_k δ_k e^{ε₁+…+ε_{k−1}})-DP. With m records

        δ_k = (δ/m) · e^{−(ε₁+…+ε_{k−1})},    ε_k = `epsilons_at[k]`(δ_k),

    and the δ's so weighted add up to δ. ∞ where a δ_k is too small to be asked for.

    >>> chain_rule([lambda d: 0.5, lambda d: 0.25], 1e-5)
    0.75
    """
    total = 0.0
    for epsilon_at in epsilons_at:
        share = math.exp(-total) * delta / len(epsilons_at)
        if share < LEAST_DELTA:
            return math.inf
        total += epsilon_at(share)
    return total


def detection(epsilon: float, delta: float, false_alarms: float = FALSE_ALARMS) -> float:
    """min(1, e^ε · a + δ): the most that a detector with false-alarm rate a finds.

    >>> detection(0.0, 0.0)
    0.01
    """
    return min(1.0, math.exp(min(epsilon, 700.0)) * false_alarms + delta)


def meaningful(epsilon: float, delta: float) -> bool:
    """Whether (ε, δ) bounds detection below 100 %; if not, it is no meaningful guarantee.

    `epsilon` and `delta`: of the guarantee. Detection is the share of members found by the best
    detector that has 1 % false alarms.

    >>> meaningful(2.0, 1e-5), meaningful(17.6, 1e-5)
    (True, False)
    """
    return detection(epsilon, delta) < 1.0


def _rows(run: Run, owner: str) -> NDArray[np.int64]:
    """The positions of the owner's records; ValueError that tells apart why there are none."""
    name, examples, held_out = str(owner), run.examples, run.test
    rows = _named(examples.ids if examples.owners is None else examples.owners, name)
    if len(rows):
        return rows
    if examples.owners is not None and len(record := _named(examples.ids, name)):
        theirs = str(examples.owners[record[0]])
        raise ValueError(f"{name!r} is a record of owner {theirs!r}: ask for that")
    if held_out is not None and (
        len(_named(held_out.ids, name)) or len(_named(held_out.owners, name))
    ):
        raise ValueError(f"{name!r} was held out, not used in training")
    # no near names, no counts: whoever asks for a stranger learns nothing of others
    raise ValueError(f"no record of {name!r} is in this run")


def _named(names: NDArray[Any] | None, name: str) -> NDArray[np.int64]:
    if names is None:
        return np.empty(0, dtype=np.int64)
    return np.flatnonzero(names.astype(str) == name)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
