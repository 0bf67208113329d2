"""Groups as rows: what they pay, how they are served, how well they can be attacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from epsilons.analysis.attack import Attack
from epsilons.analysis.figures.style import BLUE, GREY, INK, MARKERS, ORANGE, SERIES, bare, wrapped
from epsilons.analysis.groups import GroupSummary


def group_bars(axes: Axes, summary: GroupSummary) -> None:
    """Mean ε of each group with its interval, highest on top, and the test accuracy beside it."""
    rows, places = summary.rows, np.arange(len(summary))
    means = np.array([row.mean_epsilon for row in rows])
    reach = np.abs(np.array([row.interval for row in rows]).T - means)
    shades = [0.45 if row.small else 1.0 for row in rows]
    bars = axes.barh(places, means, height=0.62, color=BLUE, edgecolor="none")
    for bar, shade in zip(bars, shades, strict=True):
        bar.set_alpha(shade)
    axes.errorbar(means, places, xerr=reach, fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    names = [f"{row.group} *" if row.small else row.group for row in rows]
    axes.set_yticks(places, wrapped(names))
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlim(0, 1.05 * max(row.interval.high for row in rows))
    axes.set_xlabel("mean ε (bars)")
    axes.set_ylabel(summary.name)
    bare(axes)
    known = [(k, row.test_accuracy) for k, row in enumerate(rows) if row.test_accuracy is not None]
    if known:
        beside = axes.twiny()
        at, accuracy = zip(*known, strict=True)
        shares = 100 * np.array(accuracy)
        beside.plot(shares, at, "D", color=ORANGE, markersize=5, markeredgecolor="white",
                    markeredgewidth=0.8)  # fmt: skip
        spread = max(4.0, float(np.ptp(shares)))
        beside.set_xlim(shares.min() - 0.35 * spread, min(101.5, shares.max() + 0.25 * spread))
        beside.set_xlabel("test accuracy in % (diamonds)", color=ORANGE)
        beside.tick_params(axis="x", colors=ORANGE)
        beside.spines[["right", "left", "bottom"]].set_visible(False)
        beside.spines["top"].set_color(ORANGE)


def attack_success(axes: Axes, attacks: Mapping[str, Attack], order: Sequence[str] = ()) -> None:
    """Success of membership inference by group, for one or more models; ½ is guessing.

    `order` of the groups, the last on top; by default by success against the first model.
    """
    first = next(iter(attacks.values()))
    names = [row.group for row in first.rows if row.group is not None]
    ordered = sorted(names, key=lambda name: first.of(name).success)
    if set(names) <= set(order):
        ordered = [name for name in order if name in names]
    lines = [*ordered, "everyone"]
    height = 0.8 / len(attacks)
    for k, (label, attack) in enumerate(attacks.items()):
        known = {row.group: row for row in attack.rows}
        rows = [*(known.get(name) for name in ordered), attack.everyone]
        offset = (k - (len(attacks) - 1) / 2) * height if len(attacks) > 1 else 0.0
        places = [place + offset for place, row in enumerate(rows) if row is not None]
        found = [row for row in rows if row is not None]
        success = np.array([row.success for row in found])
        reach = np.abs(np.array([row.interval for row in found]).T - success)
        axes.errorbar(100 * success, places, xerr=100 * reach, fmt=MARKERS[k], color=SERIES[k],
                      markersize=5, elinewidth=1.2, capsize=2, label=label)  # fmt: skip
    axes.axvline(50, color=GREY, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(lines)), wrapped(lines))
    axes.set_ylim(-0.7, len(lines) - 0.3)
    axes.set_xlabel("right guesses in % (50: guessing)")
    if first.by:
        axes.set_ylabel(" × ".join(first.by))
    if len(attacks) > 1:
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=2)
    bare(axes)
