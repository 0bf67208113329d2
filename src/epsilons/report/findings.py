"""Everything a report tells of one run, computed once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from epsilons.accounting.composition import NOTHING, Releases
from epsilons.accounting.plan import Plan
from epsilons.accounting.promises import Promise
from epsilons.accounting.results import Epsilons
from epsilons.analysis import (
    Attack,
    BoundRow,
    EpsilonCourse,
    EstimateError,
    GroupSummary,
    LossRelation,
    NormCourse,
    epsilon_course,
    estimate_error,
    fewer_refreshes,
    group_summary,
    loss_relation,
    loss_threshold_attack,
    norm_course,
    other_clip_bounds,
)
from epsilons.analysis.attack import expect_comparable
from epsilons.randomness import Randomness
from epsilons.release import Persons, persons, releases_of
from epsilons.report.audited import Audited, read_audit
from epsilons.runs import Run

# A column with more labels than this names single records rather than groups.
MOST_GROUPS = 60

Found = TypeVar("Found")


@dataclass(frozen=True, eq=False, repr=False)
class Findings:
    """What was found in a run. A part that could not be had is None, with its reason in `missing`.

    `summaries`: one per column of groups, the one with the largest gap first. `crossed`: the
    intersections of the first two. `total`: worst case of the training so far, the clip bound and
    all publications; `parts`: what each of them costs alone, where there are several. `promises`:
    what each budget was promised before training.
    """

    name: str
    plan: Plan
    epsilons: Epsilons
    total: float
    parts: dict[str, float]
    steps: int
    seed: int | None
    randomness: Randomness
    sums_covered: bool
    refreshes: int
    restarts: int
    repeated: int
    anchor: dict[str, Any]
    accuracy: float | None
    tested: int
    summaries: tuple[GroupSummary, ...]
    crossed: GroupSummary | None
    relation: LossRelation | None
    estimate: EstimateError | None
    norms: NormCourse | None
    course: EpsilonCourse | None
    bounds: list[BoundRow] | None
    attack: Attack | None
    persons: Persons | None = None
    promises: tuple[Promise, ...] = ()
    audited: Audited | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        return self.epsilons.kind != "none"

    @property
    def main(self) -> GroupSummary | None:
        """The groups that the report speaks of first."""
        return self.summaries[0] if self.summaries else None


def findings(run: Run) -> Findings:
    """Look at the run from every side that a report shows."""
    if run.journal.steps_charged == 0:
        raise ValueError(f"{run.path} has taken no step yet, so that there is nothing to report")
    epsilons, examples, test = run.epsilons(), run.examples, run.test
    missing: dict[str, str] = {}

    def attacked() -> Attack:
        expect_comparable(run)
        return loss_threshold_attack(examples, test, by)

    def had(what: str, compute: Callable[[], Found]) -> Found | None:
        try:
            return compute()
        except ValueError as reason:
            missing[what] = str(reason)
            return None

    private = epsilons.kind != "none"
    releases = releases_of(run)
    summaries = []
    for column, labels in examples.groups.items():
        if len(set(labels.tolist())) > MOST_GROUPS:
            missing[f"groups by {column}"] = f"it has more than {MOST_GROUPS} labels"
        else:
            summaries.append(group_summary(epsilons, examples, test, column))
    summaries.sort(key=lambda s: -abs(s.gap.percent) if s.gap else 0.0)
    main = summaries[0].by[0] if summaries else None
    by = main if main and test is not None and main in test.groups else None
    crossed = None
    if len(summaries) > 1:
        both = (summaries[0].by[0], summaries[1].by[0])
        crossed = group_summary(epsilons, examples, test, both)
    return Findings(
        name=run.path.resolve().name,
        plan=run.plan,
        epsilons=epsilons,
        total=run.journal.worst_case(releases=releases),
        parts=_parts(run, releases) if private else {},
        steps=run.journal.steps_charged,
        seed=run.seed,
        randomness=run.journal.randomness,
        sums_covered=run.journal.sums_covered,
        refreshes=len(run.journal.refreshes_now()),
        restarts=run.journal.restarts,
        repeated=run.journal.repeated,
        anchor=_anchor(run),
        accuracy=None if test is None or test.correct is None else float(test.correct.mean()),
        tested=0 if test is None else len(test),
        summaries=tuple(summaries),
        crossed=crossed,
        relation=had("ε and loss", lambda: loss_relation(epsilons, examples.losses))
        if private
        else None,
        estimate=had("precision of the estimates", lambda: _estimate(run, epsilons))
        if epsilons.kind == "estimate"
        else None,
        norms=had("norms over training", lambda: norm_course(run, main)) if main else None,
        course=had("ε over training", lambda: epsilon_course(run)) if private else None,
        bounds=had("other clip bounds", lambda: other_clip_bounds(run, main)) if private else None,
        attack=had("attack", attacked),
        persons=persons(run, epsilons) if private else None,
        promises=run.promises,
        audited=read_audit(run.path / "private"),
        missing=missing,
    )


def _estimate(run: Run, epsilons: Epsilons) -> EstimateError:
    """Against exact values where examples were followed, else against all refreshes."""
    try:
        return estimate_error(run, epsilons=epsilons)
    except ValueError:
        return fewer_refreshes(run)


def _parts(run: Run, releases: Releases) -> dict[str, float]:
    plan = run.plan
    others = {"clip bound": plan.clip_bound, "publications": releases.without(plan.clip_bound)}
    found = {name: part.epsilon(plan.delta) for name, part in others.items() if part.mu}
    return {"training": run.journal.worst_case(releases=NOTHING), **found} if found else {}


def _anchor(run: Run) -> dict[str, Any]:
    file = run.path / "public" / "anchor.json"
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found
