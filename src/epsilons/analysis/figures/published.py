"""Published numbers with the intervals that their noise leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from epsilons.accounting.printed import epsilon_text
from epsilons.analysis.figures.style import BLUE, ORANGE, bare, wrapped

Named = tuple[str, float, float, float]  # name, value, low, high


def published_intervals(axes: Axes, rows: Sequence[Named], worst_case: float) -> None:
    """Each number as a dot with its interval, first on top, below the worst case."""
    places = np.arange(len(rows))[::-1]
    values = np.array([value for _, value, _, _ in rows])
    ends = np.array([[low, high] for _, _, low, high in rows]).T
    axes.errorbar(values, places, xerr=np.abs(ends - values), fmt="o", color=BLUE, markersize=4,
                  elinewidth=1.5, capsize=3)  # fmt: skip
    axes.axvline(worst_case, color=ORANGE, linewidth=2)
    axes.set_title(f"worst case {epsilon_text(worst_case)}", loc="right", color=ORANGE,
                   fontsize=axes.xaxis.label.get_fontsize())  # fmt: skip
    axes.set_yticks(places, wrapped([name for name, _, _, _ in rows]))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.02 * max(worst_case, float(ends.max(initial=0.0))))
    axes.set_xlabel("ε")
    bare(axes)
