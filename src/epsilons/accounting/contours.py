"""The cumulant function on a vertical line, with what is known about its error.

For rows (s, p), a direction and the line t_j = c + ijh, with M(t) = E[L^t] to remove the example
and M(1−t) to add it (see `cumulants`): M(t_j)/M(c) by one trapezoid sum in x whose step follows
from a bound of its own error, and a bound of |M(c + iω)|/M(c) that holds for every ω ≥ Jh.

Both bounds move the line of integration into the complex x-plane. With x + id in place of x,

    N(d, ω) = e^{d²/2} ∫ φ(x)·|L(x+id)|^{Re t}·e^{ω·arg L(x+id)} dx,

the trapezoid rule of step η errs by at most 2N(d, ω)/(e^{2πd/η} − 1), and |M(c+iω)| ≤ N(d, −ω),
which falls with ω because arg L > 0 in the upper half of the strip |Im x| < π/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from epsilons.accounting import threads
from epsilons.accounting.cumulants import _negative_peak

Array = NDArray[np.float64]

_D = 16 * math.log(10.0)
_REACH = math.sqrt(2 * _D) + 0.5
# How far the rotation recurrence runs between two exact restarts.
_RESTART = 32
# Absolute error of an entry of M(t)/M(c): quadrature 1e-16, recurrence and summation the rest;
# and of the angle ω·log L, per unit of it.
_ENTRY_ERROR, _ANGLE_ERROR = 2e-14, 1e-15


@dataclass(frozen=True)
class Contour:
    """log M(t_j)/M(c) for rows × nodes, and its bounds."""

    log_ratio: Array  # (rows, J): log |M(t_j)/M(c)|, ≤ 0
    phase: Array  # (rows, J): arg M(t_j), continuous along the line
    tail: Array  # (rows,): bound of log |M(c+iω)/M(c)| for all ω ≥ Jh
    error: Array  # (rows, J): bound of the absolute error of M(t_j)/M(c)
    curvature: Array  # (rows, J), or (rows, 0) if not asked for: |∂²K(t_j)/∂q²|, q = s²


def contour(
    c: float, h: float, nodes: int, s: Array, p: Array, *, add: bool, curved: bool = False
) -> Contour:
    """K(t_j) − K(c) on the line Re t = c > 1, t_j = c + ijh, j < nodes, for the rows (s, p), s < ∞.

    Λ(q) = e^{sx−q/2} with q = s² is a martingale in q, so d/dq E f(Λ) = ½E[Λ²f''(Λ)]. With
    Y = pΛ/L, M_k = E[Y^k L^t] and t₍k₎ = t(t−1)…(t−k+1), the second derivative follows:

        ∂²K/∂q² = (½t₍2₎M₂ + t₍3₎M₃ + ¼t₍4₎M₄)/M − (½t₍2₎M₂/M)².
    """
    rows = s.size
    out = Contour(
        log_ratio=np.zeros((rows, nodes)),
        phase=np.zeros((rows, nodes)),
        tail=np.zeros(rows),
        error=np.zeros((rows, nodes)),
        curvature=np.zeros((rows, nodes if curved else 0)),
    )

    def part(k: int, n: int) -> None:
        _table(k, n, c, h, s, p, add, out.log_ratio, out.phase, out.tail, blur, out.curvature)

    blur = np.zeros(rows)
    threads.run(part, worthwhile=rows * nodes >= 2000)
    out.error[:] = _ENTRY_ERROR + _ANGLE_ERROR * blur[:, None] * (h * np.arange(nodes))
    return out


@njit(cache=True, nogil=True)
def _table(  # type: ignore[no-untyped-def]
    first, stride, c, h, s, p, add, log_ratio, phase, tail, blur, curvature
):
    nodes = log_ratio.shape[1]
    power = 1.0 - c if add else c
    omega = h * nodes
    step, valid_to, valid_for = 0.0, 0.0, -1.0
    for i in range(first, s.size, stride):
        if p[i] == 0.0 or (s[i] == 0.0 and p[i] == 1.0):
            continue
        if p[i] == 1.0:
            for j in range(nodes):
                log_ratio[i, j] = -((j * h * s[i]) ** 2) / 2
                phase[i, j] = (c - 0.5) * j * h * s[i] ** 2
            tail[i] = -((omega * s[i]) ** 2) / 2
            continue
        if s[i] == 0.0:
            one = np.ones(1)
            _rotate(c, h, one, 0.0 * one, p[i] * one, add, log_ratio[i], phase[i], curvature[i])
            continue
        if not (p[i] == valid_for and 0.5 * valid_to < s[i] <= valid_to):
            # A larger s needs a finer step, so one step serves the levels just below it.
            valid_for, valid_to = p[i], 1.1 * s[i]
            low, high = _range(c, valid_to, p[i], add)
            step = _step(power, omega, valid_to, p[i], low, high)
        low, high = _range(c, s[i], p[i], add)
        base, weight, log_l, slope = _nodes(power, s[i], p[i], low, high, step)
        _rotate(c, h, weight, log_l, slope, add, log_ratio[i], phase[i], curvature[i])
        blur[i] = (weight * np.abs(log_l)).sum()
        # For a Gaussian loss the best shift is ω·s·E[Y]; less where L is near 1−p on the left.
        d = min(omega * s[i] * (weight * slope).sum(), 0.5 * math.pi / s[i])
        for shift in (d, 0.7 * d, 0.4 * d):
            # Further left e^{d²/2} outgrows φ, and arg L is too small to hold it down.
            left = low - math.sqrt(2.0) * shift
            bound = _log_strip(power, -omega, s[i], p[i], shift, left, high, step) - base
            tail[i] = max(min(tail[i], bound), -_D)
            if bound <= -0.3 * d * d:
                break


@njit(cache=True, nogil=True)
def _range(c, s, p, add):  # type: ignore[no-untyped-def]
    """Where φ·L^power is above e^−36.8 of its peak."""
    if add:
        peak, _ = _negative_peak(c - 1.0, s, p)
        return peak - _REACH, peak + _REACH
    return -_REACH, c * s + _REACH


@njit(cache=True, nogil=True)
def _log_strip(power, omega, s, p, d, low, high, step):  # type: ignore[no-untyped-def]
    """log of ∫ e^{(d²−x²)/2}·|L(x+id)|^power·e^{ω·arg L(x+id)} dx by a trapezoid sum."""
    cosine, sine = math.cos(s * d), math.sin(s * d)
    total, scale = 0.0, -math.inf
    for k in range(int((high - low) / step) + 2):
        x = low + k * step
        w = math.log(p) + s * x - s * s / 2
        if w > 300.0:
            log_abs, angle = w, s * d
        else:
            a = math.exp(w)
            real, imaginary = 1.0 - p + a * cosine, a * sine
            log_abs = 0.5 * math.log(real * real + imaginary * imaginary)
            angle = math.atan2(imaginary, real)
        exponent = power * log_abs + omega * angle + (d * d - x * x) / 2
        if exponent > scale:
            total = total * math.exp(scale - exponent) + 1.0
            scale = exponent
        else:
            total += math.exp(exponent - scale)
    return scale + math.log(total * step)


@njit(cache=True, nogil=True)
def _step(power, omega, s, p, low, high):  # type: ignore[no-untyped-def]
    """The coarsest step whose aliases are below 1e-16 of M(c), over a few shifts d."""
    coarse = min(0.25, 0.5 / s)
    base = _log_strip(power, 0.0, s, p, 0.0, low, high, coarse)
    limit = min(math.sqrt(2 * _D), (0.6 if power < 0 else 0.95) * math.pi / s)
    best = 0.0
    for share in (1.0, 0.7, 0.4, 0.2, 0.08):
        d = share * limit
        growth = _log_strip(power, omega, s, p, d, low, high, coarse) - base
        # The coarse sum is good to a factor; 3 nats cover it.
        step = 2 * math.pi * d / (_D + 3.0 + growth)
        if step < best:
            break
        best = step
    return best


@njit(cache=True, nogil=True)
def _nodes(power, s, p, low, high, step):  # type: ignore[no-untyped-def]
    """log of the integral, normalised weight, log L and Y = pΛ/L where φ·L^power counts."""
    n = int((high - low) / step) + 2
    x = low + step * np.arange(n)
    w = s * x - s * s / 2
    log_l = np.empty(n)
    slope = np.empty(n)
    log_p, log_q = math.log(p), math.log1p(-p)
    for k in range(n):
        if log_p + w[k] > log_q:
            log_l[k] = log_p + w[k] + math.log1p(math.exp(log_q - log_p - w[k]))
        elif w[k] < 1.0 and p < 0.5:
            log_l[k] = math.log1p(p * math.expm1(w[k]))
        else:
            log_l[k] = log_q + math.log1p(math.exp(log_p + w[k] - log_q))
        slope[k] = math.exp(log_p + w[k] - log_l[k])
    exponent = power * log_l - x * x / 2
    peak = exponent.max()
    keep = exponent > peak - _D - 3.0
    weight = np.exp(exponent[keep] - peak)
    total = weight.sum()
    return peak + math.log(total * step), weight / total, log_l[keep], slope[keep]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _rotate(  # type: ignore[no-untyped-def]
    c, h, weight, log_l, slope, add, log_ratio, phase, curvature
):
    """Σ w·e^{ijh·log L} for all j, by rotating every term from j to j + 1."""
    n = weight.size
    angle = -log_l if add else log_l
    mean = (weight * angle).sum()
    # About the mean, so that the sums stay near the positive axis and the phase is small.
    centred = angle - mean
    cosine, sine = np.cos(h * centred), np.sin(h * centred)
    real, imaginary = np.empty(n), np.empty(n)
    square, cube = slope * slope, slope * slope * slope
    previous = 0.0
    for j in range(log_ratio.size):
        if j % _RESTART == 0:
            for k in range(n):
                real[k] = weight[k] * math.cos(j * h * centred[k])
                imaginary[k] = weight[k] * math.sin(j * h * centred[k])
        re, im = 0.0, 0.0
        for k in range(n):
            re += real[k]
            im += imaginary[k]
        size = math.hypot(re, im)
        log_ratio[j] = math.log(size) if size > 1e-300 else -690.0
        turn = math.atan2(im, re)
        turn += 2 * math.pi * round((previous - turn) / (2 * math.pi))
        previous = turn
        phase[j] = turn + j * h * mean
        if curvature.size > 0:
            re2, im2, re3, im3, re4, im4 = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            for k in range(n):
                re2 += square[k] * real[k]
                im2 += square[k] * imaginary[k]
                re3 += cube[k] * real[k]
                im3 += cube[k] * imaginary[k]
                re4 += square[k] * square[k] * real[k]
                im4 += square[k] * square[k] * imaginary[k]
            t = complex(1 - c, -j * h) if add else complex(c, j * h)
            m = complex(re, im) if size > 1e-300 else complex(1e-300, 0.0)
            half = 0.5 * t * (t - 1) * complex(re2, im2) / m
            higher = complex(re3, im3) + (t - 3) / 4 * complex(re4, im4)
            curvature[j] = abs(half - half * half + t * (t - 1) * (t - 2) * higher / m)
        for k in range(n):
            old = real[k]
            real[k] = old * cosine[k] - imaginary[k] * sine[k]
            imaginary[k] = old * sine[k] + imaginary[k] * cosine[k]
