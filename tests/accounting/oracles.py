"""Slow and independent: the same quantities from their definitions.

Cumulants in many digits (mpmath), and ε from below: a discretised privacy loss distribution that
shares nothing with the accountant, neither cumulants nor contours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath as mp
import numpy as np
from numba import njit

Rows = Sequence[tuple[float, float, int]]  # (s, p, steps)


def closed_form(order: int, s: float, p: float) -> mp.mpf:
    """K at an integer order ≥ 2, from the binomial theorem (Mironov, Talwar & Zhang 2019)."""
    with mp.workdps(60):
        s, p = mp.mpf(s), mp.mpf(p)
        excess = mp.fsum(
            mp.binomial(order, k)
            * p**k
            * (1 - p) ** (order - k)
            * mp.expm1(s * s * k * (k - 1) / 2)
            for k in range(2, order + 1)
        )
        return mp.log1p(excess)


def quadrature(order: complex, s: float, p: float, digits: int = 20) -> mp.mpc:
    """K at any order: a trapezoid sum of the definition over the places where the integrand is.

    Works in 50 digits, so that a K of 1e-26 survives the subtraction of 1; the step is below
    what analyticity in the strip |Im x| < π/2s asks for.
    """
    with mp.workdps(50):
        t, s, p = mp.mpmathify(order), mp.mpf(s), mp.mpf(p)
        reach = mp.sqrt(2 * digits * mp.log(10)) + 1
        width = min(mp.pi / (2 * s), reach / 2)
        growth = digits * mp.log(10) + abs(mp.re(t)) + abs(mp.im(t)) * s * width
        h = 2 * mp.pi * width / (growth + width**2 / 2)
        centres = [mp.mpf(0), s, mp.re(t) * s, (mp.re(t) + 1) * s]
        if mp.re(t) < 0:
            centres.append(_peak(mp.re(t), s, p))
        nodes = set()
        for centre in centres:
            first, last = int((centre - reach) / h), int((centre + reach) / h)
            nodes.update(range(first, last + 1))
        total = mp.mpf(0)
        for k in sorted(nodes):
            x = k * h
            likelihood = 1 + p * mp.expm1(s * x - s * s / 2)
            total += mp.exp(-x * x / 2) * (likelihood**t - 1 - t * (likelihood - 1))
        return mp.log1p(total * h / mp.sqrt(2 * mp.pi))


def _peak(t: mp.mpf, s: mp.mpf, p: mp.mpf) -> mp.mpf:
    """Where L(x)^t·exp(−x²/2) is largest for t < 0, by bisection of the slope."""
    left, right = t * s, mp.mpf(0)
    for _ in range(60):
        x = (left + right) / 2
        slope = t * s / (1 + (1 - p) / p * mp.exp(s * s / 2 - s * x)) - x
        left, right = (x, right) if slope > 0 else (left, x)
    return left


def least_epsilon(rows: Rows, delta: float, *, points: int = 2**13) -> float:
    """A lower bound of ε at `delta`: the largest ε found whose least δ is above it."""
    low, high = 0.0, 1.0
    if not proves_more(rows, low, delta, points=points):
        return 0.0
    while proves_more(rows, high, delta, points=points):
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if proves_more(rows, middle, delta, points=points):
            low = middle
        else:
            high = middle
    return low


def proves_more(rows: Rows, eps: float, delta: float, *, points: int = 2**13) -> bool:
    """Whether δ(ε) > `delta` is proved for removing or adding: the true ε is above `eps`."""
    return any(least_delta(rows, eps, add=add, points=points) > delta for add in (False, True))


def least_delta(rows: Rows, eps: float, *, add: bool, points: int = 2**13) -> float:
    """A lower bound of δ(ε) of a composition: E[(1 − e^{ε−loss})₊] of a PLD of merged outcomes.

    A step's outcomes x are cut into cells, and neighbouring cells merged so that the loss of each
    group, log P(group)/Q(group), is on a grid; what is left at the end is rounded down. Merging
    is post-processing: the δ of the result is never above the true one, for one step or for a
    composition, whose losses add up by FFT. Outcomes of probability below 1e-40 are left out,
    which counts as no loss. Masses are tilted by e^{θ·loss}, with the θ at which the tilted mean is
    ε, so that rounding is relative to δ. A bound of the rounding, and of the mass that the cyclic
    FFT puts elsewhere, is taken off.
    """
    # A step left out can only lower δ; one of s < 1e-9 has no loss that floating point would show.
    rows = [(s, p, n) for s, p, n in rows if s > 1e-9 and p > 0 and n > 0]
    if not rows:
        return 0.0
    rough = []
    for s, p, n in rows:
        mass, loss = _cells(s, p, add, _count(s, 0.02))
        rough.append((np.log(mass), loss, n))
    theta = _saddle(rough, eps)
    (low, _), (high, _) = _reach(rough, theta, -1), _reach(rough, theta, 1)
    grid = 1.05 * (high - low) / points
    spectrum, log_scale, steps, merged = np.ones(points // 2 + 1, dtype=complex), 0.0, 0, []
    for s, p, n in rows:
        mass, place = _merged(*_cells(s, p, add, _count(s, min(0.02, grid / s))), grid)
        merged.append((np.log(mass), grid * place, n))
        scale = _log_moment(*merged[-1][:2], theta)
        pmf = np.zeros(points)
        np.add.at(
            pmf, place.astype(int) % points, np.exp(merged[-1][0] + theta * grid * place - scale)
        )
        spectrum *= np.fft.rfft(pmf) ** n
        log_scale += n * scale
        steps += n
    first = math.floor((low + high) / 2 / grid) - points // 2
    places = first + np.arange(points)
    total = np.fft.irfft(spectrum, points)[places % points]
    losses = grid * places
    worth = np.where(losses > eps, np.exp(theta * np.minimum(eps - losses, 0.0)), 0.0)
    worth *= -np.expm1(np.minimum(eps - losses, 0.0))
    found = float(total @ worth)
    found -= 4e-15 * (steps + 16) * float(np.linalg.norm(total) * np.linalg.norm(worth))
    found -= _reach(merged, theta, -1, losses[0])[1] + _reach(merged, theta, 1, losses[-1])[1]
    return max(found, 0.0) * (1 - 1e-9) * math.exp(min(log_scale - theta * eps, 0.0))


def _count(s: float, width: float) -> int:
    return min(int((s + 28) / width) + 1, 2**15)


def _log_moment(log_mass: np.ndarray, loss: np.ndarray, theta: float) -> float:
    """log E[e^{θ·loss}]."""
    exponent = log_mass + theta * loss
    peak = exponent.max()
    return float(peak + np.log(np.exp(exponent - peak).sum()))


def _saddle(steps: list, eps: float) -> float:
    """The θ in [0, 4000] at which the tilted mean of the total loss is ε, nearly."""
    low, high = 0.0, 4000.0
    for _ in range(40):
        theta = (low + high) / 2
        mean = 0.0
        for log_mass, loss, n in steps:
            exponent = log_mass + theta * loss
            tilted = np.exp(exponent - exponent.max())
            mean += n * float(tilted @ loss / tilted.sum())
        low, high = (theta, high) if mean < eps else (low, theta)
        if high - low < 1e-2 * high + 1e-4:
            break
    return low


def _reach(steps: list, theta: float, sign: int, end: float | None = None) -> tuple[float, float]:
    """Where the tilted total loss ends on one side, but for e^−32; and a bound of what is beyond.

    Chernoff: P_θ(±loss > ±end) ≤ M(θ ± a)/M(θ)·e^{∓a·end} for every a > 0.
    """
    start = sum(n * _log_moment(m, loss, theta) for m, loss, n in steps)
    best, least = math.inf, 0.0
    for a in np.geomspace(1e-4, 1e4, 17):
        log_ratio = sum(n * _log_moment(m, loss, theta + sign * a) for m, loss, n in steps) - start
        best = min(best, (log_ratio + 32.0) / a)
        if end is not None:
            least = min(least, log_ratio - sign * a * end)
    return sign * best, math.exp(least)


@njit(cache=True)
def _cells(s, p, add, count):
    """P and loss of `count` cells of x from −14 to s + 14, by ascending loss (Gauss–Legendre)."""
    nodes = np.array([-0.8611363115940526, -0.3399810435848563,
                      0.3399810435848563, 0.8611363115940526])  # fmt: skip
    weights = np.array([0.34785484513745385, 0.6521451548625461,
                        0.6521451548625461, 0.34785484513745385])  # fmt: skip
    half = (s + 28.0) / count / 2
    mass, loss = np.empty(count), np.empty(count)
    for i in range(count):
        middle = -14.0 + half * (2 * i + 1)
        base, excess, scaled = 0.0, 0.0, 0.0
        top = s * (middle + half) - s * s / 2
        for k in range(4):
            x = middle + half * nodes[k]
            density = weights[k] * math.exp(-(x * x - middle * middle) / 2)
            w = s * x - s * s / 2
            base += density
            excess += density * math.expm1(min(w, 1.0))
            scaled += density * math.exp(w - top)
        log_base = math.log(base * half / math.sqrt(2 * math.pi)) - middle * middle / 2
        drawn = math.log(p * scaled / base) + top
        if top < 1.0 and p * excess / base > -0.5:
            log_l = math.log1p(p * excess / base)  # L − 1 = p(e^w − 1): no cancellation
        elif p == 1.0:
            log_l = drawn
        else:
            other = math.log1p(-p)
            log_l = max(drawn, other) + math.log1p(math.exp(-abs(drawn - other)))
        at = count - 1 - i if add else i
        mass[at] = math.exp(log_base) if add else math.exp(log_base + log_l)
        loss[at] = -log_l if add else log_l
    kept = mass > 1e-290
    return mass[kept], loss[kept]


@njit(cache=True)
def _merged(mass, loss, grid):
    """Mass and place on the grid of groups of neighbouring cells, cells being shared if need be."""
    out, place = np.zeros(2 * mass.size + 1), np.zeros(2 * mass.size + 1)
    used = 0
    target = math.floor(loss[0] / grid) + 1.0
    own, others = 0.0, 0.0  # P of the group so far, and Q·e^{target}
    for i in range(mass.size):
        left = mass[i]
        ratio = math.exp(min(target * grid - loss[i], 700.0))
        if ratio < 1.0 and own + left >= others + left * ratio:
            part = min(max((others - own) / (1.0 - ratio), 0.0), left)
            if own + part > 0.0:
                out[used], place[used] = own + part, target
                used += 1
            left -= part
            own, others = 0.0, 0.0
            target = math.floor(loss[i] / grid) + 1.0
            ratio = math.exp(target * grid - loss[i])
        own += left
        others += left * ratio
    if own > 0.0:
        out[used], place[used] = own, math.floor(target + math.log(own / others) / grid)
        used += 1
    return out[:used], place[:used]
