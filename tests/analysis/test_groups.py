import numpy as np
import pytest
from scipy.stats import spearmanr

from epsilons import Epsilons, Examples
from epsilons.analysis import group_summary


def epsilons(values, worst=10.0, kind="exact"):
    return Epsilons(
        values=np.asarray(values, float), delta=1e-5, method="rdp", kind=kind, worst_case=worst
    )


def made(n=1200, tested=900, seed=0):
    """Three classes whose ε's rise and accuracies fall, and two sexes."""
    rng = np.random.default_rng(seed)
    code, test_code = rng.integers(0, 3, n), rng.integers(0, 3, tested)
    train = Examples(ids=np.arange(n), losses=rng.random(n) + code,
                     groups={"class": np.array(list("abc"))[code],
                             "sex": rng.choice(["F", "M"], n)})  # fmt: skip
    test = Examples(ids=np.arange(tested), losses=rng.random(tested),
                    correct=rng.random(tested) < 0.9 - 0.2 * test_code,
                    groups={"class": np.array(list("abc"))[test_code],
                            "sex": rng.choice(["F", "M"], tested)})  # fmt: skip
    return epsilons(np.minimum(rng.gamma(4.0, 0.5, n) * (1 + 0.4 * code), 4.0), 4.0), train, test


def test_rows_are_the_plain_statistics_of_each_group():
    eps, train, test = made()
    for row in group_summary(eps, train, test, "class"):
        inside = train.groups["class"] == row.group
        assert row.n == inside.sum()
        assert row.mean_epsilon == pytest.approx(eps.values[inside].mean())
        assert row.quantiles[0.5] == np.quantile(eps.values[inside], 0.5, method="higher")
        assert row.at_worst_case == pytest.approx((eps.values[inside] == 4.0).mean())
        assert row.train_loss == pytest.approx(train.losses[inside].mean())
        assert row.test_accuracy == test.correct[test.groups["class"] == row.group].mean()
        assert row.interval.low < row.mean_epsilon < row.interval.high
        assert row.accuracy_interval.low < row.test_accuracy < row.accuracy_interval.high


def test_rows_ascend_in_mean_epsilon():
    means = [row.mean_epsilon for row in group_summary(*made(), "class")]
    assert means == sorted(means)


def test_interval_of_a_mean_is_the_normal_one_for_large_groups():
    eps, train, _ = made(n=9000)
    for row in group_summary(eps, train, None, "class"):
        values = eps.values[train.groups["class"] == row.group]
        reach = 1.96 * values.std() / len(values) ** 0.5
        assert row.interval == pytest.approx(
            (values.mean() - reach, values.mean() + reach), rel=8e-3
        )


def test_gap_is_the_least_accurate_groups_mean_over_the_most_accurates():
    eps, train, test = made()
    found = group_summary(eps, train, test, "class")
    mean = {row.group: row.mean_epsilon for row in found}
    assert (found.gap.least_accurate, found.gap.most_accurate) == ("c", "a")
    assert found.gap.percent == pytest.approx(100 * (mean["c"] / mean["a"] - 1))
    assert found.gap.interval.low < found.gap.percent < found.gap.interval.high


def test_equally_accurate_groups_are_one_in_the_gap():
    labels = ["a"] * 40 + ["b"] * 80 + ["c"] * 40
    train = Examples(ids=np.arange(160), groups={"g": labels})
    test = Examples(ids=np.arange(160), groups=train.groups, correct=[True] * 120 + [False] * 40)
    values = [1.0] * 40 + [4.0] * 80 + [6.0] * 40
    gap = group_summary(epsilons(values), train, test, "g").gap
    assert (gap.least_accurate, gap.most_accurate) == ("c", "a, b")
    assert gap.percent == pytest.approx(100.0)
    assert gap.interval == pytest.approx((100.0, 100.0))


def test_rank_correlation_is_spearmans_over_groups():
    eps, train, test = made()
    found = group_summary(eps, train, test, ["class", "sex"])
    pairs = [(row.test_accuracy, row.mean_epsilon) for row in found]
    assert found.rank_correlation == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
    assert found.rank_correlation < -0.5


def test_intersections_are_the_groups_of_both_columns():
    eps, train, test = made()
    found = group_summary(eps, train, test, ("class", "sex"))
    assert {row.group for row in found} == {f"{c} × {s}" for c in "abc" for s in "FM"}
    assert sum(row.n for row in found) == len(train)
    one = next(row for row in found if row.group == "b × F")
    inside = (train.groups["class"] == "b") & (train.groups["sex"] == "F")
    assert one.mean_epsilon == pytest.approx(eps.values[inside].mean())


def test_small_groups_are_flagged_and_decide_nothing():
    train = Examples(ids=np.arange(104), groups={"g": ["a"] * 50 + ["b"] * 50 + ["rare"] * 4})
    test = Examples(ids=np.arange(104), groups=train.groups,
                    correct=[True] * 50 + [False] * 50 + [False] * 4)  # fmt: skip
    found = group_summary(epsilons([1.0] * 50 + [2.0] * 50 + [9.0] * 4), train, test, "g")
    assert [row.small for row in found] == [False, False, True]
    assert found.gap.percent == pytest.approx(100.0)
    assert found.rank_correlation is None  # two groups are no ranking


def test_groups_without_held_out_examples_have_no_accuracy():
    train = Examples(ids=[1, 2], groups={"g": ["a", "b"]})
    test = Examples(ids=[1], groups={"g": ["a"]}, correct=[True])
    found = group_summary(epsilons([1.0, 2.0]), train, test, "g")
    assert [row.test_accuracy for row in found] == [1.0, None]
    assert found.gap is None


def test_a_run_that_is_not_private_still_has_accuracies():
    _, train, test = made()
    found = group_summary(epsilons(np.full(len(train), np.inf), np.inf, "none"), train, test, "sex")
    assert all(np.isinf(row.mean_epsilon) and row.test_accuracy for row in found)
    assert found.gap is None


def test_unknown_column_is_refused_with_the_known_ones():
    eps, train, test = made()
    with pytest.raises(ValueError, match="'age'; the run has: class, sex"):
        group_summary(eps, train, test, "age")
