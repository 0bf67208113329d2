import numpy as np
import pytest

from epsilons.analysis import epsilon_course, norm_course, other_clip_bounds
from epsilons.analysis.replay import replayed


def test_medians_are_those_of_each_group_at_each_refresh(followed):
    course = norm_course(followed, "class")
    assert course.steps.tolist() == [0, 10, 20, 30]
    for group, medians in course.medians.items():
        inside = followed.examples.groups["class"] == group
        for step, found in zip(course.steps, medians, strict=True):
            expected = np.quantile(followed.journal.norms(step)[inside], 0.5, method="lower")
            assert found == expected


def test_last_moment_is_the_whole_run(followed):
    course = epsilon_course(followed)
    every = replayed(followed.journal, np.arange(400), sampled=False).epsilons()
    assert course.steps[-1] == 40
    for q, values in course.quantiles.items():
        assert values[-1] == pytest.approx(every.quantile(q), rel=1e-6)


def test_worst_case_over_time_is_the_plans_by_every_method(followed):
    course = epsilon_course(followed, moments=4)
    for method, values in course.worst_case.items():
        expected = [followed.plan.worst_case(method, steps=int(k)) for k in course.steps]
        assert values == pytest.approx(expected, rel=1e-6)
    assert len(course.worst_case) >= 2


def test_nobody_gets_privacy_back(followed):
    course = epsilon_course(followed)
    for values in (*course.quantiles.values(), *course.worst_case.values()):
        assert (np.diff(values) >= -1e-9).all()


def test_the_runs_own_bound_gives_its_own_epsilons(followed):
    half, same, twice = other_clip_bounds(followed, "class")
    assert same.epsilons.values == pytest.approx(followed.epsilons().values)
    assert [row.max_grad_norm for row in (half, same, twice)] == [0.5, 1.0, 2.0]
    inside = followed.examples.groups["class"] == "cat"
    assert same.group_means["cat"] == pytest.approx(same.epsilons.values[inside].mean())


def test_a_larger_bound_spreads_and_a_smaller_one_levels(followed):
    half, same, twice = other_clip_bounds(followed)
    assert (half.epsilons.values >= same.epsilons.values - 1e-6).all()
    assert (same.epsilons.values >= twice.epsilons.values - 1e-6).all()
    assert half.at_worst_case >= same.at_worst_case >= twice.at_worst_case
    assert half.clipped > same.clipped > twice.clipped
