"""How near an attack came to what is stated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from epsilons.analysis.figures.style import BLUE, ORANGE, SKY, bare, wrapped


def audit_strips(axes: Axes, rows: Sequence[tuple[str, float, float]]) -> None:
    """A strip from lower bound to claim for each (name, bound, claim), first on top."""
    places = np.arange(len(rows))[::-1]
    low = np.array([bound for _, bound, _ in rows])
    claim = np.array([stated for _, _, stated in rows])
    axes.barh(places, claim - low, left=low, height=0.5, color=SKY)
    axes.plot(low, places, "o", color=BLUE, markersize=5, label="at least, by the attack (95 %)")
    axes.plot(claim, places, "D", color=ORANGE, markersize=5, label="stated")
    axes.set_yticks(places, wrapped([name for name, _, _ in rows]))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.05 * float(max(claim.max(), low.max(), 1e-3)))
    axes.set_xlabel("ε")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    bare(axes)
