"""Comparisons between examples, groups and runs, for the curator."""

from epsilons.analysis.attack import Attack, AttackRow, loss_threshold_attack
from epsilons.analysis.clip_bounds import BoundRow, bounds_of_runs, other_clip_bounds
from epsilons.analysis.comparison import Comparison, Headline, compare, headline
from epsilons.analysis.confidence import Interval
from epsilons.analysis.course import EpsilonCourse, NormCourse, epsilon_course, norm_course
from epsilons.analysis.estimates import (
    Agreement,
    EstimateError,
    ScheduleRow,
    estimate_error,
    fewer_refreshes,
)
from epsilons.analysis.groups import Gap, GroupRow, GroupSummary, group_labels, group_summary
from epsilons.analysis.relations import LossRelation, loss_relation

__all__ = [
    "Agreement",
    "Attack",
    "AttackRow",
    "BoundRow",
    "Comparison",
    "EpsilonCourse",
    "EstimateError",
    "Gap",
    "GroupRow",
    "GroupSummary",
    "Headline",
    "Interval",
    "LossRelation",
    "NormCourse",
    "ScheduleRow",
    "bounds_of_runs",
    "compare",
    "epsilon_course",
    "estimate_error",
    "fewer_refreshes",
    "group_labels",
    "group_summary",
    "headline",
    "loss_relation",
    "loss_threshold_attack",
    "norm_course",
    "other_clip_bounds",
]
