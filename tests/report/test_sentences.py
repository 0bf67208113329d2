from types import SimpleNamespace

import numpy as np

from epsilons import Examples
from epsilons.accounting.results import Epsilons
from epsilons.analysis import group_summary, loss_relation
from epsilons.report import sentences


def epsilons(values, worst_case):
    return Epsilons(
        values=np.asarray(values), delta=1e-5, method="tight", kind="exact", worst_case=worst_case
    )


def test_no_share_is_said_to_be_above_the_worst_case():
    few = sentences.histogram(SimpleNamespace(epsilons=epsilons(np.linspace(0.1, 2, 100), 2.0)))
    many = sentences.histogram(SimpleNamespace(epsilons=epsilons([1.0] * 80 + [2.0] * 20, 2.0)))
    assert "10 % above 1.8" in few
    assert "above" not in many
    assert "20.0\u00a0% are at the worst case" in many


def test_everyone_at_the_worst_case_is_told_as_a_small_bound():
    everyone = sentences.histogram(SimpleNamespace(epsilons=epsilons([2.0] * 5, 2.0)))
    assert everyone.startswith("C is small: ")


def test_a_falling_epsilon_is_told_as_lower():
    falling = loss_relation(epsilons([3.0, 2.0, 1.0], 5.0), [1.0, 10.0, 100.0])
    assert "an ε lower by 1.00." in sentences.loss(falling)


def two_groups(above, spread):
    """The gap between two groups, the second of which pays more and is served worse."""
    n = 400
    noise = spread * np.random.default_rng(1).normal(size=2 * n)
    groups = {"g": np.repeat(["low", "high"], n)}
    found = epsilons(1.0 + above * np.repeat([0, 1], n) + noise, 9.0)
    correct = np.r_[np.ones(n, dtype=bool), np.arange(n) % 2 == 0]
    test = Examples(ids=range(2 * n), groups=groups, correct=correct)
    return group_summary(found, Examples(ids=range(2 * n), groups=groups), test, "g")


def test_who_pays_more_is_said_only_where_the_interval_says_so():
    sure, unsure = two_groups(0.3, 0.1), two_groups(0.005, 0.2)
    assert "The worst served, g high, pays" in sentences.gap(sure)
    assert "% more than the best served, g low (95 % interval +" in sentences.gap(sure)
    assert unsure.gap.interval.low < 0 < unsure.gap.interval.high
    said = sentences.gap(unsure)
    assert "can’t be told apart" in said
    assert "(95 % interval −" in said
    assert "more" not in said
    for summary in (sure, unsure):
        assert sentences.gap(summary) in sentences.groups(summary)


def test_a_group_with_few_held_out_examples_is_marked_for_that():
    groups = {"g": np.repeat(["a", "b"], 100)}
    test = Examples(ids=range(20), groups={"g": ["a", "b"] * 10}, correct=[True] * 20)
    summary = group_summary(
        epsilons(np.ones(200), 2.0), Examples(ids=range(200), groups=groups), test, "g"
    )
    said = sentences.groups(summary)
    assert "marked * have fewer than 30 examples in training or held out" in said


def test_a_group_hardly_above_average_is_not_at_risk():
    groups = np.repeat(["low", "middle", "high"], 200)
    found = epsilons(np.repeat([1.0, 1.18, 1.3], 200), 5.0)
    people = Examples(ids=range(600), groups={"g": groups})
    main = group_summary(found, people, None, "g")
    assert main.rows[1].interval.low > found.values.mean()
    risky = sentences.at_risk(SimpleNamespace(main=main, private=True, epsilons=found))
    assert [row.group for row in risky] == ["high"]
