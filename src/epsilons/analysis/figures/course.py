"""The course of a training: steps to the right."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from epsilons.accounting.printed import epsilon_text
from epsilons.analysis.course import EpsilonCourse, NormCourse
from epsilons.analysis.figures.style import (
    BLUE,
    DASHES,
    INK,
    MARKERS,
    ORANGE,
    SERIES,
    bare,
    words,
    wrapped,
)

_LINES = 12


def course_of_norms(axes: Axes, course: NormCourse) -> None:
    """Median gradient norm of each group at the refreshes; of many groups, the outermost."""
    ordered = sorted(course.medians, key=lambda name: float(np.mean(course.medians[name])))
    if len(ordered) > _LINES:
        ordered = ordered[: _LINES // 2] + ordered[-_LINES // 2 :]
    least = min(float(course.medians[name].min()) for name in ordered)
    for k, name in enumerate(reversed(ordered)):
        colour, dash = SERIES[k % len(SERIES)], DASHES[k // len(SERIES) % len(DASHES)]
        axes.plot(course.steps, course.medians[name], color=colour, linestyle=dash, linewidth=1.5,
                  label=wrapped([name], 12)[0])  # fmt: skip
    if course.max_grad_norm is not None:
        axes.axhline(course.max_grad_norm, color=INK, linewidth=1)
        words(axes, "clip bound", (float(course.steps[-1]), course.max_grad_norm), ha="right",
              va="bottom", xytext=(0, 2))  # fmt: skip
    if least > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_xlabel("step")
    axes.set_ylabel("median gradient norm")
    axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1.0),
                handlelength=1.6, columnspacing=1.0, title=" × ".join(course.by))  # fmt: skip
    bare(axes)


def course_of_epsilons(axes: Axes, course: EpsilonCourse) -> None:
    """Quantiles of ε after so many steps, below the worst case."""
    steps = np.append(0, course.steps)
    for q, values in course.quantiles.items():
        line = np.append(0.0, values)
        middle = q == 0.5
        axes.plot(steps, line, color=BLUE, linewidth=2.2 if middle else 1.2,
                  linestyle="-" if middle else "--")  # fmt: skip
    worst = np.append(0.0, course.worst_case[course.method])
    axes.plot(steps, worst, color=ORANGE, linewidth=2)
    _end_labels(
        axes,
        float(steps[-1]),
        [(float(values[-1]), f"{100 * q:.0f} %", BLUE) for q, values in course.quantiles.items()]
        + [(float(worst[-1]), "worst", ORANGE)],
    )
    axes.set_xlim(0, 1.15 * steps[-1])
    axes.set_ylim(0, 1.14 * worst[-1])
    axes.set_xlabel("step")
    axes.set_ylabel("ε so far")
    bare(axes)


def course_of_worst_case(axes: Axes, course: EpsilonCourse) -> None:
    """The worst case after so many steps, by each method of accounting."""
    steps = np.append(0, course.steps)
    for k, (method, values) in enumerate(course.worst_case.items()):
        axes.plot(steps, np.append(0.0, values), color=(ORANGE, INK)[k % 2], linestyle=DASHES[k],
                  marker=MARKERS[k], markersize=3.5, linewidth=1.6,
                  label=f"{method}: {epsilon_text(values[-1])}")  # fmt: skip
    axes.set_xlim(0, 1.02 * steps[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step")
    axes.set_ylabel("worst-case ε so far")
    axes.legend(frameon=False, loc="lower right")
    bare(axes)


def _end_labels(axes: Axes, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Names at the ends of lines, moved apart where lines end close to each other."""
    top = max(value for value, _, _ in ends) or 1.0
    height = -1.0
    for value, name, colour in sorted(ends):
        height = max(value, height + 0.062 * top)
        words(axes, name, (x, height), va="center", color=colour)
