"""The trade-off curve of a claim: how well an example can be told from its absence, at best.

A claim says that one example adds, to steps of sampling probability p and noise σ, at most z: that
what is released of it is at most the pair

    with it     P = ∏ (1−p)·N(0, 1) + p·N(s, 1)          s = z/σ
    without it  Q = ∏ N(0, 1)

The loss L = log dP/dQ of each step is rounded to a grid, and steps are composed by FFT. The sum of
what rounding changes is bounded by Hoeffding's inequality, so that the curve can be moved to either
side: up, for an adversary who is at least as strong, and down, for an ε that is never too large.
This shares no code with `accounting.tight` but the tails that set the range of the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import brentq
from scipy.special import ndtr

from epsilons.accounting import checks
from epsilons.accounting.cumulants import cumulants

Array = NDArray[np.float64]
Side = Literal["up", "down"]

_POINTS = 2**19  # of the grid of losses
_LOST = 1e-12  # of probability: beyond the grid, or where rounding changed more than is allowed for
_ORDERS = np.concatenate([1 + np.geomspace(0.05, 400, 60), -np.geomspace(0.05, 400, 60)])
_REACH = 9.0  # deviations of the noise, beyond which nothing of a step lies
_SUPPORT = 2_001  # nodes of the mean loss of a step


@dataclass(frozen=True, eq=False)
class History:
    """What one example is charged for: `steps` (k,) steps at each of `ratios` and `sample_rates`.

    `ratios` (k,): norm over the standard deviation of the noise, s = z/σ ≥ 0. `sample_rates` (k,):
    the probability of being drawn, in (0, 1]. `steps` (k,): whole numbers ≥ 0. A number stands for
    k equal ones. ValueError for anything else.
    """

    ratios: Array
    sample_rates: Array
    steps: NDArray[np.int64]

    def __init__(self, ratios: ArrayLike, sample_rates: ArrayLike, steps: ArrayLike) -> None:
        s = checks.non_negative("ratios", ratios)
        p = checks.probability("sample_rates", sample_rates)
        times = checks.counts("steps", steps)
        s, p, times = (np.atleast_1d(a).ravel() for a in np.broadcast_arrays(s, p, times))
        rows, which = np.unique(np.stack([s, p]), axis=1, return_inverse=True)
        total = np.zeros(rows.shape[1], dtype=np.int64)
        np.add.at(total, which.reshape(-1), times.astype(np.int64))
        used = (total > 0) & (rows[0] > 0) & (rows[1] > 0)
        object.__setattr__(self, "ratios", rows[0][used])
        object.__setattr__(self, "sample_rates", rows[1][used])
        object.__setattr__(self, "steps", total[used])

    def scaled(self, factor: float) -> History:
        """The same steps with all norms times `factor`."""
        return History(self.ratios * factor, self.sample_rates, self.steps)


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A discrete pair: losses (k,) ascending, and their probability `present` with the example.

    Without the example each of the `losses` ℓ has e^−ℓ times that, and what is left to 1 lies
    at −∞.
    `certain`: the probability, with the example, of what betrays it for certain.
    """

    losses: Array
    present: Array
    certain: float

    @cached_property
    def absent(self) -> Array:
        """(k,): the probability of each loss without the example."""
        return np.exp(np.log(np.maximum(self.present, 1e-300)) - self.losses)

    @cached_property
    def true_positives(self) -> Array:
        """(k+1,): P[loss is at or above each, or betrays], then that of `certain` alone."""
        found: Array = np.minimum(np.append(_tails(self.present), 0.0) + self.certain, 1.0)
        return found

    @cached_property
    def false_positives(self) -> Array:
        """(k+1,): the same without the example, descending to 0."""
        found: Array = np.minimum(np.append(_tails(self.absent), 0.0), 1.0)
        return found

    def false_negatives(self, false_positives: ArrayLike) -> Array:
        """The least rate of false negatives, f(α), of any test at these `false_positives` α."""
        fpr, tpr = self._ascending
        found: Array = 1.0 - np.interp(np.asarray(false_positives), fpr, tpr, right=1.0)
        return found

    def false_positives_at(self, false_negatives: ArrayLike) -> Array:
        """The least rate of false positives, f⁻¹(β), at these rates of `false_negatives` β."""
        fpr, tpr = self._ascending
        found: Array = np.interp(1.0 - np.asarray(false_negatives), tpr, fpr, left=0.0, right=1.0)
        return found

    @cached_property
    def _ascending(self) -> tuple[Array, Array]:
        return self.false_positives[::-1].copy(), self.true_positives[::-1].copy()

    @cached_property
    def _guesses(self) -> tuple[Array, Array]:
        """Shares of guesses, surest first, and of wrong ones among all, cumulated from (0, 0)."""
        order = np.argsort(-np.abs(self.losses), kind="stable")
        one, other = self.present[order], self.absent[order]
        sure = (self.certain + max(0.0, 1.0 - float(self.absent.sum()))) / 2
        shares = np.concatenate([[0.0, sure], sure + np.cumsum(one + other) / 2])
        wrong = np.concatenate([[0.0, 0.0], np.cumsum(np.minimum(one, other)) / 2])
        return shares, wrong

    def mean_error(self, share: ArrayLike) -> Array:
        """Least mean error of guesses of membership among the surest `share`, in (0, 1], of them.

        For fair coins: each is a member with probability ½.
        """
        shares, wrong = self._guesses
        part = np.asarray(share, dtype=np.float64)
        found: Array = np.interp(part, shares, wrong) / part
        return found

    def delta(self, epsilon: float) -> float:
        """δ(ε) at `epsilon`, of removing the example."""
        above = self.losses > epsilon
        exceeding = self.present[above] * -np.expm1(epsilon - self.losses[above])
        return self.certain + float(exceeding.sum())

    def epsilon(self, delta: float) -> float:
        """ε at `delta` of removing the example, ≥ 0; ∞ if what is certain alone exceeds δ."""
        if self.certain >= delta:
            return math.inf
        if self.delta(0.0) <= delta:
            return 0.0
        high = max(float(self.losses[-1]), 0.0) + 1.0
        return float(brentq(lambda e: self.delta(e) - delta, 0.0, high, xtol=1e-9))


