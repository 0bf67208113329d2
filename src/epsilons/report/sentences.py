"""What a run's numbers say, one sentence each: the finding beside a figure, and advice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from epsilons.accounting.plan import Plan
from epsilons.accounting.printed import epsilon_text
from epsilons.accounting.results import small_bound
from epsilons.analysis import (
    Agreement,
    Attack,
    BoundRow,
    EpsilonCourse,
    EstimateError,
    GroupRow,
    GroupSummary,
    LossRelation,
    NormCourse,
)
from epsilons.analysis.figures.style import short
from epsilons.analysis.groups import SMALL
from epsilons.release import Persons, meaningful
from epsilons.report.findings import Findings

KINDS = {
    "exact": "Exact: the values follow from what each step really used.",
    "bound": "Upper bounds: no example's value is higher.",
    "estimate": "Estimates: the norms that were charged are not quite those of the steps (they are "
    "the nearest in time, or of other random draws), so a value may be too high or too low. What a "
    "person is told is the cautious reading: by the larger of the norms before and after a step.",
    "none": "None: without noise there is no ε.",
}
# Groups named at most, where there are many, and how far above average they pay at least.
_NAMED = 5
NOTABLE = 1.05


def percent(share: float, digits: int = 1) -> str:
    """A share in %, with a space that does not break.

    >>> percent(0.0814).replace("\u00a0", " "), percent(1.0, 0).replace("\u00a0", " ")
    ('8.1 %', '100 %')
    """
    return f"{100 * share:.{digits}f}\u00a0%"


def signed(value: float, digits: int) -> str:
    """A number with its sign, and a minus that is one.

    >>> signed(-0.281, 2), signed(29.0, 1)
    ('−0.28', '+29.0')
    """
    return f"{value:+.{digits}f}".replace("-", "−")


def named(by: Sequence[str], group: str) -> str:
    """The group with its column, if it is of a single one.

    >>> named(["class"], "7"), named(["sex", "race"], "F × Black")
    ('class 7', 'F × Black')
    """
    return f"{by[0]} {group}" if len(by) == 1 else group


def guess(epsilon: float, delta: float) -> float:
    """The best success of whoever guesses, from even odds, if a record was used.

        (e^ε + δ) / (e^ε + 1)

    It bounds the mean of true-positive and true-negative rate (Kairouz et al. 2015, Thm 2.1).

    >>> round(guess(0.0, 0.0), 3), round(guess(2.4, 1e-5), 3), guess(math.inf, 0.1)
    (0.5, 0.917, 1.0)
    """
    small = math.exp(-epsilon)
    return min(1.0, (1 + delta * small) / (1 + small))


def promised(budgets: Sequence[tuple[float, float]]) -> str:
    """What was promised, by budget, beside the worst case; empty if there are no budgets.

    >>> promised([(1, 1.0), (4, 3.9999)])
    'Promised before training, whatever someone’s data are: ε = 1.000 to whoever has the budget 1, ε = 4.000 to whoever has the budget 4. The worst case is the largest promise.'
    """  # noqa: E501
    if not budgets:
        return ""
    said = ", ".join(
        f"ε = {epsilon_text(epsilon)} to whoever has the budget {budget:g}"
        for budget, epsilon in budgets
    )
    return (
        f"Promised before training, whatever someone’s data are: {said}. The worst case is the "
        "largest promise."
    )


def drawn_together(plan: Plan) -> str:
    """Why the guarantee is per person where the plan's unit is an owner."""
    return (
        f"One coin drew a person with all their records, at most {plan.max_records_per_owner}, and "
        "the sum of their gradients was clipped: so it holds for all records of a person together."
    )


def per_person(found: Persons | None) -> list[str]:
    """Who has how many records, what they cost together, and how that is spread."""
    if found is None:
        return [
            "Per person nothing is known, since the run has no owners: whoever has several records "
            "is protected less."
        ]
    least, most = int(found.records.min()), int(found.records.max())
    if most == 1:
        return [f"Each of {len(found):,} owners has one record, so it holds per person too."]
    nothing = "" if meaningful(found.worst_case, found.delta) else ": no meaningful guarantee"
    usual = int(np.quantile(found.records, 0.5, method="higher"))
    half, many, worst = (epsilon_text(found.quantile(q)) for q in (0.5, 0.9, 1.0))
    return [
        f"Per person it is weaker: {len(found):,} owners have {least} to {most} records, half of "
        f"them at most {usual}. Together, {most} have ε ≤ {epsilon_text(found.worst_case)}, "
        f"whatever they contain{nothing}.",
        f"All records of an owner together, along this training: half of the owners have "
        f"ε ≤ {half}, 90 % ≤ {many}, the worst ≤ {worst} (bounds by RDP, of estimates the "
        "cautious ones; for several records some 10 % above the owner’s statement).",
    ]


