"""Quantiles under differential privacy: the two-stage method, and the descent the paper used.

Both see the data through `noisy_ranks` alone; everything else here works on what that released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from epsilons.release.mechanisms import Size, noisy_ranks, rank_noise

CONFIDENCE = 0.95
# Cells of the first stage: a cell is 0.3 % wide, and twice as many would cost 8 % more noise.
CELLS = 2048
# The first stage's share of μ², and where the second one asks, in the first one's standard
# deviations of the rank: near enough to interpolate, and far enough to enclose the quantile.
_FIRST_SHARE = 0.3
_OFFSETS = (-1.5, -0.5, 0.5, 1.5)
# How much finer the cells are at 0 than at the upper end: ε's spread over orders of magnitude.
_STRETCH = 7.0
_BELOW_UPPER = 1e-6  # a last, thin cell for the examples at the worst case

DESCENT_STEPS = 20
_DESCENT_RATE = 0.2


@dataclass(frozen=True)
class Estimate:
    """A published number with an interval that holds the true one with 95 % probability.

    `value`: the number. `low`, `high`: the interval.
    """

    value: float
    low: float
    high: float


def epsilon_grid(upper: float, cells: int = CELLS) -> NDArray[np.float64]:
    """Ascending points from 0 to `upper`, ever denser towards 0, with one just below `upper`."""
    inner = upper * np.sinh(_STRETCH * np.arange(1, cells) / (cells - 1)) / np.sinh(_STRETCH)
    inner[-1] = upper * (1 - _BELOW_UPPER)
    result: NDArray[np.float64] = np.r_[0.0, inner, upper]
    return result


def two_stage_quantiles(
    values: NDArray[np.float64],
    shares: Sequence[float],
    grid: NDArray[np.float64],
    n: Size,
    mu: float,
) -> list[Estimate]:
    """The quantiles of values in [grid[0], grid[-1]], non-decreasing in their shares.

    First all ranks on the grid, coarsely; then, more precisely, those of four points of the grid
    around each quantile. The ranks are made monotone (weighted least squares) and inverted. The
    interval needs no assumption on how the values lie between the points. `n`: their number, with
    std 0 where it is public.

    Guarantee: μ-GDP for one record added or removed.
    """
    size, order = n.value, np.argsort(shares)
    target = np.asarray(shares, dtype=np.float64)[order] * size
    first = noisy_ranks(values, grid[1:-1], size, mu * _FIRST_SHARE**0.5)
    coarse = np.r_[0.0, np.clip(_monotone(first.values), 0.0, size), size]
    around = _around(target, coarse, first.std)
    queried = np.setdiff1d(around, [0, len(grid) - 1])
    ranks, std = coarse.copy(), np.full(len(grid), first.std)
    if len(queried):
        second = noisy_ranks(values, grid[queried], size, mu * (1 - _FIRST_SHARE) ** 0.5)
        ranks[queried], std[queried] = second.values, second.std
    std[[0, -1]] = 1e-3 * std.min()  # all values lie between the ends
    kept = _outside(around, len(grid))
    curve = np.clip(_monotone(ranks[kept], std[kept] ** -2), 0.0, size)
    value = _inverse(curve, grid[kept], target)
    low, high = _interval(curve, std[kept], grid[kept], target, n)
    found = [
        Estimate(float(v), float(min(lo, v)), float(max(hi, v)))
        for v, lo, hi in zip(value, low, high, strict=True)
    ]
    return [found[k] for k in np.argsort(order)]


def descent_quantiles(
    values: NDArray[np.float64],
    shares: Sequence[float],
    upper: float,
    n: Size,
    mu: float,
    steps: int = DESCENT_STEPS,
) -> list[Estimate]:
    """The same by gradient descent on the quantile loss (Andrew et al. 2021), as in the paper.

        C ← C · exp(−0.2 (b̃ − q)),   b̃ the noisy share of values ≤ C;   from U/2, 20 steps

    It has rarely converged after 20 steps, and what it released says nothing about how far off it
    is, so its interval is all of [0, U].
    """
    size, order = n.value, np.argsort(shares)
    q = np.asarray(shares, dtype=np.float64)[order]
    found = np.full(len(q), upper / 2)
    for _ in range(steps):
        ascending = np.argsort(found, kind="stable")
        seen = np.empty(len(q))
        ranks = noisy_ranks(values, found[ascending], size, mu / steps**0.5)
        seen[ascending] = np.clip(ranks.values / size, 0.0, 1.0)
        found = np.minimum(found * np.exp(-_DESCENT_RATE * (seen - q)), upper)
    found = np.sort(found)
    return [Estimate(float(found[k]), 0.0, upper) for k in np.argsort(order)]


def two_stage_draws(shares: int, cells: int = CELLS) -> int:
    """At most so many noisy numbers does `two_stage_quantiles` draw."""
    return cells + len(_OFFSETS) * shares


def two_stage_noise(shares: int, mu: float) -> float:
    """Standard deviation of the rank that `two_stage_quantiles` queries in its second stage."""
    return rank_noise(len(_OFFSETS) * shares, mu * (1 - _FIRST_SHARE) ** 0.5)


def _around(
    target: NDArray[np.float64], coarse: NDArray[np.float64], std: float
) -> NDArray[np.int64]:
    """(offsets, targets): points of the grid around each target rank, rounded outwards."""
    points = [
        np.searchsorted(coarse, target + offset * std, side="right") - 1
        if offset < 0
        else np.searchsorted(coarse, target + offset * std, side="left")
        for offset in _OFFSETS
    ]
    return np.clip(np.stack(points), 0, len(coarse) - 1)


def _outside(around: NDArray[np.int64], m: int) -> NDArray[np.bool_]:
    """(m,): which points to go on with, namely not those for which better ones were queried."""
    kept = np.ones(m, dtype=bool)
    for low, high in zip(around.min(axis=0), around.max(axis=0), strict=True):
        kept[low + 1 : high] = False
    kept[around] = True
    return kept


def _interval(
    curve: NDArray[np.float64],
    std: NDArray[np.float64],
    points: NDArray[np.float64],
    target: NDArray[np.float64],
    n: Size,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The nearest points whose ranks are surely below and surely above the target.

    The rank of a point counts from n/2, the target is q·n: an uncertain n moves them apart by
    (q − ½) times its error.
    """
    z = float(ndtri((1 + CONFIDENCE) / 2))
    share = target / max(n.value, 1e-300) - 0.5
    reach = z * np.hypot(std[:, None], (share * n.std)[None, :])
    reach[[0, -1]] = 0.0
    below = curve[:, None] + reach <= target
    above = curve[:, None] - reach >= target
    below[0] = above[-1] = True
    low = points[len(points) - 1 - np.argmax(below[::-1], axis=0)]
    return low, points[np.argmax(above, axis=0)]


