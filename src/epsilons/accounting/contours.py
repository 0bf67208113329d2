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
from dataclasses import dataclass, replace

import numpy as np
from numba import njit
from numpy.typing import NDArray

from epsilons.accounting import threads
from epsilons.accounting.cumulants import _negative_peak, cumulants

Array = NDArray[np.float64]

_D = 16 * math.log(10.0)
_REACH = math.sqrt(2 * _D) + 0.5
# How far the rotation recurrence runs between two exact restarts.
_RESTART = 32
# Absolute error of an entry of M(t)/M(c): quadrature 1e-16, recurrence and summation the rest;
# and of the angle ω·log L, per unit of it.
_ENTRY_ERROR, _ANGLE_ERROR = 2e-14, 1e-15
# Stands for an error that is not bounded: beside it e^K is worth nothing.
NO_BOUND = 1e6
# Places x of one trapezoid sum. Rows that need more (a large s far out on the line) are left out:
# their error is not bounded, and RDP is as good.
_MOST_PLACES = 2**18
_LEFT_OUT = 1e200


@dataclass(frozen=True)
class Contour:
    """log M(t_j)/M(c) for rows × nodes, and its bounds."""

    log_ratio: Array  # (rows, J): log |M(t_j)/M(c)|, ≤ 0
    phase: Array  # (rows, J): arg M(t_j), continuous along the line
    tail: Array  # (rows,): bound of log |M(c+iω)/M(c)| for all ω ≥ Jh
    error: Array  # (rows, J): bound of the absolute error of M(t_j)/M(c)
    between: Between | None


@dataclass(frozen=True)
class Between:
    """What holds for every norm from `below` to the row's own, if K is interpolated in q = s².

    `tail` is a bound as that of `Contour`, linear in q between the two ends.
    """

    gap: Array  # (rows, J): bound of |K(t_j) − interpolated K(t_j)|; `NO_BOUND` if there is none
    turn: Array  # (rows, J): bound of how much K(t_j) changes between the two ends
    tail_below: Array  # (rows,): at the lower end, log of the bound of |M(c+iω)|, less K(c) there
    tail: Array  # (rows,): and at the row itself


def contour(
    c: float,
    h: float,
    nodes: int,
    s: Array,
    p: Array,
    *,
    add: bool,
    below: Array | None = None,
) -> Contour:
    """K(t_j) − K(c) on the line Re t = c > 1, t_j = c + ijh, j < nodes, for the rows (s, p), s < ∞.

    `below` (rows,): the next smaller s with which K is to be interpolated, NaN where there is none.
    """
    rows = s.size
    lower = np.full(rows, np.nan) if below is None else below
    out = Contour(
        log_ratio=np.zeros((rows, nodes)),
        phase=np.zeros((rows, nodes)),
        tail=np.zeros(rows),
        error=np.zeros((rows, nodes)),
        between=None,
    )
    moments = np.zeros((rows, 6))  # of Y, Y², Y³, Y²(1−Y), Y³(1−Y), and the variance of Y²
    tails = np.zeros((rows, 2))
    shift = np.zeros(rows)
    blur = np.zeros(rows)

    def part(k: int, n: int) -> None:
        given = (k, n, c, h, s, p, lower, add)
        _table(*given, out.log_ratio, out.phase, out.tail, blur, moments, tails, shift)

    threads.run(part, worthwhile=rows * nodes >= 2000)
    out.error[:] = _ENTRY_ERROR + _ANGLE_ERROR * blur[:, None] * (h * np.arange(nodes))
    if below is None:
        return out
    return replace(out, between=_between(c, h, s, p, below, out, moments, tails, shift, add=add))