def trade_off(history: History, side: Side = "up", *, points: int = _POINTS) -> TradeOff:
    """The trade-off curve of a `history`, moved to one side by what rounding of losses may change.

    `side`: `"up"`: any adversary does at most as well as the curve says; `"down"`: the best one
    does at least as well, but for a probability of about 1e-12. `points`: of the grid; the curve
    moves by about 4·(range of losses)·√steps/points.

    >>> curve = trade_off(History(1 / 3.32622, 4096 / 50_000, 3662), "down")
    >>> 7.22 < curve.epsilon(1e-5) <= 7.2389
    True
    """
    checks.one_of("side", side, ("up", "down"))
    if not history.steps.size:
        return TradeOff(np.zeros(1), np.ones(1), 0.0)
    low, high = _range(history)
    size = next_fast_len(points, real=True)
    h = (high - low) / size
    transform = np.ones(size // 2 + 1, dtype=np.complex128)
    moved, squares = 0.0, 0.0
    for s, p, times in zip(history.ratios, history.sample_rates, history.steps, strict=True):
        first, masses = _step_masses(float(s), float(p), h)
        moved += times * (_mean_loss(float(s), float(p)) - _mean_of(first, masses, h))
        squares += times * h * h
        wrapped = np.bincount(
            (first + np.arange(masses.size)) % size, weights=masses, minlength=size
        )
        transform *= _power(rfft(wrapped), int(times))
    composed = irfft(transform, size)
    # Hoeffding: what T roundings, each within ±h/2, change beyond their mean.
    spread = math.sqrt(squares * math.log(1 / _LOST) / 2)
    start = math.floor(low / h)
    losses = h * (start + np.arange(size)) + moved + (spread if side == "up" else -spread)
    present = np.roll(composed, -(start % size))
    noise = 4 * max(-float(present.min()), 1e-18)  # of the transform: no mass is negative
    lost = 2 * _LOST + float(present[(present > 0) & (present <= noise)].sum())
    used = np.flatnonzero(present > noise)
    part = slice(used[0], used[-1] + 1)
    kept = np.where(present[part] > noise, present[part], 0.0)
    return TradeOff(losses[part], kept, lost if side == "up" else 0.0)


def epsilon_below(history: History, delta: float, *, points: int = _POINTS) -> float:
    """ε of a `history` at δ by FFT, with losses rounded down: never above the exact one.

    `delta`: in (0, 1). `points`: of the grid of losses.
    """
    given = checks.open_unit("delta", delta)
    # what the curve may have too much of
    return trade_off(history, "down", points=points).epsilon(given + 2 * _LOST)


def _range(history: History) -> tuple[float, float]:
    """Between which losses all but `_LOST` of the probability lies, with the example and without.

    Chernoff, at both ends for P and for Q: E_Q[L^t] = e^K(t).
    """
    k = history.steps @ cumulants(_ORDERS, history.ratios, history.sample_rates)
    up, nats = _ORDERS > 1, math.log(1 / _LOST)
    a, b = _ORDERS[up], -_ORDERS[~up]
    high = float(np.min((k[up] + nats) / (a - 1)))  # P[L > high] = E_Q[L; …]
    low = -float(np.min((k[~up] + nats) / (b + 1)))  # P[L < low] ≤ e^{low·(1+b)}·E_Q[L^−b]
    absent = -float(np.min((k[~up] + nats) / b))  # Q[L < absent]
    least = float(history.steps @ np.log1p(-np.minimum(history.sample_rates, 1 - 1e-16)))
    low = max(min(low, absent), least) if np.isfinite(least) else min(low, absent)
    width = high - low
    return low - 0.01 * width - 1e-9, high + 0.01 * width + 1e-9


def _step_masses(s: float, p: float, h: float) -> tuple[int, Array]:
    """Probability, with the example, of each loss of one step rounded to a multiple of h.

    The first multiple, and the masses from there on.
    """
    first = round(_loss(-_REACH, s, p) / h)
    last = round(_loss(s + _REACH, s, p) / h)
    edges = (np.arange(first, last) + 0.5) * h
    with np.errstate(divide="ignore", invalid="ignore"):
        odds = np.log(np.maximum((np.expm1(edges) + p) / p, 0.0))
    x = (odds + s * s / 2) / s
    below = np.concatenate([[0.0], (1 - p) * ndtr(x) + p * ndtr(x - s), [1.0]])
    above = np.concatenate([[1.0], (1 - p) * ndtr(-x) + p * ndtr(s - x), [0.0]])
    # differences of whichever tail is small
    return first, np.where(below[1:] < 0.5, np.diff(below), -np.diff(above))


def _power(values: NDArray[np.complex128], times: int) -> NDArray[np.complex128]:
    """The values to a whole power ≥ 1, by squaring: much faster than `**`."""
    result = None
    while True:
        if times % 2:
            result = values if result is None else result * values
        times //= 2
        if not times:
            assert result is not None
            return result
        values = values * values


def _loss(x: float, s: float, p: float) -> float:
    log_q = math.log1p(-p) if p < 1 else -math.inf
    return float(np.logaddexp(log_q, math.log(p) + s * x - s * s / 2))


def _mean_loss(s: float, p: float) -> float:
    """E_P[L] of one step, by the trapezoid rule."""
    x = np.linspace(-_REACH, s + _REACH, _SUPPORT + int(100 * s))
    log_q = math.log1p(-p) if p < 1 else -math.inf
    loss = np.logaddexp(log_q, math.log(p) + s * x - s * s / 2)
    density = np.exp(loss - x * x / 2) / math.sqrt(2 * math.pi)
    return float((density * loss).sum() * (x[1] - x[0]))


def _mean_of(first: int, masses: Array, h: float) -> float:
    return h * (first * float(masses.sum()) + float(masses @ np.arange(masses.size)))


def _tails(masses: Array) -> Array:
    return np.cumsum(masses[::-1])[::-1]
