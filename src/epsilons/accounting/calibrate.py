"""The least noise that keeps a promise, reported from the safe side."""

from __future__ import annotations

import math

from epsilons.accounting import checks
from epsilons.accounting.adaptive import step_multiplier
from epsilons.accounting.composition import NOTHING, Releases, composed_epsilon
from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.rdp import DEFAULT_ORDERS

# In log noise: how close to the least noise, and where the search ends.
_TOLERANCE = 1e-7
_MOST_NOISE = math.log(1e8)
_LEAST_NOISE = math.log(1e-2)


def least_noise(
    epsilon: float,
    *,
    sample_rate: float,
    steps: int,
    delta: float,
    method: Method = "tight",
    releases: Releases = NOTHING,
    counts: int = 0,
    beside: float = 0.0,
) -> float:
    """The least noise multiplier with which `steps` steps cost at most `epsilon` at `delta`.

    `epsilon`: the target, > 0. `sample_rate`: probability p with which an example is drawn, in
    [0, 1]. `steps`: a whole number ≥ 0. `delta`: δ in (0, 1). `method`: the accountant, `"tight"`
    (the default), `"rdp"` or `"rdp-classic"`. With `releases`, such as that of a clip bound, they
    and the steps together meet the target. `counts` of the steps release a count beside their
    gradient, which one example moves by `beside` standard deviations of its noise. The result is a
    ratio to the clip bound; times it, the standard deviation `noise_std`. ValueError if no noise is
    enough, and for values out of range.

    Guarantee: the ε of the returned noise, by the same method, is never above the target; the
    noise is within 1e-7 relative of the least. Nothing is released with p = 0 or no steps: 0.
    The search stops at 0.01, which is returned (or a little less) if it is enough.

    >>> round(least_noise(7.8, sample_rate=4096 / 50_000, steps=3662, delta=1e-5), 4)
    3.1354
    """
    target = float(checks.positive("epsilon", epsilon))
    checks.open_unit("delta", delta)
    p = float(checks.probability("sample_rate", sample_rate))
    checks.whole("steps", steps, 0)
    checks.one_of("method", method, METHODS)
    if p == 0 or steps == 0:
        return 0.0
    checks.whole("counts", counts, 0)
    if counts > steps:
        raise ValueError(f"counts={counts}; expected at most one in each of {steps} steps")
    if not beside:
        counts = 0  # they release nothing
    alone = composed_epsilon(
        1 / beside if counts else 1.0, p, counts, delta, method=method, releases=releases
    )
    if alone >= target:
        raise ValueError(
            f"epsilon={target:g} at delta={delta:g} can't be met: the clip bound alone costs "
            f"{alone:.4g}. Raise epsilon, or spend less on the clip bound."
        )

    from scipy.optimize import brentq  # here, since it takes most of a second to load

    times = [steps - counts, counts]

    def excess(log_noise: float) -> float:
        noise = math.exp(log_noise)
        each = [noise, step_multiplier(noise, beside)]
        return composed_epsilon(each, p, times, delta, method=method, releases=releases) - target

    enough = 0.0
    while excess(enough) > 0:
        enough += math.log(2)
        if enough > _MOST_NOISE:
            floor = excess(enough) + target
            raise ValueError(
                f"epsilon={target:g} at delta={delta:g} can't be met: with ever more noise "
                f"method={method!r} still reports {floor:.3g}, because its orders end at "
                f"{DEFAULT_ORDERS[-1]:g}. Raise epsilon or delta, or use method='tight'."
            )
    short = enough - math.log(2)
    while excess(short) <= 0:
        enough, short = short, short - math.log(2)
        if enough <= _LEAST_NOISE:
            return math.exp(enough)
    root = float(brentq(excess, short, enough, xtol=_TOLERANCE / 4, rtol=1e-14))
    step = _TOLERANCE / 4
    while excess(root) > 0:
        root += step
        step *= 2
    return math.exp(root)
