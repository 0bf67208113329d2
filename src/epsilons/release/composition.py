"""How the costs of a run add up: Gaussian releases among themselves, and with the training.

Everything `release` lets out is Gaussian noise on integers, so one number μ says what it costs:
a release whose value moves by at most μ standard deviations when one record comes or goes is
μ-GDP (Dong, Roth & Su 2022), and releases chosen one after another compose to √(μ₁² + μ₂² + …).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr, ndtr

from epsilons.accounting import checks

# No δ below it is asked for.
LEAST_DELTA = 1e-280
# Points of a profile that enter a composition; more only lower the result. Fewer where each is
# priced for every example of a run.
_MANY_POINTS, _POINTS = 65, 13
# They cover so many standard deviations of the privacy loss of the releases, and no more than
# this in log δ.
_REACH = 5.0
_MOST_REACH = 12.0
_MOST_MU = 1e3
_HALVINGS = 200
# Above every rounding error in the sums below, which are of positive terms.
_ROUNDING = 1 + 1e-9


def gaussian_delta(epsilon: ArrayLike, mu: float) -> NDArray[np.float64]:
    """The least δ at which a μ-GDP release is (ε, δ)-DP, for each ε.

        δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)          (Balle & Wang 2018, Thm 8)

    | μ = 0 | 0 |

    >>> float(gaussian_delta(1.0, mu=1.0).round(5))
    0.12694
    """
    eps = np.asarray(epsilon, dtype=np.float64)
    if mu == 0:
        return np.zeros_like(eps)
    above = log_ndtr(mu / 2 - eps / mu)
    below = eps + log_ndtr(-mu / 2 - eps / mu)
    result: NDArray[np.float64] = np.exp(above) * -np.expm1(np.minimum(below - above, 0.0))
    return result


def gaussian_mu(epsilon: float, delta: float, distance: float = 0.0) -> float:
    """The largest μ whose releases are (ε, δ)-DP, found from below.

    `distance`: how far in total variation the noise used is from a rounded Gaussian; it costs
    (1 + e^ε) · distance of the δ.

    >>> round(gaussian_mu(0.1, 1e-5), 5)
    0.03252
    """
    eps = float(checks.positive("epsilon", epsilon))
    checks.open_unit("delta", delta)
    if not gaussian_keeps(eps, delta, 0.0, distance):
        raise ValueError(f"delta={delta:g} is too small to be kept with epsilon={eps:g}")
    low, high = 0.0, _MOST_MU
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if gaussian_keeps(eps, delta, middle, distance):
            low = middle
        else:
            high = middle
    return low


def gaussian_keeps(epsilon: float, delta: float, mu: float, distance: float = 0.0) -> bool:
    """Whether releases of total μ are (ε, δ)-DP."""
    return _kept(float(gaussian_delta(epsilon, mu)), epsilon, delta, distance)


def gaussian_epsilon(mu: float, delta: float, distance: float = 0.0) -> float:
    """The least ε at which releases of total μ are (ε, δ)-DP, found from above.

    >>> round(gaussian_epsilon(0.03252, 1e-5), 4)
    0.1
    """
    checks.open_unit("delta", delta)
    return _least(lambda eps: float(gaussian_delta(eps, mu)), mu, delta, distance)


@dataclass(frozen=True, eq=False)
class Profile:
    """What is known of a mechanism: it is (ε, δ)-DP at these points, ε ascending, δ falling.

    Its least δ is convex in e^ε, as a supremum of P(S) − e^ε Q(S) over sets S; so the straight
    lines in e^ε between the points, and from (0, 1) to the first of them, lie above it.
    """

    epsilons: NDArray[np.float64]
    deltas: NDArray[np.float64]

    @classmethod
    def of(cls, epsilons: ArrayLike, deltas: ArrayLike) -> Self:
        """The profile through valid points in any order; an infinite ε says nothing."""
        eps, delta = np.asarray(epsilons, dtype=np.float64), np.asarray(deltas, dtype=np.float64)
        keep = np.isfinite(eps)
        order = np.lexsort((delta[keep], eps[keep]))
        eps, delta = eps[keep][order], np.minimum.accumulate(delta[keep][order])
        first = np.r_[True, np.diff(eps) > 0][: len(eps)]
        return cls(eps[first], delta[first])

    @classmethod
    def around(cls, epsilon_at: Callable[[float], float], delta: float, mu: float) -> Self:
        """The profile of a mechanism that is (`epsilon_at`(δ), δ)-DP, asked where it matters.

        Namely at the δ's between which composition with releases of total μ moves it.
        """
        rise = epsilon_at(delta / 10) - epsilon_at(delta)
        asked = deltas_around(delta, delta, mu, rise, points=_MANY_POINTS)
        return cls.of([epsilon_at(float(d)) for d in asked], asked)

    def epsilon(self, delta: float) -> float:
        """The least ε at δ that the points and the lines between them give; ∞ below them."""
        below = np.flatnonzero(self.deltas <= delta)
        if not len(below):
            return math.inf
        k = int(below[0])
        if k == 0 or self.deltas[k] == delta:
            return float(self.epsilons[k])
        (left, right), (above, under) = self.epsilons[k - 1 : k + 1], self.deltas[k - 1 : k + 1]
        step = (above - delta) / (above - under)
        return float(left + math.log1p(step * math.expm1(right - left)))


def deltas_around(
    low: float, high: float, mu: float, rise: float, points: int = _POINTS
) -> NDArray[np.float64]:
    """The δ's at which to ask a profile for its composition, at δ from `low` to `high`, with μ.

    `rise`: by how much ε grows when δ falls to a tenth.
    """
    reach = min(max(_REACH * mu * math.log(10) / max(rise, 1e-9), 1.0), _MOST_REACH)
    ends = math.log(low) - reach, min(math.log(high) + reach, math.log(0.5))
    ends = max(ends[0], math.log(LEAST_DELTA)), max(ends[1], math.log(LEAST_DELTA) + 1)
    wider = 1 + int((math.log(high) - math.log(low)) / (2 * reach))
    result: NDArray[np.float64] = np.exp(np.linspace(*ends, points * min(wider, 2)))
    return result


def composed_epsilon(training: Profile, mu: float, delta: float, distance: float = 0.0) -> float:
    """ε at δ of a training and of releases of total μ, together.

    The two compose through their dominating pairs (Zhu, Dong & Wang 2022, Thm 10):

        δ(ε) = E[δ_T(ε − L)],   L ~ N(μ²/2, μ²) the privacy loss of the releases,

    here with the profile's lines in place of δ_T. Guarantee: an upper bound, in both directions,
    whichever of the two comes first and whatever it is made to depend on; never above the sum
    ε_T(δ/2) + ε_G(δ/2) of basic composition, never below ε_T(δ).

    >>> training = Profile.around(lambda d: gaussian_epsilon(0.4, d), delta=1e-5, mu=0.3)
    >>> 0 < composed_epsilon(training, 0.3, 1e-5) - gaussian_epsilon(0.5, 1e-5) < 0.02
    True
    """
    checks.open_unit("delta", delta)
    alone = training.epsilon(delta)
    if mu == 0 or not math.isfinite(alone):
        return alone
    simple = training.epsilon(delta / 2) + gaussian_epsilon(mu, delta / 2, distance)
    found = _least(lambda eps: _mixture(eps, training, mu), mu, delta, distance, least=alone)
    return min(found, simple)


def _mixture(epsilon: float, training: Profile, mu: float) -> float:
    """E[g(ε − L)], where g(ε) is the line of the profile above e^ε.

    On each line δ = a + s·γ the expectation is a·P(L in it) + s·e^ε·Q(L in it), since
    E[e^{−L}] over a set is its probability under the other hypothesis, L ~ N(−μ²/2, μ²).
    """
    eps, bound = training.epsilons, training.deltas
    # In units of e^ε, so that nothing overflows.
    gamma = np.r_[0.0, np.exp(eps - epsilon)]
    delta = np.r_[1.0, bound]
    slope = np.diff(delta) / np.diff(gamma)
    base = delta[:-1] - slope * gamma[:-1]
    edges = np.r_[np.inf, epsilon - eps]
    under_p = _between((edges[1:] - mu**2 / 2) / mu, (edges[:-1] - mu**2 / 2) / mu)
    under_q = _between((edges[1:] + mu**2 / 2) / mu, (edges[:-1] + mu**2 / 2) / mu)
    beyond = float(ndtr((edges[-1] - mu**2 / 2) / mu))
    parts = np.maximum(base * under_p + slope * under_q, bound * under_p)
    return float(parts.sum() + bound[-1] * beyond)


def _between(low: NDArray[np.float64], high: NDArray[np.float64]) -> NDArray[np.float64]:
    """P(low < Z ≤ high) of a standard normal, from the tail in which it is small."""
    right = low > 0
    result: NDArray[np.float64] = np.where(right, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))
    return result


def _kept(found: float, epsilon: float, delta: float, distance: float) -> bool:
    """Whether the δ found, with what the noise's distance from a Gaussian adds, is within δ."""
    return found * _ROUNDING + (1 + math.exp(min(epsilon, 700.0))) * distance <= delta


def _least(
    delta_at: Callable[[float], float],
    mu: float,
    delta: float,
    distance: float,
    least: float = 0.0,
) -> float:
    """The least ε with δ(ε) + (1 + e^ε)·distance ≤ δ, from above; ∞ where none is found."""

    def kept(eps: float) -> bool:
        return _kept(delta_at(eps), eps, delta, distance)

    if kept(least):
        return least
    step = max(mu, 1e-6)
    while not kept(least + step):
        step *= 2
        if step > 1e7:
            return math.inf
    low, high = least, least + step
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if kept(middle):
            high = middle
        else:
            low = middle
    return high
