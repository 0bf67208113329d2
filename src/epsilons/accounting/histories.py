"""Norms to soft histograms: how many steps each example spent at which level of norm.

Level b of B is the norm C·b/B. A pair (norm, steps) goes to its two neighbouring levels, split
linearly in norm². Because K(α; s²) is convex in s² when the example is removed (for every order
α ≥ 1: see `TightAccountant.epsilons_between`), the RDP of the histogram is never below that of the
history. Weights are integers in units of 2⁻³² steps, so
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

# Examples at a time, so that their rows of the histogram stay in the processor's cache.
_COLUMNS = 128


def level_norms(max_grad_norm: float, levels: int) -> NDArray[np.float64]:
    """The norms C·b/B for b = 0…B; built by index, and the last is C exactly.

    >>> level_norms(2.0, 4)
    array([0. , 0.5, 1. , 1.5, 2. ])
    """
    bound = float(checks.clip_bound("max_grad_norm", max_grad_norm))
    result: NDArray[np.float64] = bound * np.arange(levels + 1) / levels
    result[levels] = bound  # C·B/B rounds to a neighbour of C for some C and B
    return result


def clipping_thresholds(
    norms: ArrayLike, max_grad_norm: float, levels: int = DEFAULT_LEVELS
) -> NDArray[np.float64]:
    """Individual clipping bounds: each norm rounded up to a level, never below level 1.

    `norms`: of any shape, which the result has. `max_grad_norm`: C, the largest threshold.
    `levels`: how many levels there are, C/levels apart; by default 256. NaN and ∞ get C. A
    threshold is its own threshold, so that what was clipped is what is charged.

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

    Norms above C, NaN and ∞ count as C; a negative norm is an error. Rounded up, a norm in
    float32 that equals a level to the precision of float32 is on that level.

    >>> soft_histogram([[0.5, 1.0]], [3], 1.0, levels=2)[:, 0] / UNIT
    array([[0., 3., 0.],
           [0., 0., 3.]])
    """
    checks.one_of("rounding", rounding, (None, "up", "nearest"))
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
    bound = np.array(np.broadcast_to(checks.clip_bound("max_grad_norm", max_grad_norm), (rows,)))
    where = np.zeros(rows, dtype=np.int64) if phase is None else np.asarray(phase, dtype=np.int64)
    every = np.ascontiguousarray(times if times.ndim == 2 else times[:, None])
    # A float32 norm was rounded when it was stored: the level it stands for is within half an ulp.
    snap = 2.0**-23 if z.dtype == np.float32 else 0.0
    least = max(least_level, 1) if rounding == "nearest" else least_level
    out = np.zeros((m, phases, levels + 1), dtype=np.uint64)
    offenders: list[int] = []

    def part(k: int, n: int) -> None:
        for first in range(k * _COLUMNS, m, n * _COLUMNS):
            some = (z, every, bound, where, first, min(first + _COLUMNS, m), out)
            bad = (
                _split(*some) if rounding is None else _round(*some, rounding == "up", least, snap)
            )
            if bad >= 0:
                offenders.append(bad)

    threads.run(part, worthwhile=z.size >= 100_000)
    if offenders:
        raise ValueError(f"row {min(offenders)} of norms holds a negative norm; expected ≥ 0.")
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _split(norms, steps, bound, phase, first, last, out):  # type: ignore[no-untyped-def]
    """Adds a block, each pair to both neighbours; a row with a negative norm, or −1."""
    top = out.shape[2] - 1
    own = steps.shape[1] > 1
    whole = np.float64(UNIT)
    level, weight = np.empty(last - first, np.int32), np.empty(last - first)
    width = out.shape[1] * out.shape[2]
    flat = out[first:last].reshape(-1)
    bad = -1
    for r in range(norms.shape[0]):
        limit = bound[r]
        scale = top / limit
        row = norms[r, first:last]
        negative = 0
        # Written for vector instructions: comparisons in place of min and max, a division in place
        # of a table, and the sums, which have none, in a loop of their own.
        for j in range(row.size):
            z = np.float64(row[j])
            # NaN compares false, so that it counts as the bound.
            z = z if z < limit else limit
            negative += 1 if z < 0.0 else 0
            u = z * scale if z > 0.0 else 0.0
            level[j] = np.int32(u) if u < top else np.int32(top - 1)
            lower = np.float64(level[j])
            share = (u * u - lower * lower) / (2.0 * lower + 1.0)
            # Up, but for the rounding of u, which would move a norm off its level; a norm above
            # 0 is charged at least one unit.
            part = share * whole + (1 - 2.0**-8)
            part = part if part < whole else whole
            weight[j] = 1.0 if u > 0.0 and u < 1.0 and part < 1.0 else part
        bad = r if negative > 0 else bad
        start = phase[r] * (top + 1)
        times = steps[r, 0]
        for j in range(row.size):
            if own:
                times = steps[r, first + j]
            upper = times * np.int64(weight[j])
            at = np.uint64(start + j * width + level[j])
            flat[at] += np.uint64(times * UNIT - upper)
            flat[at + np.uint64(1)] += np.uint64(upper)
    return bad


@njit(cache=True, nogil=True)
def _round(  # type: ignore[no-untyped-def]
    norms, steps, bound, phase, first, last, out, upward, least, snap
):
    """Adds a block, each pair to one level; a row with a negative norm, or −1."""
    top = out.shape[2] - 1
    own = 1 if steps.shape[1] > 1 else 0
    near = 1e-9 + 2 * top * snap
    bad = -1
    for r in range(norms.shape[0]):
        limit = bound[r]
        scale = top / limit
        k = phase[r]
        for j in range(first, last):
            z = np.float64(norms[r, j])
            z = z if z < limit else limit
            bad = r if z < 0.0 else bad
            u = max(z, 0.0) * scale
            b = int(u + 0.5)
            if upward and abs(u - b) > near:
                b = int(np.ceil(u))
            elif upward and z > limit * b / top * (1.0 + snap):
                # Compared with the level itself, because u has been rounded.
                b += 1
            out[j, k, max(min(b, top), least)] += np.uint64(steps[r, j * own] * UNIT)
    return bad
