"""Norms to soft histograms: how many steps each example spent at which level of norm.

Level b of B is the norm C·b/B. A pair (norm, steps) goes to its two neighbouring levels, split
linearly in norm². Because K(α; s²) is convex in s² when the example is removed, the RDP of the
histogram is never below that of the history. Weights are integers in units of 2⁻³² steps, so
adding them up is exact and does not depend on the order.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting import checks, threads

UNIT = 2**32
DEFAULT_LEVELS = 256
PAPER_LEVELS = 100

Rounding = Literal["up", "nearest"] | None

_MODES: dict[Rounding, int] = {None: 0, "up": 1, "nearest": 2}
# Examples whose rows of the histogram stay in the processor's cache together.
_COLUMNS = 128


def level_norms(max_grad_norm: float, levels: int) -> NDArray[np.float64]:
    """The norms C·b/B for b = 0…B; built by index, so that C is one of them.

    >>> level_norms(2.0, 4)
    array([0. , 0.5, 1. , 1.5, 2. ])
    """
    bound = float(checks.positive("max_grad_norm", max_grad_norm))
    result: NDArray[np.float64] = bound * np.arange(levels + 1) / levels
    return result


def clipping_thresholds(
    norms: ArrayLike, max_grad_norm: float, levels: int = DEFAULT_LEVELS
) -> NDArray[np.float64]:
    """Individual clipping bounds: each norm rounded up to a level, never below level 1.

    NaN and ∞ get C. A threshold is its own threshold, so that what was clipped is what is charged.

    >>> clipping_thresholds([0.0, 0.5, 0.51, 9.0], max_grad_norm=2.0, levels=4)
    array([0.5, 0.5, 1. , 2. ])
    """
    z = np.atleast_1d(np.asarray(norms, dtype=np.float64))
    counts = soft_histogram(
        z.reshape(1, -1),
        np.ones(1, dtype=np.int64),
        max_grad_norm,
        levels=levels,
        rounding="up",
        least_level=1,
    )
    grid = level_norms(max_grad_norm, levels)
    result: NDArray[np.float64] = grid[counts[:, 0].argmax(axis=1)].reshape(np.shape(norms))
    return result


def soft_histogram(
    norms: ArrayLike,
    steps: ArrayLike,
    max_grad_norm: ArrayLike,
    *,
    levels: int = DEFAULT_LEVELS,
    rounding: Rounding = None,
    least_level: int = 0,
    phase: NDArray[np.int64] | None = None,
    phases: int = 1,
) -> NDArray[np.uint64]:
    """Weights (m, phases, levels + 1) in units of 2⁻³² steps, for norms (rows, m).

    `steps` (rows,) or (rows, m): how many steps each row stands for. `max_grad_norm`: a number
    or one per row. `phase` (rows,): which of the `phases` histograms a row goes to.

    | rounding  | where a norm between levels goes                                          |
    |-----------|---------------------------------------------------------------------------|
    | None      | to both, linearly in norm²; the fraction is rounded up                    |
    | "up"      | to the next level                                                         |
    | "nearest" | to the nearest of {r, 2r, …, C}, r = C/levels (the paper's, levels = 100) |

    Norms above C, NaN and ∞ count as C; a negative norm is an error. A norm in float32 that
    equals a level to the precision of float32 is on that level.

    >>> soft_histogram([[0.5, 1.0]], [3], 1.0, levels=2)[:, 0] / UNIT
    array([[0., 3., 0.],
           [0., 0., 3.]])
    """
    checks.one_of("rounding", rounding, tuple(_MODES))
    checks.whole("levels", levels, 1)
    z = np.asarray(norms)
    if z.dtype not in (np.float32, np.float64):
        z = z.astype(np.float64)
    if z.ndim != 2:
        raise ValueError(f"norms of shape {z.shape} must be (rows, examples).")
    rows, m = z.shape
    times = checks.counts("steps", steps)
    if times.shape not in ((rows,), (rows, m)):
        raise ValueError(
            f"steps of shape {times.shape} must be one per row, ({rows},), "
            f"or one per row and example, ({rows}, {m})."
        )
    if times.size and int(times.sum(axis=0, dtype=np.uint64).max()) >= UNIT:
        raise ValueError("more than 2³² steps in one history; expected fewer.")
    bound = np.array(np.broadcast_to(checks.positive("max_grad_norm", max_grad_norm), (rows,)))
    where = np.zeros(rows, dtype=np.int64) if phase is None else np.asarray(phase, dtype=np.int64)
    every = np.ascontiguousarray(times if times.ndim == 2 else times[:, None])
    # A float32 norm was rounded when it was stored: the level it stands for is within half an ulp.
    snap = 2.0**-23 if z.dtype == np.float32 else 0.0
    least = max(least_level, 1) if rounding == "nearest" else least_level
    out = np.zeros((m, phases, levels + 1), dtype=np.uint64)
    offenders: list[int] = []

    def part(k: int, n: int) -> None:
        for first in range(k * _COLUMNS, m, n * _COLUMNS):
            last = min(first + _COLUMNS, m)
            bad = _accumulate(
                z, every, bound, where, _MODES[rounding], least, snap, first, last, out
            )
            if bad >= 0:
                offenders.append(bad)

    threads.run(part, worthwhile=z.size >= 100_000)
    if offenders:
        raise ValueError(f"row {min(offenders)} of norms holds a negative norm; expected ≥ 0.")
    return out


@njit(cache=True, nogil=True)
def _accumulate(  # type: ignore[no-untyped-def]
    norms, steps, bound, phase, mode, least, snap, first, last, out
):
    """Adds a block to its histograms; the first row with a negative norm, or −1."""
    top = out.shape[2] - 1
    own = steps.shape[1] > 1
    near = 1e-9 + 2 * top * snap
    for r in range(norms.shape[0]):
        limit = bound[r]
        scale = top / limit
        k = phase[r]
        for j in range(first, last):
            times = np.uint64(steps[r, j if own else 0])
            z = np.float64(norms[r, j])
            if z < 0:
                return r
            b = top
            u = float(top)
            fraction = 0.0
            if z < limit:
                u = z * scale
                b = int(u)
                fraction = u - b
                if fraction < near or fraction > 1 - near:
                    # Near a level, floating-point division may land on either side of it.
                    b = int(u + 0.5)
                    level = limit * b / top
                    if abs(z - level) <= snap * level:
                        fraction = 0.0
                        u = float(b)
                    elif z < level:
                        b -= 1
                        fraction = 1.0
                    else:
                        fraction = 1e-9
            if mode == 1 and fraction > 0:
                b += 1
            elif mode == 2 and b < top:
                b = int(np.rint(u))
            if mode != 0 or b == top or fraction == 0:
                out[j, k, max(b, least)] += times * np.uint64(UNIT)
            else:
                share = min(max((u * u - b * b) / (2 * b + 1), 0.0), 1.0)
                weight = np.uint64(np.ceil(share * UNIT))
                out[j, k, max(b, least)] += times * (np.uint64(UNIT) - weight)
                out[j, k, max(b + 1, least)] += times * weight
    return -1