def _between(
    c: float,
    h: float,
    s: Array,
    p: Array,
    below: Array,
    line: Contour,
    moments: Array,
    tails: Array,
    shift: Array,
    *,
    add: bool,
) -> Between:
    """Bounds over whole intervals of q = s², from moments at their upper ends alone.

    Λ(q) = e^{sx−q/2} is a martingale in q, so d/dq E f(Λ) = ½E[Λ²f''(Λ)]. With Y = pΛ/L ∈ [0, 1]
    and means ⟨·⟩ under the (complex) weight L^t it follows that, with t₂ = t(t−1),

        ∂M/∂q = ½t₂⟨Y²⟩M,   ∂²K/∂q² = t₂⟨Y²(1−Y)(½ + (t−3/2)Y)⟩ + ¼t₂²(⟨Y⁴⟩ − ⟨Y²⟩²).

    A mean under L^t is at most that of the modulus under L^{Re t} times M(Re t)/|M(t)|. The density
    of log Λ(x) is at most √(q/x)·e^{(q−x)/8} times that of log Λ(q), x < q, and M(Re t) grows with
    q: so the mean of what is ≥ 0 is at x at most √(q/x)·e^{(q−x)/8 + ΔK} times that at the upper
    end q. From q' on, √(q/x) is ρ = 2√q/(√q + √q') on average, and no more than that in the
    error of a chord, where it has the weight of Green's function. With μ = ⟨Y²⟩ at the upper
    end, ⟨Y²⟩ is off it by at most √(mean of (Y²−μ)²)·M(Re t)/|M(t)|, and below the upper end
    |M(t)|/M(Re t) would grow but for that: so it is bounded from below, and ∂²K/∂q² from above. A
    chord is off by at most (Δq)²/8 times that.

    For the tail, take N(d, −Ω) with d = κs: its log is κ²q/2 + log E[G], G = |L(x+id)^τ|,
    τ = Re t + iΩ. Its second derivative in q is at least −X, X a polynomial in |τ|, κ and means of
    |Y|^k ≤ (b·Y(x))^k under G, b = (1 − (1−cos D)/2)^{−½}, D = κq ≤ π/2. (The mean of the square
    is no less than the square of the mean.) So it exceeds its chord by at most (Δq)²/8·X.
    """
    power = 1 - c if add else c
    omega = h * np.arange(line.phase.shape[1])
    t = power + 1j * omega
    two = abs(t * (t - 1))
    lower = np.nan_to_num(below, nan=0.0)
    width = np.square(s) - np.square(lower)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        ratio = 2 * s / (s + lower)
        rise = cumulants(power, s, p) - cumulants(power, lower, p)
        mean = np.minimum(1.001 * moments * (ratio * np.exp(width / 8 + rise))[:, None], 1.0)
        one, square, cube, near, nearer, spread = mean.T
        w, off = width[:, None], np.sqrt(spread)[:, None]
        least = np.exp(line.log_ratio) - line.error - w / 2 * (two + c * (c - 1)) * off
        curvature = two * (near[:, None] / 2 + abs(t - 1.5) * nearer[:, None]) / least
        curvature += np.square(two) / 2 * spread[:, None] / np.square(least)
        gap = np.where(least > 0, np.minimum(np.square(w) / 8 * curvature, NO_BOUND), NO_BOUND)
        turn = np.where(least > 0, w * two / 2 * (moments[:, 1:2] + off / least), np.inf)
        # the chord of the tail
        last = h * line.phase.shape[1]
        size, kappa = math.hypot(power, last), shift
        angle = kappa * np.square(s)
        bent = 1 / np.sqrt(1 - (1 - np.cos(angle)) / 2)
        excess = size**2 * (size + 1) * bent**3 * cube
        excess += (size**2 * kappa + (1.5 + kappa) * size * (size + 1)) * bent**2 * square
        excess += (1 + kappa) * kappa * size * bent * one
        grow = bent * last * angle * one
        grow += (0.174 * (c - 1) if add else 0.7 * c * one) * np.square(angle)
        extra = np.square(width) / 8 * excess * np.exp(np.minimum(grow, 700.0))
        # never above |M(c+iω)| ≤ M(c), which the interpolation misses by `gap`
        top = np.minimum(tails[:, 1] + extra, gap[:, 0])
        bottom = np.minimum(tails[:, 0] + extra, gap[:, 0])
        straight = p == 1.0  # K is linear in q
    last_tail = np.where(straight, line.tail, top)
    first_tail = np.where(straight, -np.square(last * lower) / 2, bottom)
    gap[straight | (p == 0.0)] = 0.0
    turn[straight] = w[straight] * two * 0.51
    return Between(gap=gap, turn=turn, tail_below=first_tail, tail=last_tail)


