"""Several clip bounds beside each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from epsilons.analysis.clip_bounds import BoundRow
from epsilons.analysis.figures.examples import BINS
from epsilons.analysis.figures.style import INK, MARKERS, PALE, SERIES, bare, words, wrapped


def bound_histograms(axes: Axes, rows: Sequence[BoundRow]) -> None:
    """Histograms of ε one above the other, smallest bound on top; dashed: the mean."""
    worst = max(row.epsilons.worst_case for row in rows)
    for k, row in enumerate(reversed(rows)):
        counts, edges = np.histogram(row.epsilons.values, bins=BINS, range=(0, worst))
        shares = counts / max(1, counts.max()) * 0.66
        axes.bar(edges[:-1], shares, np.diff(edges), bottom=k, align="edge", color=SERIES[0],
                 edgecolor="none")  # fmt: skip
        axes.axhline(k, color=INK, linewidth=0.8)
        mean = float(row.epsilons.values.mean())
        axes.plot([mean, mean], [k, k + 0.72], color=INK, linestyle="--", linewidth=1)
        found = f"{row.label}: mean {mean:.2f}, {100 * row.at_worst_case:.0f} % at worst"
        words(axes, found, (0, k + 0.9), va="top")
    axes.set_ylim(0, len(rows))
    axes.set_xlim(0, 1.012 * worst)
    axes.set_yticks([])
    axes.set_xlabel("ε of an example")
    bare(axes)
    axes.spines["left"].set_visible(False)


def bound_groups(axes: Axes, rows: Sequence[BoundRow], by: Sequence[str] = ()) -> None:
    """Mean ε of each group under each clip bound. `by`: the columns that groups are named after.

    Markers shrink from row to row, so that equal means show both.
    """
    names = sorted(rows[0].group_means, key=lambda name: rows[0].group_means[name])
    places = np.arange(len(names))
    ends = np.array([[row.group_means.get(name, np.nan) for row in rows] for name in names])
    axes.hlines(places, np.nanmin(ends, axis=1), np.nanmax(ends, axis=1), color=PALE, linewidth=3)
    for k, row in enumerate(rows):
        axes.plot(ends[:, k], places, MARKERS[k], color=SERIES[k],
                  markersize=max(4.0, 7.5 - 1.5 * k), label=row.label)  # fmt: skip
    axes.set_yticks(places, wrapped(names))
    axes.set_ylim(-0.6, len(names) - 0.4)
    axes.set_xlim(0, 1.05 * np.nanmax(ends))
    axes.set_xlabel("mean ε")
    axes.set_ylabel(" × ".join(by))
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=len(rows),
                handletextpad=0.2, columnspacing=1.0)  # fmt: skip
    bare(axes)
