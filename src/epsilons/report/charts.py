"""Figures as inline SVG: text stays text, colours follow the page, light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epsilons.analysis.figures import style

WIDTH = 5.0  # inches: at this width 10.5 points are legible on a phone and not huge on a desk
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "legend.fontsize": 9.5,
    "legend.title_fontsize": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.labelsize": 10.5,
    "text.color": style.INK,
    "axes.labelcolor": style.INK,
    "axes.edgecolor": style.INK,
    "xtick.color": style.INK,
    "ytick.color": style.INK,
}
_VARIABLES = {
    style.INK: "ink",
    style.GREY: "grey",
    style.PALE: "pale",
    style.BLUE: "blue",
    style.ORANGE: "orange",
    style.GREEN: "green",
    style.PURPLE: "purple",
    style.SKY: "sky",
    "#ffffff": "paper",
}


@dataclass(frozen=True)
class Chart:
    """A figure of the page: its drawing, what it shows (a heading), and what it found."""

    name: str
    heading: str
    finding: str
    svg: Markup


def chart(
    name: str, heading: str, finding: str, draw: Callable[[Axes], None], height: float = 3.1
) -> Chart:
    """Draw on new axes. `finding` is the sentence beside the figure and its text alternative."""
    with rc_context(_SETTINGS):
        figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        draw(axes)
        figure.set_figheight(height + _more_lines(axes))
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return Chart(name, heading, finding, _inline(name, drawn.getvalue(), f"{heading}. {finding}"))


def rows_height(rows: int) -> float:
    """The height, in inches, of a figure with so many groups as rows."""
    return 1.35 + 0.26 * max(3, rows)


def _more_lines(axes: Axes) -> float:
    """The height, in inches, that labels of rows need where they have more than one line."""
    lines = [label.get_text().count("\n") for label in axes.get_yticklabels()]
    return 0.16 * len(lines) * max(lines, default=0)


def _inline(name: str, svg: str, alternative: str) -> Markup:
    """The SVG element alone, with ids of its own and the page's colours."""
    svg = re.sub(r"^.*?(?=<svg)", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", svg)
    svg = re.sub(r'xlink:href="#([^"]+)"', rf'href="#{name}-\1"', svg)
    svg = re.sub(r"font: (?:[a-z]+ )?([\d.]+px) [^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # as other versions of matplotlib write it
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{variable})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(alternative)}"', 1))
