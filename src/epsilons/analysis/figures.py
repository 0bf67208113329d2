"""Figures, one function each: axes and data in, a drawing on the axes out."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from epsilons.accounting.results import Epsilons

# Okabe and Ito: told apart by colour-blind readers, and in grey.
_BLUE, _ORANGE = "#0072b2", "#d55e00"


def epsilon_histogram(axes: Axes, epsilons: Epsilons) -> None:
    """How many examples have which ε, with the 30, 50 and 70 % quantiles and the worst case."""
    edges = np.linspace(0, epsilons.worst_case, 41)
    axes.hist(epsilons.values, bins=edges.tolist(), color=_BLUE)
    top = 1.15 * axes.get_ylim()[1]  # room for the words above the highest bar
    axes.set_ylim(0, top)
    axes.set_xlim(0, 1.01 * epsilons.worst_case)
    for share in (0.3, 0.5, 0.7):
        at = float(epsilons.quantile(share))
        axes.axvline(at, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"{share:.0%}", (at, top), xytext=(2, -4), textcoords="offset points", va="top",
            fontsize=8,
        )  # fmt: skip
    axes.axvline(epsilons.worst_case, color=_ORANGE, linewidth=2)
    axes.annotate(
        f"worst case {epsilons.worst_case:.2f}", (epsilons.worst_case, top), xytext=(-4, -4),
        textcoords="offset points", va="top", ha="right", color=_ORANGE,
    )  # fmt: skip
    axes.set_xlabel(f"ε of an example (δ = {epsilons.delta:g})")
    axes.set_ylabel("examples")
    axes.spines[["top", "right"]].set_visible(False)
