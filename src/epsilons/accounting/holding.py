"""Which recorded norm holds at a step that has none of its own.

Norms are recorded now and then, and priced when the training is over, so a step without a record
may be charged by the record before it, by that after it, or by both.

| hold         | a step without a record of its own is charged                                  |
|--------------|--------------------------------------------------------------------------------|
| `"nearest"`  | the record nearest in time, of two as near the earlier: the best estimate      |
| `"cautious"` | the larger of the records before and after it: rarely far below the truth      |
| `"previous"` | the record before it (the paper's Algorithm 2)                                 |

A step with a record of its own is charged that one, and after the last record that one holds. All
are functions of the example's own records, so that none needs more privacy than another.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting import checks

Hold = Literal["nearest", "cautious", "previous"]
"""Which record a step without one of its own is charged."""
HOLDS: tuple[Hold, ...] = get_args(Hold)
"""All of them, the default first."""
NEVER = 2**61  # the step of a record that was not made


def held(
    norms: NDArray[np.floating[Any]], at: NDArray[np.int64], end: int, hold: Hold = "nearest"
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Norms (rows, m) and for how many steps each holds (rows,), from the first record to `end`.

    `norms` (r, m): records of m examples, made before the ascending steps `at` (r,). `end`: one
    more than the last step. `hold`: see the table of this module. The rows are in the order of the
    steps.

    >>> norms, at = np.array([[4.0], [1.0]]), np.array([0, 10])
    >>> held(norms, at, 15)[1], held(norms, at, 15, "previous")[1]
    (array([6, 4, 5]), array([10,  5]))
    """
    checks.one_of("hold", hold, HOLDS)
    records = np.asarray(norms, dtype=np.float64)
    ends = np.append(at[1:], end)
    own, other = shares(at, np.append(at[1:], NEVER), at, ends, hold)
    following = np.concatenate([records[1:], records[-1:]])
    rows = np.stack([records, norm_between(records, following, hold)], axis=1)
    steps = np.stack([own, other], axis=1).ravel()
    return rows.reshape(-1, records.shape[1])[steps > 0], steps[steps > 0]


def shares(
    at: NDArray[np.int64],
    next_at: NDArray[np.int64],
    first: NDArray[np.int64],
    end: NDArray[np.int64],
    hold: Hold,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the steps `first` to before `end`: how many the norm recorded at `at` holds for.

    Second: for how many `norm_between` it and the next record does. `at` ≤ `first` and
    `end` ≤ `next_at`. Without a next record `next_at` is `NEVER`. Without an earlier one `at` is
    `NEVER`, and `norm`, the clip bound then, holds up to the next.
    """
    turn = {"nearest": (at + next_at) // 2 + 1, "cautious": at + 1, "previous": next_at}[hold]
    turn = np.clip(turn, first, np.maximum(first, end))
    return turn - first, np.maximum(first, end) - turn


def norm_between(
    norm: NDArray[np.float64], next_norm: NDArray[np.float64], hold: Hold
) -> NDArray[np.float64]:
    """What holds from where a record's own norm no longer does, to the next record.

    NaN, which is charged at the clip bound, is larger than any number.
    """
    return np.maximum(norm, next_norm) if hold == "cautious" else next_norm
