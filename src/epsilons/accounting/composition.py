"""How costs add up: Gaussian releases among themselves, and with the training.

A release whose value moves by at most μ standard deviations of its Gaussian noise when one record
comes or goes is μ-GDP (Dong, Roth & Su 2022), and releases chosen one after another compose to
√(μ₁² + μ₂² + …). Such a release is a sampled-Gaussian step that uses everyone (p = 1) with noise
multiplier 1/μ. So it composes with the training as one more step, and is priced as tightly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_ndtr

from epsilons.accounting import checks
from epsilons.accounting.individual import Method, epsilons_from_blocks
from epsilons.accounting.rdp import DEFAULT_ORDERS, rdp_epsilon, sampled_gaussian_rdp
from epsilons.accounting.results import Epsilons
from epsilons.accounting.sums import delta_within_cap
from epsilons.accounting.tight import tight_epsilon

_MOST_MU = 1e3
_HALVINGS = 200
# Above every rounding error in the differences of normal probabilities below.
_ROUNDING = 1 + 1e-9
# Share of δ set aside for the distance of the noise from a Gaussian. Where it is not enough, it is
# what the ε found needs, and a little more, since with less δ left ε is higher.
_LEAST_SHARE, _ROOM, _TRIES = 1e-6, 1.01, 8

Block = tuple[ArrayLike, ArrayLike]


@dataclass(frozen=True)
class Releases:
    """Gaussian releases together: their μ, and how far in total variation the noise is from one.

    `mu`: the most that the released values move, in standard deviations of their noise, when one
    record comes or goes; `distance`: d below. Both ≥ 0 (else ValueError), by default 0. Added with
    `+`. The distance d costs (1 + e^ε)·d of the δ: P'(S) ≤ P(S) + d ≤ e^ε Q(S) + δ + d, and
    Q(S) ≤ Q'(S) + d.
    """

    mu: float = 0.0
    distance: float = 0.0

    def __post_init__(self) -> None:
        checks.non_negative("mu", self.mu)
        checks.non_negative("distance", self.distance)

    def __add__(self, other: Releases) -> Releases:
        """Both sets of releases.

        >>> Releases(0.3) + Releases(0.4, 1e-20)
        Releases(mu=0.5, distance=1e-20)
        """
        return Releases(math.hypot(self.mu, other.mu), self.distance + other.distance)

    def at_least(self, other: Releases) -> Releases:
        """The releases, where those of `other` are known to be among them: the larger of each."""
        return Releases(max(self.mu, other.mu), max(self.distance, other.distance))

    def without(self, other: Releases) -> Releases:
        """What remains of the releases without those of `other`, which are among them."""
        if self.mu <= other.mu:
            return NOTHING
        rest = math.sqrt((self.mu - other.mu) * (self.mu + other.mu))
        return Releases(rest, max(0.0, self.distance - other.distance))

    @property
    def gaussian(self) -> Releases:
        """The same releases with exactly Gaussian noise."""
        return Releases(self.mu)

    def epsilon(self, delta: float) -> float:
        """ε of the releases alone, at `delta` in (0, 1); 0 if nothing was released."""
        return gaussian_epsilon(self.mu, delta, self.distance) if self.mu else 0.0

    def _delta_left(self, delta: float, epsilon_at: Callable[[float], float]) -> float:
        """What is left of δ for exactly Gaussian noise; `epsilon_at(δ)` is the most that any costs.

        Half of it where no share is enough: `_kept` then finds nothing to hold.
        """
        if self.distance == 0:
            return delta
        share = _LEAST_SHARE
        for _ in range(_TRIES):
            left = delta * (1 - share)
            epsilon = epsilon_at(left)
            if math.isfinite(self._kept(epsilon, delta, left)):
                return left
            share = _ROOM * (1 + math.exp(min(epsilon, 700.0))) * self.distance / delta
            if share >= 1:
                break
        return delta / 2

    def _kept(self, epsilon: float, delta: float, left: float) -> float:
        """The ε found at the δ `left`, if it holds at δ with the noise as it is; else ∞."""
        excess = (1 + math.exp(min(epsilon, 700.0))) * self.distance
        return epsilon if excess <= delta - left or self.distance == 0 else math.inf


NOTHING = Releases()
"""No releases beside the training."""


def composed_epsilon(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    delta: float,
    *,
    method: Method = "tight",
    releases: Releases = NOTHING,
) -> float:
    """ε at δ of sampled-Gaussian steps and of Gaussian releases, together.

    `noise_multiplier`, `sample_rate`, `steps`, `delta`: as for `tight_epsilon`, one per entry (k,)
    or a number for all. `method`: `"tight"` (the default), `"rdp"` or `"rdp-classic"`. `releases`:
    what was released beside the steps, by default `NOTHING`. ValueError for values out of range.

    Guarantee: an upper bound, in both directions, whichever comes first and whatever it is made
    to depend on; as tight as `tight_epsilon` is, or the RDP `method` asked for.

    >>> together = composed_epsilon(1 / 0.4, 1.0, 1, 1e-5, releases=Releases(0.3))
    >>> abs(together - gaussian_epsilon(0.5, 1e-5)) < 1e-6
    True
    """
    noise = np.atleast_1d(checks.non_negative("noise_multiplier", noise_multiplier))
    rate = np.atleast_1d(checks.probability("sample_rate", sample_rate))
    times = np.atleast_1d(checks.counts("steps", steps))
    noise, rate, times = np.broadcast_arrays(noise, rate, times)
    if releases.mu:
        noise, times = np.append(noise, 1 / releases.mu), np.append(times, 1)
        rate = np.append(rate, 1.0)

    def priced(at: float) -> float:
        if not times.any():
            return 0.0
        if method == "tight":
            return tight_epsilon(noise, rate, times, at)
        with np.errstate(over="ignore"):  # to ∞
            rdp = times @ sampled_gaussian_rdp(noise, rate, DEFAULT_ORDERS)
        return float(rdp_epsilon(DEFAULT_ORDERS, rdp, at, method))

    inside = delta_within_cap(delta)
    left = releases._delta_left(inside, priced)
    return releases._kept(priced(left), inside, left)


def composed_epsilons(
    blocks: Iterable[Block],
    *,
    noise_std: NDArray[np.float64],
    sample_rate: NDArray[np.float64],
    max_grad_norm: NDArray[np.float64],
    delta: float,
    releases: Releases,
    most: Callable[[float], float],
    beside: ArrayLike = 0.0,
    **how: Any,
) -> Epsilons:
    """ε of every example as by `epsilons_from_blocks`, composed with releases that use everyone.

    Constants (rows,): one per row; `beside` as there. `most(δ)`: what nobody exceeds, releases of
    exactly Gaussian noise included; it is asked only to set aside what the noise's distance from
    that costs.
    """
    inside = delta_within_cap(delta)
    left = releases._delta_left(inside, most)
    if releases.mu:
        blocks = (_with_full_step(norms, steps) for norms, steps in blocks)
        noise_std = np.append(noise_std, 1 / releases.mu)
        sample_rate = np.append(sample_rate, 1.0)
        max_grad_norm = np.append(max_grad_norm, 1.0)
        beside = np.append(np.broadcast_to(beside, sample_rate.shape[0] - 1), 0.0)
    found = epsilons_from_blocks(
        blocks,
        noise_std=noise_std,
        sample_rate=sample_rate,
        max_grad_norm=max_grad_norm,
        delta=left,
        beside=beside,
        **how,
    )
    if left == inside:
        return replace(found, delta=delta)
    values = np.array([releases._kept(value, inside, left) for value in found.values])
    return replace(
        found,
        values=values,
        cautious=values,
        worst_case=releases._kept(found.worst_case, inside, left),
        delta=delta,
    )


def _with_full_step(norms: ArrayLike, steps: ArrayLike) -> Block:
    """The block with one more row: one step at the norm 1, for everyone."""
    z, times = np.asarray(norms), np.asarray(steps)
    one = np.ones((1, *times.shape[1:]), dtype=times.dtype)
    return np.append(z, np.ones((1, z.shape[1])), axis=0), np.append(times, one, axis=0)


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
    excess = (1 + math.exp(min(epsilon, 700.0))) * distance
    return float(gaussian_delta(epsilon, mu)) * _ROUNDING + excess <= delta


def gaussian_epsilon(mu: float, delta: float, distance: float = 0.0) -> float:
    """The least ε at which releases of total μ are (ε, δ)-DP, found from above.

    >>> round(gaussian_epsilon(0.03252, 1e-5), 4)
    0.1
    """
    checks.open_unit("delta", delta)
    if gaussian_keeps(0.0, delta, mu, distance):
        return 0.0
    step = max(mu, 1e-6)
    while not gaussian_keeps(step, delta, mu, distance):
        step *= 2
        if step > 1e7:
            return math.inf
    low, high = 0.0, step
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if gaussian_keeps(middle, delta, mu, distance):
            high = middle
        else:
            low = middle
    return high
