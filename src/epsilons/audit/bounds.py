"""Lower bounds on ε from an attack's scores: pure functions of counts, and the five together.

Each canary is a member by a fair coin, and an attack gives it a score, larger for members. All
bounds hold with a probability of `level`, whatever the attack.

| bound   | is of                                  | assumes of canaries        |
|---------|----------------------------------------|----------------------------|
| counts  | any mechanism                          | independent                |
| family  | the claim's curve, all norms times s   | independent                |
| exact   | the same, by the surest guesses        | independent                |
| Steinke | any mechanism                          | nothing but the fair coins |
| f-DP    | the claim's curve, all norms times s   | nothing but the fair coins |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import expit
from scipy.stats import beta, binom

from epsilons.accounting import checks
from epsilons.audit.curve import History, TradeOff, epsilon_below, trade_off

Array = NDArray[np.float64]

LEVEL = 0.95
_STEPS_PER_DOUBLING = 64  # norms are tried times 2^(j/64): a bound is at most 1.1 % loose by it
_LEAST, _MOST = -10 * _STEPS_PER_DOUBLING, 5 * _STEPS_PER_DOUBLING
_CURVE_POINTS = 2**16
_FINE_POINTS = 2**19  # for f-DP, which asks for f near 1, where rounding of losses shows
_PILOT = 5  # one in so many trials chooses a threshold and is not judged
_THRESHOLDS = 30
_SHARES = np.geomspace(1 / 256, 1.0, 17)  # of the surest guesses, one of which is chosen
# Of the integral over where the guesses that are not made end.
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(80)
_ENDS = 1e-10  # of that integral, which are added


class ScaledClaim:
    """The claim that an example has `history`, and those with all its norms times s.

    Curves are kept: s runs over powers of 2^(1/64). `delta`: δ of the ε's. `points`: of the grid of
    losses.
    """

    def __init__(self, history: History, delta: float, *, points: int = _CURVE_POINTS) -> None:
        self.history, self.delta, self._points = history, checks.open_unit("delta", delta), points
        self.curve = lru_cache(maxsize=None)(self._curve)
        self.epsilon = lru_cache(maxsize=None)(self._epsilon)

    def _curve(self, j: int) -> TradeOff:
        """The trade-off curve, as good for the attack as can be, with norms times 2^(j/64)."""
        scaled = self.history.scaled(2 ** (j / _STEPS_PER_DOUBLING))
        return trade_off(scaled, points=self._points)

    def _epsilon(self, j: int) -> float:
        """ε with norms times 2^(j/64), never too large."""
        return epsilon_below(self.history.scaled(2 ** (j / _STEPS_PER_DOUBLING)), self.delta)

    def bound(self, contradicted: Callable[[TradeOff], bool]) -> float:
        """ε of the largest s whose curve is contradicted, 0 if that of none is."""
        j = self.largest(contradicted)
        return 0.0 if j is None else self.epsilon(j)

    def largest(self, contradicted: Callable[[TradeOff], bool], *, unit: int = 1) -> int | None:
        """The largest j whose curve, with norms times 2^(j/64), is contradicted; None: of none.

        Among the multiples of `unit`, a divisor of 8.
        """
        if not self.history.steps.size or not contradicted(self.curve(_LEAST)):
            return None
        low, step = _LEAST, 4 * _STEPS_PER_DOUBLING
        for guess in (-_STEPS_PER_DOUBLING, -8, 0, 8):  # most bounds are a little below the claim
            if contradicted(self.curve(guess)):
                low = guess
            else:
                high = guess
                break
        else:
            high = low + 8
            step = 16
            while high < _MOST and contradicted(self.curve(high)):
                low, high, step = high, min(high + step, _MOST), 2 * step
            if high >= _MOST:
                return low
        while high - low > unit:
            middle = (low + high) // (2 * unit) * unit
            if contradicted(self.curve(middle)):
                low = middle
            else:
                high = middle
        return low


@dataclass(frozen=True)
class Counts:
    """How an attack did: `found` of `members`, and `alarms` among the `others`."""

    found: int
    members: int
    alarms: int
    others: int

    def rates(self, level: float) -> tuple[float, float]:
        """Lower end of the rate of true positives, upper end of that of false ones.

        Clopper–Pearson, each of them at `level`.
        """
        low = beta.ppf(1 - level, self.found, self.members - self.found + 1) if self.found else 0.0
        sure = self.alarms == self.others
        high = 1.0 if sure else beta.ppf(level, self.alarms + 1, self.others - self.alarms)
        return float(low), float(high)


def counts_bound(counts: Counts, delta: float, *, level: float = LEVEL) -> float:
    """For any mechanism, of independent trials: log((TPR↓ − δ) / FPR↑), ≥ 0.

    `counts`: of one attack. `delta`: δ of the ε that is bounded. `level`: each of the two rates
    is bounded at 1 − (1 − level)/2.
    """
    tpr, fpr = counts.rates(1 - (1 - level) / 2)
    return max(0.0, math.log((tpr - delta) / fpr)) if tpr > delta and fpr > 0 else 0.0


def family_bound(counts: Counts, claim: ScaledClaim, *, level: float = LEVEL) -> float:
    """The ε of the largest s with 1 − TPR↓ < f_s(FPR↑); f_s: the `claim` with its norms times s.

    `counts` and `level` as for `counts_bound`; trials are independent.
    """
    j = _family_scale(counts, claim, level)
    return 0.0 if j is None else claim.epsilon(j)


def _family_scale(counts: Counts, claim: ScaledClaim, level: float, *, unit: int = 1) -> int | None:
    tpr, fpr = counts.rates(1 - (1 - level) / 2)
    return claim.largest(lambda curve: 1 - tpr < float(curve.false_negatives(fpr)), unit=unit)


def exact_p_value(curve: TradeOff, m: int, r: int, wrong: int) -> float:
    """P[at most `wrong` of the `r` surest of `m` guesses are wrong], for independent canaries.

        E BinCDF(u; r, γ̄(W)),   W ~ Beta(m − r, r + 1)

    γ̄(w): the mean error, under the `curve`, of guesses surer than the quantile w (Xiang et al.,
    arXiv:2509.08704).
    """
    if r == m:
        return float(binom.cdf(wrong, r, float(curve.mean_error(1.0))))
    law = beta(m - r, r + 1)
    low, high = law.ppf(_ENDS), law.isf(_ENDS)
    w = low + (high - low) * (_NODES + 1) / 2
    errors = curve.mean_error(1 - w)
    inside = float((_WEIGHTS * law.pdf(w) * binom.cdf(wrong, r, errors)).sum() * (high - low) / 2)
    return min(1.0, inside + 2 * _ENDS)


def exact_bound(m: int, r: int, wrong: int, claim: ScaledClaim, *, level: float = LEVEL) -> float:
    """The ε of the largest s at which so few errors have a probability below 1 − `level`.

    `wrong` of the `r` surest of `m` guesses are wrong; canaries are independent. `claim`: whose
    norms are times s. `level`: of the bound.
    """
    return claim.bound(lambda curve: exact_p_value(curve, m, r, wrong) < 1 - level)


def steinke_p_value(m: int, r: int, right: int, epsilon: float, delta: float) -> float:
    """P[so many guesses are right] of an (ε, δ)-DP mechanism, at most; nothing is independent.

        p = β + 2mδ·max_{i ≤ v} P[v − i ≤ B < v]/i,   β = P[B ≥ v],   B ~ Bin(r, e^ε/(1+e^ε))

    `right`: v of `r` guesses among `m` canaries (Steinke et al., arXiv:2305.08846). `epsilon` and
    `delta`: those of the mechanism.
    """
    chance = float(expit(epsilon))
    at_least = float(binom.sf(right - 1, r, chance))
    if delta == 0 or right == 0:
        return at_least
    i = np.arange(1, right + 1)
    between = binom.sf(right - i - 1, r, chance) - at_least
    return min(1.0, at_least + 2 * m * delta * float(np.max(between / i)))


def steinke_bound(m: int, r: int, right: int, delta: float, *, level: float = LEVEL) -> float:
    """The largest ε at which so many right guesses have a probability below 1 − `level`.

    For any mechanism; `m`, `r`, `right` and `delta` as for `steinke_p_value`. `level`: of the
    bound.
    """

    def short(epsilon: float) -> float:
        return steinke_p_value(m, r, right, epsilon, delta) - (1 - level)

    if r == 0 or short(0.0) >= 0:
        return 0.0
    high = 1.0
    while short(high) < 0:
        if high > 64:
            return high
        high *= 2
    return float(brentq(short, 0.0, high, xtol=1e-8)) - 1e-8


def fdp_contradicted(
    curve: Callable[[float], float], m: int, r: int, right: int, *, level: float = LEVEL
) -> bool:
    """Whether an f-DP mechanism makes so many right guesses with a probability below 1 − `level`.

    `curve(y)`: min(f(1 − y), f⁻¹(1 − y)), how rarely an event of probability y happens on the other
    side. `right` of `r` guesses among `m` canaries; nothing is independent (Mahloujifar et al.,
    arXiv:2410.22235).
    """
    significance = 1 - level
    some, h = significance * right / m, significance * (r - right) / m
    for i in range(right - 1, -1, -1):
        more = max(h, curve(some))
        if more == h:
            break
        some, h = min(some + i / (r - i) * (more - h), 1.0), more
    return some + h > r / m


def fdp_bound(m: int, r: int, right: int, claim: ScaledClaim, *, level: float = LEVEL) -> float:
    """The ε of the largest s whose curve is contradicted by so many right guesses.

    `m`, `r`, `right` and `level` as for `fdp_contradicted`; `claim`: whose norms are times s.
    """
    if r == 0:
        return 0.0

    def contradicted(curve: TradeOff) -> bool:
        grid = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, 4_000)])
        # the next point of the grid below: the curve grows with y, and less of it is safe
        least = np.minimum(curve.false_negatives(1 - grid), curve.false_positives_at(1 - grid))

        def blown(y: float) -> float:
            return float(np.interp(y, grid, least))

        return fdp_contradicted(blown, m, r, right, level=level)

    return ScaledClaim(claim.history, claim.delta, points=_FINE_POINTS).bound(contradicted)


@dataclass(frozen=True)
class LowerBounds:
    """Lower bounds on one ε by the five methods, each at `level` of its own.

    `counts`, `family`, `exact`: for independent canaries; `steinke`, `fdp`: for any. `p_value`:
    that of the claim itself by `exact`. `trials`: how many canaries there were.
    """

    counts: float
    family: float
    exact: float
    steinke: float
    fdp: float
    p_value: float
    trials: int
    level: float

    @property
    def best(self) -> float:
        """The larger of `family` and `exact`, which are of the mechanism that is claimed."""
        return max(self.family, self.exact)


def lower_bounds(
    scores: ArrayLike,
    members: ArrayLike,
    history: History,
    delta: float,
    *,
    level: float = LEVEL,
    claim: ScaledClaim | None = None,
    dependent: bool = True,
) -> LowerBounds:
    """Lower bounds on ε at `delta` from the `scores` (m,) of canaries, `members` (m,) or not.

    Members were drawn by fair coins. Scores are log-likelihood ratios: above 0 the guess is
    "member", and the larger in size the surer. `history`: what a member is charged for. Thresholds
    and the number of guesses are those that are best under the claim itself, without a look at the
    scores, and a second threshold is the best for a fifth of the canaries, which is not judged
    there. `level`: of each bound. `claim`: of `history` and `delta`, with curves known already.
    `dependent`: also Steinke's and f-DP's bound, which take longer; else they are 0. ValueError for
    arrays of other shapes or scores that are NaN.
    """
    x, inside = np.asarray(scores, dtype=np.float64), np.asarray(members, dtype=bool)
    if x.ndim != 1 or x.shape != inside.shape or np.isnan(x).any():
        raise ValueError(f"scores {x.shape} and members {inside.shape}: expected (m,), no NaN")
    checks.open_unit("level", level)
    known = ScaledClaim(history, delta) if claim is None else claim
    m = len(x)
    if m < 2 * _PILOT or inside.all() or not inside.any() or not known.history.steps.size:
        return LowerBounds(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, m, level)
    pilot = np.arange(m) % _PILOT == 0
    half = 1 - (1 - level) / 2  # two thresholds

    def family(counts: Counts) -> float:
        j = _family_scale(counts, known, half, unit=8)  # to choose a threshold: coarsely
        return -math.inf if j is None else float(j)

    def counted(counts: Counts) -> float:
        return counts_bound(counts, known.delta, level=half)

    def judged(best_for: Callable[[Counts], float]) -> list[Counts]:
        planned = _planned_threshold(known, best_for, int(inside.sum()), int((~inside).sum()))
        tried = _tried_threshold(x[pilot], inside[pilot], best_for)
        return [
            _counted(x, inside, planned),
            _counted(x[~pilot], inside[~pilot], tried),
        ]

    r = _planned_guesses(known, m)
    sure = np.argsort(-np.abs(x), kind="stable")[:r]
    right = int(((x[sure] > 0) == inside[sure]).sum())
    return LowerBounds(
        counts=max(map(counted, judged(counted))),
        family=max(family_bound(each, known, level=half) for each in judged(family)),
        exact=exact_bound(m, r, r - right, known, level=level),
        steinke=steinke_bound(m, r, right, known.delta, level=level) if dependent else 0.0,
        fdp=fdp_bound(m, r, right, known, level=level) if dependent else 0.0,
        p_value=exact_p_value(known.curve(0), m, r, r - right),
        trials=m,
        level=level,
    )


def _counted(scores: Array, members: NDArray[np.bool_], threshold: float) -> Counts:
    above = scores >= threshold
    inside, outside = int(members.sum()), int((~members).sum())
    return Counts(int((above & members).sum()), inside, int((above & ~members).sum()), outside)


def _planned_threshold(
    claim: ScaledClaim, bound: Callable[[Counts], float], inside: int, outside: int
) -> float:
    """The threshold that would give the best bound if all went as the claim says."""
    curve = claim.curve(0)
    last = int(np.searchsorted(-curve.false_positives, -1 / max(outside, 1)))
    steps = np.unique(np.linspace(0, min(last, curve.losses.size - 1), _THRESHOLDS).astype(int))
    counts = [
        Counts(
            round(inside * float(curve.true_positives[k])), inside,
            round(outside * float(curve.false_positives[k])), outside,
        )
        for k in steps
    ]  # fmt: skip
    return _best(curve.losses[steps], counts, bound)


def _tried_threshold(
    scores: Array, members: NDArray[np.bool_], bound: Callable[[Counts], float]
) -> float:
    """The threshold that gives the best bound from these scores."""
    some = np.quantile(scores, np.linspace(0, 1, _THRESHOLDS), method="lower")
    return _best(some, [_counted(scores, members, t) for t in some], bound)


def _best(thresholds: Array, counts: list[Counts], bound: Callable[[Counts], float]) -> float:
    return float(thresholds[int(np.argmax([bound(each) for each in counts]))])


def _planned_guesses(claim: ScaledClaim, m: int) -> int:
    """How many guesses to make: the number that best tells the claim from one of 5 % less."""
    numbers = np.unique(np.maximum(1, np.round(m * _SHARES)).astype(int))
    errors = claim.curve(0).mean_error(numbers / m)
    less = claim.curve(-5).mean_error(numbers / m)
    spread = np.sqrt(np.maximum(errors * (1 - errors) / numbers, 1e-12 + 1 / numbers**2))
    return int(numbers[int(np.argmax((less - errors) / spread))])
