"""The curator's report: one HTML file that needs no network.

It shows individual privacy in aggregate, exactly, so it belongs to `private/`.
"""

from __future__ import annotations

import io
import re
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from epsilons.accounting.results import Epsilons
from epsilons.analysis.figures import epsilon_histogram
from epsilons.analysis.groups import group_summary
from epsilons.files import private_file
from epsilons.runs import Run

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)


def write_report(run: Run) -> Path:
    """Write `private/report.html` of the run and say where it is."""
    epsilons = run.epsilons()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    page = environment.from_string(source).render(
        name=run.path.name,
        plan=run.plan,
        epsilons=epsilons,
        quantiles=[(share, epsilons.quantile(share)) for share in QUANTILES],
        histogram=_histogram(epsilons),
        groups={
            column: group_summary(epsilons, run.examples, run.test, column)
            for column in run.examples.groups
        },
    )
    with private_file(run.report_file) as file:
        file.write(page.encode())
    return run.report_file


def _histogram(epsilons: Epsilons) -> Markup:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    epsilon_histogram(figure.add_subplot(), epsilons)
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", drawn.getvalue(), flags=re.DOTALL)
    median, worst = epsilons.quantile(0.5), epsilons.worst_case
    label = f"Histogram of ε: median {median:.3g}, worst case {worst:.3g}."
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1))
