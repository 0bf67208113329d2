"""The curator's report: one HTML file that needs no network.

It shows individual privacy in aggregate, exactly, so it belongs to `private/`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jinja2

from epsilons.accounting.printed import epsilon_text, percent_text
from epsilons.accounting.sums import NOT_COVERED
from epsilons.analysis import figures
from epsilons.analysis.figures.style import short
from epsilons.files import private_file
from epsilons.report import sentences
from epsilons.report.audited import audit_chart
from epsilons.report.charts import Chart, chart, rows_height
from epsilons.report.findings import Findings, findings
from epsilons.runs import Run

Section = tuple[str, str, list[Chart]]
_SHORT = {
    "everyone": "Everyone",
    "groups": "Groups",
    "loss": "Loss",
    "training": "Training",
    "certainty": "Estimates",
    "bounds": "Clip bound",
    "attack": "Attack",
    "audit": "Contradicted?",
}
TITLE = "How private is this model, for whom, and how sure are we?"


def write_report(run: Run) -> Path:
    """Write `private/report.html` of `run` and say where it is.

    A page that needs no network, for the curator alone: everything in the run as figures and
    sentences.
    """
    page = render_report(findings(run))
    with private_file(run.report_file) as file:
        file.write(page.encode())
    return run.report_file


def render_report(found: Findings) -> str:
    """The page as text."""
    kept = {"groups"} if found.summaries else set()  # its tables stand without a figure
    sections = [section for section in _sections(found) if section[2] or section[0] in kept]
    contents = [(name, _SHORT[name]) for name, _, _ in sections]
    contents += [("advice", "What can be done"), ("method", "Method"), ("verify", "Verify")]
    eps = found.epsilons
    return render(
        "report.html.j2",
        title=TITLE,
        kicker=f"report on {found.name}",
        f=found,
        eps=eps,
        guess=sentences.guess(found.total, eps.delta),
        per_person=[sentences.drawn_together(found.plan)]
        if found.plan.unit == "owner"
        else sentences.per_person(found.persons),
        promised=sentences.promised([(one.budget, one.epsilon) for one in found.promises]),
        sure=sentences.sure(found),
        kind=sentences.KINDS[eps.kind],
        gap=sentences.gap(found.main) if found.main else "",
        sections=sections,
        contents=contents,
        crossed=sentences.groups(found.crossed) if found.crossed else "",
        risks=[sentences.risk(row, found) for row in sentences.at_risk(found)],
        advice=sentences.advice(found),
        worst_cases=_worst_cases(found),
    )


def render(template: str, **values: Any) -> str:
    """A template of this package with its values; what is missing is an error."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("epsilons.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"inf": math.inf, "not_covered": NOT_COVERED}
    environment.filters |= {
        "at_most": percent_text,
        "bound": epsilon_text,
        "percent": sentences.percent,
        "short": short,
        "signed": sentences.signed,
    }
    page = environment.get_template(template).render(**values)
    return re.sub(r"(?<=\d) %", "\u00a0%", page)  # a number and its % stay on one line


def _worst_cases(found: Findings) -> list[tuple[str, float]]:
    """By method, for all steps that were charged: those of restarts count twice."""
    known = found.course.worst_case if found.course else {}
    return [(method, float(values[-1])) for method, values in known.items()]


def _sections(found: Findings) -> list[Section]:
    return [
        ("everyone", "Everyone’s ε", _everyone(found)),
        ("groups", "Groups: who pays more, and is it who is served worse?", _groups(found)),
        ("loss", "Does what is hard to learn cost more?", _loss(found)),
        ("training", "Over the training", _training(found)),
        ("certainty", "How good the estimates are", _certainty(found)),
        ("bounds", "A larger or smaller clip bound", _bounds(found)),
        ("attack", "What an attack finds", _attack(found)),
        ("audit", "Could the guarantee be contradicted?", audit_chart(found.audited)),
    ]


def _everyone(found: Findings) -> list[Chart]:
    if not found.private:
        return []
    return [
        chart("histogram", "How many examples have which ε", sentences.histogram(found),
              lambda axes: figures.epsilon_histogram(axes, found.epsilons))
    ]  # fmt: skip


def _groups(found: Findings) -> list[Chart]:
    if not found.private:
        return []
    return [
        chart(f"groups-{k}", f"Mean ε and test accuracy by {summary.name}",
              sentences.groups(summary),
              lambda axes, summary=summary: figures.group_bars(axes, summary),  # type: ignore[misc]
              height=rows_height(len(summary)))
        for k, summary in enumerate(found.summaries)
    ]  # fmt: skip


def _loss(found: Findings) -> list[Chart]:
    relation = found.relation
    if relation is None or not relation.n:
        return []
    return [
        chart("loss-scatter", "ε and final training loss", sentences.loss(relation),
              lambda axes: figures.loss_scatter(axes, relation))
    ]  # fmt: skip


def _training(found: Findings) -> list[Chart]:
    charts = []
    norms, course = found.norms, found.course
    if norms is not None:
        charts.append(
            chart("norms", "Median gradient norm of each group", sentences.norms(norms),
                  lambda axes: figures.course_of_norms(axes, norms), height=3.7)
        )  # fmt: skip
    if course is not None:
        charts.append(
            chart("course", "ε of everyone over the training", sentences.course(course),
                  lambda axes: figures.course_of_epsilons(axes, course))
        )  # fmt: skip
        charts.append(
            chart("worst-case", "Worst case by method", sentences.methods(course),
                  lambda axes: figures.course_of_worst_case(axes, course))
        )  # fmt: skip
    return charts


def _certainty(found: Findings) -> list[Chart]:
    error = found.estimate
    if error is None:
        return []
    every = error.reference == "every step"
    heading = "Estimated and exact ε" if every else "ε from half of the refreshes and from all"
    return [
        chart("estimates", heading, sentences.estimate(error),
              lambda axes: figures.estimate_scatter(axes, error), height=3.6)
    ]  # fmt: skip


def _bounds(found: Findings) -> list[Chart]:
    rows = found.bounds
    if not rows:
        return []
    by = found.main.by if found.main else ()
    charts = [
        chart("bound-histograms", "ε under other clip bounds", sentences.bounds(rows),
              lambda axes: figures.bound_histograms(axes, rows), height=3.6)
    ]  # fmt: skip
    if rows[0].group_means:
        charts.append(
            chart("bound-groups", "Groups under other clip bounds",
                  sentences.bound_groups(rows, by),
                  lambda axes: figures.bound_groups(axes, rows, by),
                  height=rows_height(len(rows[0].group_means)))
        )  # fmt: skip
    return charts


def _order(found: Findings) -> list[str]:
    """The main groups by ascending mean ε."""
    return [row.group for row in found.main] if found.main else []


def _attack(found: Findings) -> list[Chart]:
    attack = found.attack
    if attack is None:
        return []
    return [
        chart("attack-success", "Membership inference by a threshold on the loss",
              sentences.attack(attack),
              lambda axes: figures.attack_success(axes, {found.name: attack}, _order(found)),
              height=rows_height(len(attack.rows) + 1))
    ]  # fmt: skip