def per_person_published(found: Mapping[str, Any] | None) -> str:
    """The guarantee per person from what is public."""
    if found is None:
        return "Per person no bound is stated: whoever has several records is protected less."
    epsilon = math.inf if found["epsilon"] is None else float(found["epsilon"])
    nothing = "" if meaningful(epsilon, found["delta"]) else ": no meaningful guarantee"
    bound = f"ε ≤ {epsilon_text(epsilon)}" if math.isfinite(epsilon) else epsilon_text(epsilon)
    several = f"{found['records']} records, the most that one may have"
    one = "nobody has more than one record"
    return (
        f"Per person, everything together as well ({several if found['records'] > 1 else one}): "
        f"{bound} at δ = {short(found['delta'])}{nothing}."
    )


def histogram(found: Findings) -> str:
    eps = found.epsilons
    if (said := small_bound(eps)) is not None:
        return said
    low, middle, high = (float(eps.quantile(q)) for q in (0.1, 0.5, 0.9))
    at_worst = float(eps.at_worst_case.mean())
    above = "" if at_worst >= 0.1 else f", 10 % above {high:.3f}"
    return (
        f"Half of the examples have ε ≤ {epsilon_text(middle)}, "
        f"{percent(middle / eps.worst_case, 0)} of the worst case {epsilon_text(eps.worst_case)}; "
        f"10 % are at or below {epsilon_text(low)}{above}, and {percent(at_worst)} "
        "are at the worst case itself."
    )


def groups(summary: GroupSummary) -> str:
    """Gap, its interval and the correlation; or what is missing for them."""
    lowest, highest = summary.rows[0], summary.rows[-1]
    if not math.isfinite(highest.mean_epsilon):
        return "The run is not private, so that groups differ in accuracy and loss alone."
    text = (
        f"Mean ε goes from {lowest.mean_epsilon:.3f} ({named(summary.by, lowest.group)}) to "
        f"{highest.mean_epsilon:.3f} ({named(summary.by, highest.group)})."
    )
    if summary.gap is not None:
        text += f" {gap(summary)}"
    rho = summary.rank_correlation
    if rho is not None:
        text += f" Rank correlation of accuracy and ε over the groups: {signed(rho, 2)}"
        text += ", so the worse served are also less private." if rho < -0.3 else "."
    if any(row.small for row in summary):
        text += (
            f" Groups marked * have fewer than {SMALL} examples in training or held out, too few "
            "to say much."
        )
    return text


def gap(summary: GroupSummary) -> str:
    """What the worst served pays beside the best served; nothing if there are no two to compare.

    Who pays more is said only where the interval says so too.
    """
    found = summary.gap
    if found is None:
        return ""
    least = f"The worst served, {named(summary.by, found.least_accurate)},"
    most = f"the best served, {named(summary.by, found.most_accurate)}"
    interval = (
        f"95 % interval {signed(found.interval.low, 1)} to {signed(found.interval.high, 1)}\u00a0%"
    )
    if found.interval.low <= 0 <= found.interval.high:
        return (
            f"{least} and {most}, can’t be told apart in what they pay: "
            f"{signed(found.percent, 1)}\u00a0% ({interval})."
        )
    way = "more" if found.percent >= 0 else "less"
    return f"{least} pays {percent(abs(found.percent) / 100)} {way} than {most} ({interval})."


def loss(relation: LossRelation) -> str:
    if relation.pearson is None or relation.slope is None:
        return "All losses or all ε’s are equal, so that there is no relation to show."
    rise = relation.slope * math.log(10)
    text = (
        f"ε and log loss: Pearson’s r = {relation.pearson:.3f}"
        f"{_without_worst(relation)}, Spearman’s ρ = {relation.spearman:.3f}. "
        f"A loss ten times as high goes with an ε {'higher' if rise >= 0 else 'lower'} by "
        f"{abs(rise):.2f}."
    )
    if relation.left_out:
        text += f" {relation.left_out} examples without a positive loss are left out."
    return text


