"""Groups beside each other: who pays more, and is it who is served worse?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.results import Epsilons
from epsilons.analysis.confidence import (
    RESAMPLES,
    Interval,
    percentiles,
    resampled_means,
    share_interval,
)
from epsilons.analysis.correlation import spearman
from epsilons.examples import Examples

QUANTILES = (0.1, 0.5, 0.9)
# Below so many examples, in training or held out, a group's figures say little about the group.
SMALL = 30


@dataclass(frozen=True)
class GroupRow:
    """One group: its examples, ε's, loss and accuracy.

    `group`: its label. `n` and `test_n`: how many examples it has, training and held out.
    `mean_epsilon`, and `quantiles` by share. `train_loss` and `test_accuracy`: means under the
    final model; None if not known.

    `at_worst_case`: the share of its examples at the worst case. `small`: too few examples.
    `interval`, `accuracy_interval`: of the mean ε and of the accuracy, 95 %, bootstrap and Wilson.
    """

    group: str
    n: int
    mean_epsilon: float
    interval: Interval
    quantiles: Mapping[float, float]
    at_worst_case: float
    train_loss: float | None
    test_n: int
    test_accuracy: float | None
    accuracy_interval: Interval | None
    small: bool


@dataclass(frozen=True)
class Gap:
    """By how many % the least accurate group's mean ε exceeds the most accurate group's.

    Equally accurate groups count as one, named with commas in between: choosing among them would
    make the gap whatever one likes. `least_accurate` and `most_accurate`: their names. `percent`:
    the gap, with its 95 % `interval`.
    """

    least_accurate: str
    most_accurate: str
    percent: float
    interval: Interval


@dataclass(frozen=True)
class GroupSummary:
    """The groups of `by`, by ascending mean ε; gap and correlation leave small groups out.

    `rank_correlation`: Spearman's, of the groups' test accuracy and mean ε; −1 if the worse a group
    is served, the less private it is. `rows`: one per group. `gap`: between the least and the most
    accurate; None with fewer than two.
    """

    by: tuple[str, ...]
    rows: tuple[GroupRow, ...]
    gap: Gap | None
    rank_correlation: float | None

    def __iter__(self) -> Iterator[GroupRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        """The columns in words, joined by ×."""
        return " × ".join(self.by)


def group_summary(
    epsilons: Epsilons,
    examples: Examples,
    test: Examples | None,
    by: str | Sequence[str],
    *,
    small: int = SMALL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> GroupSummary:
    """Privacy and accuracy of each group of one column, or of each intersection of several.

    `seed` draws the bootstrap. Groups are those of the training examples; a group without held-out
    examples has no accuracy. `epsilons` of the training `examples`; `test`: held-out ones, or None;
    all with the column `by`, or columns. `small`: below so many examples a group is small; by
    default 30. `resamples`: how many of the bootstrap; by default 1000.

    >>> people = Examples(ids=range(4), groups={"sex": ["F", "M", "F", "M"]})
    >>> found = Epsilons(values=np.array([3.0, 1.0, 5.0, 1.0]), delta=1e-5, method="rdp",
    ...                  kind="exact", worst_case=5.0)
    >>> [(row.group, row.mean_epsilon) for row in group_summary(found, people, None, "sex")]
    [('M', 1.0), ('F', 4.0)]
    """
    columns = (by,) if isinstance(by, str) else tuple(by)
    labels = group_labels(examples, columns)
    held_out = None if test is None or test.correct is None else _labels_or_none(test, columns)
    generator = np.random.default_rng(seed)
    names, index = np.unique(labels, return_inverse=True)
    rows, means = [], {}
    for k, name in enumerate(names.tolist()):
        members = index == k
        values = epsilons.values[members]
        means[name] = resampled_means(values, generator, resamples)
        right = None
        if held_out is not None and test is not None and test.correct is not None:
            right = test.correct[held_out == name]
        rows.append(_row(name, members, epsilons, examples, means[name], right, small))
    rows.sort(key=lambda row: (row.mean_epsilon, row.group))
    large = [row for row in rows if not row.small and row.test_accuracy is not None]
    return GroupSummary(columns, tuple(rows), _gap(large, means), _rank_correlation(large))


def group_labels(examples: Examples, columns: Sequence[str]) -> NDArray[np.str_]:
    """The group (n,) of each of `examples`, by `columns`; of several, their labels joined by ×.

    ValueError for a column that is not there.
    """
    for column in columns:
        if column not in examples.groups:
            known = ", ".join(examples.groups) or "none"
            raise ValueError(f"there is no group column {column!r}; the run has: {known}")
    if not columns:
        raise ValueError("no group column was given; expected at least one")
    joined: NDArray[np.str_] = examples.groups[columns[0]].astype(str)
    for column in columns[1:]:
        joined = np.char.add(np.char.add(joined, " × "), examples.groups[column].astype(str))
    return joined


def _labels_or_none(test: Examples, columns: Sequence[str]) -> NDArray[np.str_] | None:
    return group_labels(test, columns) if set(columns) <= set(test.groups) else None


def _row(
    name: str,
    members: NDArray[np.bool_],
    epsilons: Epsilons,
    examples: Examples,
    means: NDArray[np.float64],
    right: NDArray[np.bool_] | None,
    small: int,
) -> GroupRow:
    values = epsilons.values[members]
    tested = 0 if right is None else len(right)
    few = len(values) < small or (right is not None and tested < small)
    return GroupRow(
        group=name,
        n=len(values),
        mean_epsilon=float(values.mean()),
        interval=percentiles(means),
        quantiles={q: float(np.quantile(values, q, method="higher")) for q in QUANTILES},
        at_worst_case=float(epsilons.at_worst_case[members].mean()),
        train_loss=None if examples.losses is None else float(examples.losses[members].mean()),
        test_n=tested,
        test_accuracy=float(right.mean()) if right is not None and tested else None,
        accuracy_interval=(
            share_interval(float(right.sum()), tested) if right is not None and tested else None
        ),
        small=few,
    )


def _gap(rows: list[GroupRow], means: Mapping[str, NDArray[np.float64]]) -> Gap | None:
    """The paper's: the two groups are fixed by their accuracy, their means are resampled."""
    if len(rows) < 2 or not all(np.isfinite(row.mean_epsilon) for row in rows):
        return None
    accuracies = [row.test_accuracy for row in rows if row.test_accuracy is not None]
    least = [row for row in rows if row.test_accuracy == min(accuracies)]
    most = [row for row in rows if row.test_accuracy == max(accuracies)]
    below, above = _together(most), _together(least)
    if min(accuracies) == max(accuracies) or below == 0:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        resampled = 100 * (_together(least, means) / _together(most, means) - 1)
    return Gap(
        _names(least), _names(most), float(100 * (above / below - 1)), percentiles(resampled)
    )


def _together(
    rows: list[GroupRow], means: Mapping[str, NDArray[np.float64]] | None = None
) -> NDArray[np.float64]:
    """Mean ε of several groups as one; of resampled `means`, (resamples,)."""
    parts = [row.n * (row.mean_epsilon if means is None else means[row.group]) for row in rows]
    return np.asarray(sum(parts) / sum(row.n for row in rows))


def _names(rows: list[GroupRow]) -> str:
    return ", ".join(sorted(row.group for row in rows))


def _rank_correlation(rows: list[GroupRow]) -> float | None:
    if len(rows) < 3:
        return None
    accuracies, means = zip(*((row.test_accuracy, row.mean_epsilon) for row in rows), strict=True)
    return spearman(np.array(accuracies), np.array(means))