def _inverse(
    curve: NDArray[np.float64], points: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Where the piecewise linear curve reaches each target; the middle of where it is flat."""
    last_below = np.searchsorted(curve, target, side="left") - 1
    first_above = np.searchsorted(curve, target, side="right")
    result = np.empty(len(target))
    for i, (j, k) in enumerate(zip(last_below, first_above, strict=True)):
        if k - j > 1:
            result[i] = (points[min(j + 1, len(points) - 1)] + points[max(k - 1, 0)]) / 2
        else:
            step = (target[i] - curve[j]) / (curve[k] - curve[j])
            result[i] = points[j] + step * (points[k] - points[j])
    return result


def _monotone(
    values: NDArray[np.float64], weights: NDArray[np.float64] | None = None
) -> NDArray[np.float64]:
    """The non-decreasing sequence nearest in weighted squares: pool adjacent violators."""
    level: list[float] = []
    weight: list[float] = []
    length: list[int] = []
    for value, w in zip(values, np.ones(len(values)) if weights is None else weights, strict=True):
        v, w, m = float(value), float(w), 1
        while level and level[-1] >= v:
            total = weight[-1] + w
            v = (level.pop() * weight[-1] + v * w) / total
            w, m = total, m + length.pop()
            weight.pop()
        level.append(v)
        weight.append(w)
        length.append(m)
    return np.repeat(level, length)
