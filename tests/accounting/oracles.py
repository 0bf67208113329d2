"""Slow and independent: the same quantities from their definitions, in many digits."""

from __future__ import annotations

import mpmath as mp


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