@njit(cache=True, nogil=True)
def _table(  # type: ignore[no-untyped-def]
    first, stride, c, h, s, p, below, add, log_ratio, phase, tail, blur, moments, tails, shift
):
    nodes = log_ratio.shape[1]
    power = 1.0 - c if add else c
    omega = h * nodes
    step, valid_to, valid_for = 0.0, 0.0, -1.0
    for i in range(first, s.size, stride):
        if p[i] == 0.0 or s[i] == 0.0:
            continue
        if p[i] == 1.0:
            for j in range(nodes):
                log_ratio[i, j] = -((j * h * s[i]) ** 2) / 2
                phase[i, j] = (c - 0.5) * j * h * s[i] ** 2
            tail[i] = -((omega * s[i]) ** 2) / 2
            continue
        # A larger s needs a finer step, so one step serves the levels just below it: up to the next
        # power of 1.1, so that no entry depends on which rows are computed with it.
        ceiling = (1 + 1e-9) * 1.1 ** math.ceil(math.log(s[i]) / math.log(1.1))
        if not (p[i] == valid_for and ceiling == valid_to):
            valid_for, valid_to = p[i], ceiling
            low, high = _range(c, valid_to, p[i], add)
            step = _step(power, omega, valid_to, p[i], low, high)
        low, high = _range(c, s[i], p[i], add)
        if not (high - low) / step < _MOST_PLACES:
            blur[i], moments[i, :] = _LEFT_OUT, 1.0
            continue
        base, weight, log_l, slope = _nodes(power, s[i], p[i], low, high, step)
        _rotate(h, weight, log_l, add, log_ratio[i], phase[i])
        blur[i] = (weight * np.abs(log_l)).sum()
        # For a Gaussian loss the best shift is ω·s·E[Y]; less where L is near 1−p on the left.
        d = min(omega * s[i] * (weight * slope).sum(), 0.5 * math.pi / s[i])
        best = 0.0
        for share in (1.0, 0.7, 0.4):
            bound = _log_tail(power, omega, s[i], p[i], share * d, low, high, step) - base
            if bound < tail[i]:
                tail[i], best = max(bound, -_D), share * d
            if bound <= -0.3 * d * d:
                break
        if math.isnan(below[i]):
            continue
        square = slope * slope
        moments[i, 0] = (weight * slope).sum()
        moments[i, 1] = (weight * square).sum()
        moments[i, 2] = (weight * square * slope).sum()
        moments[i, 3] = (weight * square * (1 - slope)).sum()
        moments[i, 4] = (weight * square * slope * (1 - slope)).sum()
        moments[i, 5] = (weight * (square - moments[i, 1]) ** 2).sum()
        # The same D = κq at the lower end, which has its own place of the largest φ·L^power.
        tails[i, 1], shift[i] = tail[i], best / s[i]
        if below[i] > 0.0 and best > 0.0:
            low, high = _range(c, below[i], p[i], add)
            base = _log_strip(power, 0.0, below[i], p[i], 0.0, low, high, step)
            under = shift[i] * below[i]
            tails[i, 0] = _log_tail(power, omega, below[i], p[i], under, low, high, step) - base


@njit(cache=True, nogil=True)
def _log_tail(power, omega, s, p, d, low, high, step):  # type: ignore[no-untyped-def]
    """log N(d, −ω), but for a constant factor."""
    # Further left e^{d²/2} outgrows φ, and arg L is too small to hold it down.
    return _log_strip(power, -omega, s, p, d, low - math.sqrt(2.0) * d, high, step)


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
def _rotate(h, weight, log_l, add, log_ratio, phase):  # type: ignore[no-untyped-def]
    """Σ w·e^{ijh·log L} for all j, by rotating every term from j to j + 1."""
    n = weight.size
    angle = -log_l if add else log_l
    mean = (weight * angle).sum()
    # About the mean, so that the sums stay near the positive axis and the phase is small.
    centred = angle - mean
    cosine, sine = np.cos(h * centred), np.sin(h * centred)
    real, imaginary = np.empty(n), np.empty(n)
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
        for k in range(n):
            old = real[k]
            real[k] = old * cosine[k] - imaginary[k] * sine[k]
            imaginary[k] = old * sine[k] + imaginary[k] * cosine[k]
