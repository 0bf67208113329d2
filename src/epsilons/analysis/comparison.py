"""Two runs side by side: individual or common clipping, two clip bounds, private or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.analysis.attack import Attack, loss_threshold_attack
from epsilons.analysis.correlation import spearman
from epsilons.analysis.groups import GroupSummary, group_summary
from epsilons.analysis.relations import LossRelation, loss_relation
from epsilons.runs import Run


@dataclass(frozen=True, eq=False)
class Headline:
    """What one run comes down to; None where the run does not tell.

    `epsilons` of a run that is not private are ∞. `name` of the folder, `plan`, `test_accuracy` and
    `train_accuracy` under the final model; `relation` of ε and loss; `summary` of groups; `attack`
    by loss.
    """

    name: str
    plan: Plan
    epsilons: Epsilons
    test_accuracy: float | None
    train_accuracy: float | None
    relation: LossRelation | None
    summary: GroupSummary | None
    attack: Attack | None

    @property
    def private(self) -> bool:
        """Whether the run has noise, so that its ε's are numbers."""
        return self.epsilons.kind != "none"

    def numbers(self) -> dict[str, float | None]:
        """The figures of a comparison, by name; ε's are ∞ if the run is not private."""
        found, attack = self.epsilons, self.attack
        gap = self.summary.gap if self.summary else None
        return {
            "worst-case ε": found.worst_case,
            "median ε": float(found.quantile(0.5)),
            "mean ε": float(found.values.mean()),
            "share at the worst case": float(found.at_worst_case.mean()) if self.private else None,
            "test accuracy": self.test_accuracy,
            "training accuracy": self.train_accuracy,
            "Pearson of ε and log loss": self.relation.pearson if self.relation else None,
            "gap in % between groups": gap.percent if gap else None,
            "attack success": attack.everyone.success if attack else None,
            "true positives at 1 % false": attack.everyone.true_positives if attack else None,
        }


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two runs, what their plans differ in, and whether the same examples pay more in both.

    `rank_correlation`: Spearman's, of the ε's of the examples that both runs have. `left` and
    `right`: the two. `differences`: by field of the plan, its two values. `shared`: how many
    examples both have, by id.
    """

    left: Headline
    right: Headline
    differences: Mapping[str, tuple[Any, Any]]
    rank_correlation: float | None
    shared: int


def headline(run: Run, by: str | None = None, method: Method = METHODS[0]) -> Headline:
    """What one `run` comes down to: privacy, accuracy, loss, groups and attack.

    `by`: the column of groups, if the run has it. `method`: the accountant, `"tight"` (the
    default), `"rdp"` or `"rdp-classic"`.
    """
    epsilons = run.epsilons(method=method)
    examples, test = run.examples, run.test
    tested = test is not None and test.losses is not None and examples.losses is not None
    column = by if by is not None and by in examples.groups else None
    in_test = column if test is not None and column in test.groups else None
    return Headline(
        name=run.path.resolve().name,
        plan=run.plan,
        epsilons=epsilons,
        test_accuracy=None if test is None or test.correct is None else float(test.correct.mean()),
        train_accuracy=None if examples.correct is None else float(examples.correct.mean()),
        relation=None
        if epsilons.kind == "none" or examples.losses is None
        else loss_relation(epsilons, examples.losses),
        summary=group_summary(epsilons, examples, test, column) if column else None,
        attack=loss_threshold_attack(examples, test, in_test)
        if tested and run.plan.records_at_once == 1
        else None,
    )


def compare(
    left: Run, right: Run, by: str | None = None, method: Method = METHODS[0]
) -> Comparison:
    """Compare two runs: the headlines of `left` and `right`, and what is different between them.

    `by`: the column of groups. `method`: the accountant, `"tight"` (the default), `"rdp"` or
    `"rdp-classic"`.
    """
    a, b = (headline(run, by, method) for run in (left, right))
    fields = dataclasses.fields(left.plan)
    pairs = {f.name: (getattr(left.plan, f.name), getattr(right.plan, f.name)) for f in fields}
    _, mine, theirs = np.intersect1d(
        left.examples.ids.astype(str), right.examples.ids.astype(str), return_indices=True
    )
    both = a.private and b.private and len(mine) > 1
    return Comparison(
        left=a,
        right=b,
        differences={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        rank_correlation=spearman(a.epsilons.values[mine], b.epsilons.values[theirs])
        if both
        else None,
        shared=len(mine),
    )