def _without_worst(relation: LossRelation) -> str:
    if relation.pearson_below_worst is None:
        return ""
    return f" ({relation.pearson_below_worst:.3f} without the examples at the worst case)"


def estimate(error: EstimateError) -> str:
    a = error.agreement
    r = "" if a.pearson is None else f"Pearson’s r = {a.pearson:.4f}, "
    if error.reference == "every step":
        return (
            f"For {a.n:,} random examples the norm of every step was recorded. Against ε’s that "
            f"follow from these the estimates have {r}mean error {a.mean_error:.3f}, worst error "
            f"{a.worst_error:.3f}, and are {_by(a.bias)} on average; {percent(a.below)} of them "
            f"are too low by more than 1\u00a0%{_cautiously(error.cautious)}."
        )
    return (
        f"No examples were followed at every step. With every second refresh left out, ε of "
        f"{a.n:,} examples changes by {a.mean_error:.3f} on average and "
        f"{a.worst_error:.3f} at most ({r.rstrip(', ')}): a hint of how much the refreshes that "
        "were not made would have changed."
    )


def _cautiously(agreement: Agreement | None) -> str:
    """The same of the cautious reading, after the figures of the estimates."""
    if agreement is None:
        return ""
    return (
        f", of the cautious reading {percent(agreement.below)}, which is {_by(agreement.bias)} on "
        "average"
    )


def _by(bias: float) -> str:
    return f"{abs(bias):.3f} too {'high' if bias >= 0 else 'low'}"


def norms(course: NormCourse) -> str:
    last = {named(course.by, k): float(values[-1]) for k, values in course.medians.items()}
    first = {named(course.by, k): float(values[0]) for k, values in course.medians.items()}
    low, high = min(last, key=lambda k: last[k]), max(last, key=lambda k: last[k])
    if last[low] == 0:
        return (
            f"At the last refresh the median norm of {low} is 0, that of {high} {last[high]:.3g}."
        )
    times = _times(last[high] / last[low])
    return (
        f"At the last refresh the median norm of {high} is {times} times that of {low} "
        f"({last[high]:.3g} against {last[low]:.3g}); at the first one, "
        f"{first[high]:.3g} against {first[low]:.3g}."
    )


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 100 else f"{float(f'{ratio:.2g}'):,.0f}"


def course(found: EpsilonCourse) -> str:
    half = len(found.steps) // 2 - 1
    worst = found.worst_case[found.method]
    median = found.quantiles[0.5]
    return (
        f"After {found.steps[half]} of {found.steps[-1]} steps the worst case was "
        f"{epsilon_text(worst[half])} of {epsilon_text(worst[-1])}, and the median of {found.n:,} "
        "examples "
        f"{median[half]:.3f} of {median[-1]:.3f}. Theirs is from refreshed norms alone; the "
        "median of everyone, from all norms that were recorded, stands further up."
    )


def methods(found: EpsilonCourse) -> str:
    ends = [f"{name} {epsilon_text(values[-1])}" for name, values in found.worst_case.items()]
    text = f"The same run, the same guarantee, by method: {', '.join(ends)}."
    if len(ends) > 1:
        best = min(float(values[-1]) for values in found.worst_case.values())
        most = max(float(values[-1]) for values in found.worst_case.values())
        text += f" The looser one asks for {percent(most / best - 1)} more ε than was spent."
    return text


def bounds(rows: list[BoundRow]) -> str:
    parts = [
        f"C = {row.max_grad_norm:.3g}: mean ε {float(row.epsilons.values.mean()):.3f}, "
        f"{percent(row.at_worst_case)} at the worst case"
        for row in rows
    ]
    return (
        f"From {len(rows[0].epsilons):,} examples, {'; '.join(parts)}. Same worst case, noise in "
        "proportion to C, and the norms of this training: one with another C would see other "
        "models, so this shows a direction."
    )


def bound_groups(rows: list[BoundRow], by: Sequence[str]) -> str:
    small, large = rows[0], rows[-1]
    moved = {name: small.group_means[name] - large.group_means[name] for name in small.group_means}
    most, least = max(moved, key=lambda k: moved[k]), min(moved, key=lambda k: moved[k])
    return (
        f"From C = {large.max_grad_norm:.3g} down to {small.max_grad_norm:.3g} the mean ε of "
        f"{named(by, most)} rises most, by {moved[most]:.2f}, that of {named(by, least)} least, "
        f"by {moved[least]:.2f}."
    )


