"""Figures, one function each: axes and data in, a drawing on the axes out."""

from epsilons.analysis.figures.audit import audit_strips
from epsilons.analysis.figures.bounds import bound_groups, bound_histograms
from epsilons.analysis.figures.course import (
    course_of_epsilons,
    course_of_norms,
    course_of_worst_case,
)
from epsilons.analysis.figures.examples import epsilon_histogram, estimate_scatter, loss_scatter
from epsilons.analysis.figures.groups import attack_success, group_bars
from epsilons.analysis.figures.published import published_intervals

__all__ = [
    "attack_success",
    "audit_strips",
    "bound_groups",
    "bound_histograms",
    "course_of_epsilons",
    "course_of_norms",
    "course_of_worst_case",
    "epsilon_histogram",
    "estimate_scatter",
    "group_bars",
    "loss_scatter",
    "published_intervals",
]
