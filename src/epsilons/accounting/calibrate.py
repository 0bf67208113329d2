"""The least noise that keeps a promise: found by bisection, reported from the safe side."""

from __future__ import annotations

from epsilons.accounting import checks
from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.rdp import DEFAULT_ORDERS, rdp_epsilon, sampled_gaussian_rdp
from epsilons.accounting.tight import tight_epsilon

# The noisier end of the last interval is returned, at most this much above the least noise.
_TOLERANCE = 1e-7
_MOST_NOISE = 1e8
_LEAST_NOISE = 1e-2


def least_noise(
    epsilon: float, delta: float, sample_rate: float, steps: int, method: Method = "tight"
) -> float:
    """The least noise multiplier with which `steps` steps cost at most `epsilon` at `delta`.

    Guarantee: the ε of the returned noise, by the same method, is never above the target; the
    noise is within 1e-7 relative of the least. Nothing is released with p = 0 or no steps: 0.
    Below 0.01 the search stops: 0.01 is returned if it is enough.

    >>> round(least_noise(7.8, 1e-5, 4096 / 50_000, 3662), 4)
    3.1354
    """
    target = float(checks.positive("epsilon", epsilon))
    checks.open_unit("delta", delta)
    p = float(checks.probability("sample_rate", sample_rate))
    checks.whole("steps", steps, 0)
    checks.one_of("method", method, METHODS)
    if p == 0 or steps == 0:
        return 0.0

    def meets(noise: float) -> bool:
        return _worst_case(noise, p, steps, delta, method) <= target

    enough = 1.0
    while not meets(enough):
        enough *= 2
        if enough > _MOST_NOISE:
            floor = _worst_case(_MOST_NOISE, p, steps, delta, method)
            raise ValueError(
                f"epsilon={target:g} at delta={delta:g} can't be met: with ever more noise "
                f"method={method!r} still reports {floor:.3g}, because its orders end at "
                f"{DEFAULT_ORDERS[-1]:g}. Raise epsilon or delta."
            )
    short = enough / 2
    while meets(short):
        enough, short = short, short / 2
        if enough <= _LEAST_NOISE:
            return _LEAST_NOISE
    while enough - short > _TOLERANCE * enough:
        middle = (enough + short) / 2
        if meets(middle):
            enough = middle
        else:
            short = middle
    return enough


def _worst_case(noise: float, p: float, steps: int, delta: float, method: Method) -> float:
    """ε of an example that is at the clip bound in every step."""
    if method == "tight":
        return tight_epsilon(noise, steps, p, delta)
    rho = steps * sampled_gaussian_rdp(noise, p, DEFAULT_ORDERS)
    return float(rdp_epsilon(DEFAULT_ORDERS, rho, delta, method))