def attack(found: Attack) -> str:
    one = found.everyone
    text = (
        f"Guessing membership by the loss is right {percent(one.success)} of the time (95 % "
        f"interval {percent(one.interval.low)} to {percent(one.interval.high)}; 50 % is guessing), "
        f"and at 1 % false alarms finds {percent(one.true_positives)} of the members."
    )
    large = [row for row in found.rows if not row.small]
    if large:
        exposed = max(large, key=lambda row: row.interval.low)
        if exposed.group is not None and exposed.interval.low > 0.5:
            name = named(found.by, exposed.group)
            text += f" The most exposed group is {name} with {percent(exposed.success)}."
        else:
            text += " For no group it is distinguishable from guessing."
    return text + " It is a weak attack: what it does not find, a better one may."


def at_risk(found: Findings) -> list[GroupRow]:
    """Groups of the main column that pay notably more than average, highest first.

    With 95 % confidence: it is the interval's low end that exceeds the average by 5 %.
    """
    if found.main is None or not found.private:
        return []
    mean = float(found.epsilons.values.mean())
    rows = [row for row in found.main if not row.small and row.interval.low > NOTABLE * mean]
    return sorted(rows, key=lambda row: -row.mean_epsilon)[:_NAMED]


def risk(row: GroupRow, found: Findings) -> str:
    mean = float(found.epsilons.values.mean())
    name = named(found.main.by, row.group) if found.main else row.group
    text = (
        f"{name}: mean ε {row.mean_epsilon:.3f}, {percent(row.mean_epsilon / mean - 1, 0)} "
        f"above the average of {mean:.3f}; {percent(row.at_worst_case)} of its {row.n:,} examples "
        "are at the worst case"
    )
    if row.test_accuracy is not None and found.accuracy is not None:
        text += f"; test accuracy {percent(row.test_accuracy)} (all: {percent(found.accuracy)})"
    return text + "."


def advice(found: Findings) -> list[tuple[str, str]]:
    """What can be done, with what this run says about it."""
    if not found.private:
        return [("Train with noise", "This run has none. Plan one with “epsilons plan”.")]
    lines = []
    if found.main and (names := [named(found.main.by, row.group) for row in at_risk(found)]):
        lines.append(
            (
                "Collect more data like theirs",
                f"A model that has seen more of {', '.join(names)} is less surprised by each "
                "single one: gradients shrink, and with them ε; accuracy follows.",
            )
        )
    if found.bounds:
        small, now, large = found.bounds[0], found.bounds[1], found.bounds[-1]
        lines.append(
            (
                "Choose the clip bound C",
                f"Now C = {now.max_grad_norm:.3g}, and {percent(now.at_worst_case)} of "
                f"{len(now.epsilons):,} examples looked at are at the worst case. "
                f"C = {large.max_grad_norm:.3g} would leave about "
                f"{percent(large.at_worst_case)} there, with twice the noise; "
                f"C = {small.max_grad_norm:.3g} would put {percent(small.at_worst_case)} there, "
                "with half the noise and more gradients cut. Choose it before training, by a "
                "private median of norms, not by these figures.",
            )
        )
    if found.course is not None and len(found.course.steps) > 1:
        half = len(found.course.steps) // 2 - 1
        worst = found.course.worst_case[found.course.method]
        lines.append(
            (
                "Train for fewer steps, or with more noise",
                f"This lowers everyone’s ε. Half of the steps: {epsilon_text(worst[half])} instead "
                f"of {epsilon_text(worst[-1])} for the worst case.",
            )
        )
    if found.epsilons.kind == "estimate":
        lines.append(
            (
                "Make the values exact",
                "With individual clipping each example is cut to its own threshold, so that what "
                "is charged is what was used. In the paper accuracy does not suffer.",
            )
        )
    lines.append(
        (
            "Do not drop examples because of their ε",
            "A data set chosen by looking at these values is covered by no guarantee here.",
        )
    )
    return lines


def sure(found: Findings) -> str:
    """How sure: the kind of the values and what was measured about it."""
    text = KINDS[found.epsilons.kind]
    if found.estimate is not None:
        a = found.estimate.agreement
        if found.estimate.reference == "every step":
            text += f" Checked on {a.n:,} examples: off by {a.mean_error:.3f} on average"
        else:
            text += f" Half of the refreshes would move them by {a.mean_error:.3f} on average"
        text += f", {a.worst_error:.3f} at most."
    return text
