"""Membership inference by a threshold on the loss (paper, Appendix D)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from epsilons.analysis.confidence import Interval, share_interval
from epsilons.analysis.groups import SMALL, group_labels
from epsilons.examples import Examples
from epsilons.runs import Run

SPLITS = 20
FALSE_POSITIVES = 0.01


@dataclass(frozen=True)
class AttackRow:
    """The attack on one group, or on everyone (`group` is None).

    `interval` and `true_positives_interval`: their 95 % intervals. `small`: too few examples for
    the figures to say much.

    `success`: share of right guesses among as many members as non-members; ½ is guessing. `n`:
    members, and non-members, of one split. `true_positives`: share of all members found at 1 %
    false positives.
    """

    group: str | None
    n: int
    success: float
    interval: Interval
    true_positives: float
    true_positives_interval: Interval
    small: bool


@dataclass(frozen=True)
class Attack:
    """The attack on everyone and on each group of `by`.

    `everyone`: all of them together. `rows`: one per group. `splits`: how
    many random splits were averaged.
    """

    by: tuple[str, ...]
    everyone: AttackRow
    rows: tuple[AttackRow, ...]
    splits: int

    def of(self, group: str) -> AttackRow:
        """The row of a `group`; ValueError if there is none."""
        for row in self.rows:
            if row.group == group:
                return row
        raise ValueError(f"no group {group!r}; expected one of {[r.group for r in self.rows]}")


def loss_threshold_attack(
    examples: Examples,
    test: Examples | None,
    by: str | tuple[str, ...] | None = None,
    *,
    splits: int = SPLITS,
    seed: int = 0,
) -> Attack:
    """How often members are told from non-members by their loss alone: below it, member.

    For each group: all of its held-out examples and as many random training examples (or the other
    way round, if there are fewer of those). Each half gets the threshold that is best on the other
    half; success is averaged over both halves and over `splits` random splits, which also draw the
    members anew. The 95 % intervals are Wilson's, for as many guesses as one split makes.
    `examples` and `test`: training and held-out examples, with their losses. `by`: a column of
    groups, or several, whose intersections are groups; None: everyone alone. `splits`: by default
    20, drawn by `seed`. ValueError without losses or with too few examples.
    """
    if examples.losses is None or test is None or test.losses is None:
        raise ValueError(
            "the attack needs losses of training and of held-out examples; give fit a test set"
        )
    generator = np.random.default_rng(seed)
    members, others = _clean(examples.losses), _clean(test.losses)
    columns = () if by is None else (by,) if isinstance(by, str) else tuple(by)
    rows = []
    if columns:
        inside, outside = group_labels(examples, columns), group_labels(test, columns)
        for name in np.unique(inside).tolist():
            pair = members[inside == name], others[outside == name]
            if min(len(part) for part in pair) >= 2:
                rows.append(_row(name, *pair, splits, generator))
    return Attack(columns, _row(None, members, others, splits, generator), tuple(rows), splits)


def expect_comparable(run: Run) -> None:
    """ValueError if members and others are not of one kind: an owner has the mean of their losses.

    `run`: whose outcomes the attack would be on.
    """
    if run.plan.records_at_once > 1:
        raise ValueError(
            "the run's examples are persons, whose mean losses don't compare with those of single "
            "held-out records"
        )


def best_threshold(members: NDArray[np.float64], others: NDArray[np.float64]) -> float:
    """The threshold t at which `loss < t` tells members from others most often.

    >>> best_threshold(np.array([1.0, 2.0]), np.array([3.0, 5.0]))
    2.5
    """
    values, index = np.unique(np.concatenate([members, others]), return_inverse=True)
    side = np.concatenate([np.full(len(members), 1 / len(members)),
                           np.full(len(others), -1 / len(others))])  # fmt: skip
    gain = np.append(0.0, np.cumsum(np.bincount(index, weights=side)))
    k = int(gain.argmax())
    if k in (0, len(values)):  # nobody is a member, or everybody is
        return float(-np.inf if k == 0 else np.inf)
    low, high = values[k - 1], values[k]
    return float(low + (high - low) / 2) if np.isfinite(high) else float(np.nextafter(low, np.inf))


def _row(
    group: str | None,
    members: NDArray[np.float64],
    others: NDArray[np.float64],
    splits: int,
    generator: np.random.Generator,
) -> AttackRow:
    n = min(len(members), len(others))
    if n < 2:
        raise ValueError(f"{n} members and non-members can't be split in two; expected ≥ 2")
    success = float(np.mean([_success(members, others, n, generator) for _ in range(splits)]))
    limit = np.sort(others)[int(FALSE_POSITIVES * len(others))]
    found = int((members < limit).sum())
    return AttackRow(
        group=group,
        n=n,
        success=success,
        interval=share_interval(success * 2 * n, 2 * n),
        true_positives=found / len(members),
        true_positives_interval=share_interval(found, len(members)),
        small=n < SMALL,
    )


def _success(
    members: NDArray[np.float64],
    others: NDArray[np.float64],
    n: int,
    generator: np.random.Generator,
) -> float:
    """Share of right guesses in one split, each half judged by the other half's threshold."""
    inside = generator.permutation(members)[:n]
    outside = generator.permutation(others)[:n]
    half = n // 2
    right = 0
    for fit, judge in ((slice(half), slice(half, n)), (slice(half, n), slice(half))):
        threshold = best_threshold(inside[fit], outside[fit])
        right += int((inside[judge] < threshold).sum() + (outside[judge] >= threshold).sum())
    return right / (2 * n)


def _clean(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Losses with ∞ for what is not a number: such an example looks least like a member."""
    return np.where(np.isnan(losses), np.inf, losses)
