"""A statistical audit: what an adversary who sees everything a mechanism drew can tell.

The production code runs as it is; only `_with_noise`, through which all numbers leave, is watched.
A run on D is replayed with its draws on D', and the other way round. That gives the exact numbers
which the noise went onto, however the mechanism adapted, and with them the likelihood ratio of the
run: no test of D against D' does better.
"""

from contextlib import contextmanager

from scipy.special import ndtri
from scipy.stats import beta

from epsilons.accounting.composition import gaussian_epsilon
from epsilons.release import mechanisms

DELTA = 1e-5


@contextmanager
def noise_drawn_by(draw):
    original = mechanisms._with_noise
    mechanisms._with_noise = draw
    try:
        yield original
    finally:
        mechanisms._with_noise = original


def transcript(mechanism, data):
    """What the mechanism drew on the data, and the exact numbers beneath."""
    drawn, exact = [], []

    def watch(numbers):
        exact.append(numbers.astype(float))
        drawn.append(original(numbers))
        return drawn[-1]

    with noise_drawn_by(watch) as original:
        mechanism(data)
    return drawn, exact


def replay(mechanism, data, drawn):
    """The exact numbers on the data, had the mechanism drawn this."""
    exact, rest = [], iter(drawn)

    def tell(numbers):
        exact.append(numbers.astype(float))
        return next(rest)

    with noise_drawn_by(tell):
        mechanism(data)
    return exact


def evidence(mechanism, seen, other):
    """Log-likelihood ratio of a run on `seen`: of `seen` against `other`."""
    drawn, here = transcript(mechanism, seen)
    there = replay(mechanism, other, drawn)
    return sum(
        float((y - (mine + theirs) / 2) @ (mine - theirs))
        for y, mine, theirs in zip(drawn, here, there, strict=True)
    )


def epsilon_lower_bound(mechanism, data, neighbour, draws, confidence=0.95):
    """With this confidence the mechanism is not (ε, 1e-5)-DP below the ε returned.

    Half of the draws are on the data, half on the neighbour; both error rates at an even
    threshold, by Clopper and Pearson. A mechanism that is μ-GDP keeps
    Φ⁻¹(hits) − Φ⁻¹(false alarms) ≤ μ (Nasr et al. 2023).
    """
    half = draws // 2
    alarms = sum(evidence(mechanism, data, neighbour) < 0 for _ in range(half))
    hits = sum(evidence(mechanism, neighbour, data) > 0 for _ in range(half))
    tail = (1 - confidence) / 2
    most_alarms = beta.ppf(1 - tail, alarms + 1, half - alarms)
    least_hits = beta.ppf(tail, hits, half - hits + 1)
    mu = float(ndtri(least_hits) - ndtri(most_alarms))
    return gaussian_epsilon(mu, DELTA) if mu > 0 else 0.0
