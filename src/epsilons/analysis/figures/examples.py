"""One mark per example, or per crowd of examples."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from numpy.typing import NDArray

from epsilons.accounting.printed import epsilon_text
from epsilons.accounting.results import Epsilons
from epsilons.analysis.estimates import EstimateError
from epsilons.analysis.figures.style import BLUE, INK, ORANGE, bare, short, words
from epsilons.analysis.relations import LossRelation

BINS = 40
# More examples than this are drawn as a density: single dots would hide each other.
DOTS = 1500
_CELLS = (56, 40)
_SHADES = (0.12, 0.28, 0.46, 0.66, 0.9)


def epsilon_histogram(axes: Axes, epsilons: Epsilons) -> None:
    """How many examples have which ε, with the 30, 50 and 70 % quantiles and the worst case."""
    worst = epsilons.worst_case
    counts, edges = np.histogram(epsilons.values, bins=BINS, range=(0, worst))
    axes.bar(edges[:-1], counts, np.diff(edges), align="edge", color=BLUE, edgecolor="none")
    top = 1.36 * max(1, counts.max())  # room for the words above the highest bar
    axes.set_ylim(0, top)
    axes.set_xlim(0, 1.012 * worst)
    for share, height in ((0.3, 0.985), (0.5, 0.925), (0.7, 0.865)):
        at = float(epsilons.quantile(share))
        axes.plot([at, at], [0, height * top], color=INK, linestyle="--", linewidth=1)
        right = at < 0.8 * worst
        words(axes, f"{share * 100:.0f} %", (at, height * top), va="top",
              ha="left" if right else "right", xytext=(3 if right else -3, 0))  # fmt: skip
    axes.axvline(worst, color=ORANGE, linewidth=2)
    axes.set_title(f"worst case {epsilon_text(worst)}", loc="right", color=ORANGE,
                   fontsize=axes.xaxis.label.get_fontsize())  # fmt: skip
    axes.set_xlabel(f"ε of an example (δ = {short(epsilons.delta)})")
    axes.set_ylabel("examples")
    bare(axes)


def loss_scatter(axes: Axes, relation: LossRelation) -> None:
    """ε against final training loss, with the logarithmic fit and Pearson's r."""
    x = np.log10(relation.losses)
    _crowd(axes, x, relation.epsilons)
    if relation.slope is not None:
        ends = np.linspace(x.min(), x.max(), 50)
        line = relation.predicted(10**ends)
        inside = (line >= 0) & (line <= 1.02 * relation.worst_case)
        axes.plot(ends[inside], line[inside], color=INK, linewidth=1.5)
    axes.axhline(relation.worst_case, color=ORANGE, linewidth=1.5)
    axes.set_ylim(0, 1.04 * relation.worst_case)
    low, high = np.floor(x.min()), np.ceil(x.max())
    marks = np.arange(low, high + 1, max(1, np.ceil((high - low) / 7)))
    axes.set_xticks(marks, [short(float(10**mark)) for mark in marks])
    axes.set_xlim(x.min() - 0.1, x.max() + 0.1)
    if relation.pearson is not None:
        axes.set_title(f"Pearson’s r = {relation.pearson:.2f}", loc="left",
                       fontsize=axes.xaxis.label.get_fontsize())  # fmt: skip
    axes.set_title("worst case", loc="right", color=ORANGE,
                   fontsize=axes.xaxis.label.get_fontsize())  # fmt: skip
    axes.set_xlabel("final training loss (logarithmic)")
    axes.set_ylabel("ε")
    bare(axes)


def estimate_scatter(axes: Axes, error: EstimateError) -> None:
    """Estimated against exact ε; on the line they agree."""
    _crowd(axes, error.exact, error.estimated)
    top = error.worst_case
    axes.plot([0, top], [0, top], color=INK, linewidth=1, linestyle="--")
    axes.set_xlim(0, 1.03 * top)
    axes.set_ylim(0, 1.06 * top)
    axes.axhline(top, color=ORANGE, linewidth=1.5)
    words(axes, "worst case", (0, top), color=ORANGE, va="top", xytext=(4, -3))
    every = error.reference == "every step"
    axes.set_xlabel("exact ε, from every step" if every else "ε from all refreshes")
    axes.set_ylabel("estimated ε" if every else "ε from every 2nd")
    bare(axes)


def _crowd(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
    """Dots; of many examples, cells that are the darker the more of them are in it."""
    if len(x) <= DOTS:
        axes.plot(x, y, "o", color=BLUE, markersize=3, markeredgewidth=0, alpha=0.5)
        return
    counts, across, up = np.histogram2d(x, y, bins=_CELLS)
    level = np.zeros_like(counts, dtype=int)
    filled = counts > 0
    reach = np.log(counts[filled]) / max(np.log(counts.max()), 1e-9)
    level[filled] = 1 + np.minimum((reach * len(_SHADES)).astype(int), len(_SHADES) - 1)
    for shade, alpha in enumerate(_SHADES, start=1):
        i, j = np.nonzero(level == shade)
        corners = [(across[i], up[j]), (across[i + 1], up[j]),
                   (across[i + 1], up[j + 1]), (across[i], up[j + 1])]  # fmt: skip
        cells = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
        axes.add_collection(PolyCollection(list(cells), facecolors=BLUE, edgecolors="none",
                                           alpha=alpha))  # fmt: skip
    axes.autoscale_view()
