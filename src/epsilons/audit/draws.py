"""Are noise and coins what is priced: N(0, σ²) and Bernoulli(q), independent of all else?

Pure functions of what was drawn, each a handful of tests; a right program fails one of a function's
tests once in 10,000 calls.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.fft import irfft, next_fast_len, rfft
from scipy.special import erfc
from scipy.stats import binom, chi2, kstest
from torch import Tensor

from epsilons.audit.checks import Check, p_value
from epsilons.noise import Noise

Array = NDArray[np.float64]

LEVEL = 1e-4  # how often a right program fails, over all tests of a call
_KS_MOST = 200_000
_NOISE, _COINS, _KEYS = "noise", "coins", "keys"


class RecordedNoise:
    """A `noise` for `private_step` that keeps what it was given and what it released.

    `noise`: whose draws are recorded. `sums`, `stds`, `divisors`: of each release, the sums as
    float64 vectors by parameter name. `residuals`: release · divisor − sum, the noise itself, the
    same way. All of it is private.
    """

    def __init__(self, noise: Noise) -> None:
        self.noise = noise
        self.sums: list[dict[str, Array]] = []
        self.stds: list[float] = []
        self.divisors: list[float] = []
        self.residuals: list[dict[str, Array]] = []

    @property
    def kept(self) -> int:
        """How many steps were recorded."""
        return len(self.sums)

    def added_to(self, sums: dict[str, Tensor], std: float, divisor: float) -> dict[str, Tensor]:
        """The `sums` plus noise of `std` over `divisor`, as the recorded noise adds it."""
        before = {name: _flat(total) for name, total in sums.items()}
        # of float64, whatever the sums are, so that the rest of a division is not taken for noise
        wide = {
            name: total.detach().to("cpu", torch.float64).clone() for name, total in sums.items()
        }
        released = self.noise.added_to(wide, std, divisor)
        self.sums.append(before)
        self.stds.append(float(std))
        self.divisors.append(float(divisor))
        self.residuals.append(
            {name: _flat(released[name]) * divisor - before[name] for name in sums}
        )
        return {name: released[name].to(total.device) for name, total in sums.items()}


def _flat(tensor: Tensor) -> Array:
    found: Array = tensor.detach().to("cpu", torch.float64).reshape(-1).numpy().copy()
    return found


def check_noise(
    residuals: Sequence[Mapping[str, ArrayLike]], stds: float | Sequence[float]
) -> tuple[Check, ...]:
    """Whether noise is independent N(0, σ²) in every coordinate and step.

    `residuals`: of each step, the noise of each tensor by its name, as in
    `RecordedNoise.residuals`. `stds`: what is priced, of each step or of all. Tested are the
    variance of each tensor (χ²), of the sum of all coordinates, correlations between coordinates at
    every distance and between all pairs of steps, and the distribution (Kolmogorov–Smirnov).
    ValueError without noise to test.
    """
    if not len(residuals):
        raise ValueError("no step released noise: there is nothing to test")
    sigma = np.broadcast_to(np.asarray(stds, dtype=np.float64), (len(residuals),))
    if not bool(np.all(sigma > 0)):
        raise ValueError("a standard deviation of the noise is 0; expected noise in every step")
    names = list(residuals[0])
    steps = [
        np.concatenate([np.asarray(step[name], dtype=np.float64).reshape(-1) for name in names])
        for step in residuals
    ]
    x: Array = np.stack(steps) / sigma[:, None]
    ends = np.cumsum([np.size(residuals[0][name]) for name in names])
    found: dict[str, list[float]] = {"variance": [], "sums": [], "coordinates": [], "steps": []}
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        found["variance"].append(_chi2_p(float((x[:, start:end] ** 2).sum()), x[:, start:end].size))
    found["sums"].append(_chi2_p(float((x.sum(axis=1) ** 2).sum() / x.shape[1]), len(x)))
    found["coordinates"] += _lag_p_values(x)
    found["steps"] += _pair_p_values(x, x, same=True)
    flat = x.reshape(-1)
    some = flat if flat.size <= _KS_MOST else flat[:: -(-flat.size // _KS_MOST)]
    found["distribution"] = [float(kstest(some, "norm").pvalue)]
    return _bonferroni(_NOISE, found)


def check_coins(drawn: ArrayLike, sample_rate: float) -> tuple[Check, ...]:
    """Whether every example is drawn at every step by its own coin of probability `sample_rate`.

    `drawn` (steps, n): who was drawn. Tested are the rate, how batch sizes and the number of draws
    of each example vary, and correlations between examples and between steps at every distance.
    ValueError for another shape or a rate outside (0, 1).
    """
    coins = np.asarray(drawn, dtype=bool)
    q = float(sample_rate)
    if coins.ndim != 2 or not coins.size or not 0 < q < 1:
        raise ValueError(f"drawn {coins.shape}, rate {q}: expected (steps, n) and a rate in (0, 1)")
    total, count = int(coins.sum()), coins.size
    low, high = binom.cdf(total, count, q), binom.sf(total - 1, count, q)
    x = (coins - q) / math.sqrt(q * (1 - q))
    steps, n = coins.shape
    found = {
        "rate": [float(min(1.0, 2 * min(low, high)))],
        "batch sizes": [_variance_p(x.sum(axis=1) ** 2 / n, q, n)],
        "draws per example": [_variance_p(x.sum(axis=0) ** 2 / steps, q, steps)],
        "examples": _lag_p_values(x),
        "steps": _lag_p_values(np.ascontiguousarray(x.T)),
    }
    return _bonferroni(_COINS, found)


def check_keys(
    one: Sequence[Mapping[str, ArrayLike]], other: Sequence[Mapping[str, ArrayLike]]
) -> tuple[Check, ...]:
    """Whether the noise of two runs is independent: no bit is used twice.

    `one`, `other`: residuals of each step by tensor, as for `check_noise`; of all pairs of steps
    the coordinates that both have are correlated. ValueError if they have none in common.
    """
    a, b = _stacked(one), _stacked(other)
    width = min(a.shape[1], b.shape[1])
    if not width:
        raise ValueError("two runs without noise in common: there is nothing to test")
    return _bonferroni(_KEYS, {"two runs": _pair_p_values(a[:, :width], b[:, :width], same=False)})


def _stacked(residuals: Sequence[Mapping[str, ArrayLike]]) -> Array:
    rows = [
        np.concatenate([np.asarray(v, dtype=np.float64).reshape(-1) for v in step.values()])
        for step in residuals
    ]
    return np.stack(rows) if rows else np.zeros((0, 0))


def _chi2_p(total: float, degrees: int) -> float:
    return float(min(1.0, 2 * min(chi2.cdf(total, degrees), chi2.sf(total, degrees))))


def _variance_p(squares: Array, q: float, count: int) -> float:
    """Of squares of standardised sums of `count` coins: their mean is 1, their variance known."""
    kurtosis = (1 - 6 * q * (1 - q)) / (q * (1 - q))
    spread = math.sqrt((2 + kurtosis / count) / squares.size)
    if squares.size < 30:  # skewed, but close to χ²
        return _chi2_p(float(squares.sum()), squares.size)
    return _two_sided((float(squares.mean()) - 1) / spread)


def _lag_p_values(x: Array) -> list[float]:
    """Of the correlations between columns at every distance, all rows together."""
    rows, width = x.shape
    if width < 2:
        return []
    size = next_fast_len(2 * width, real=True)
    power = np.zeros(size // 2 + 1)
    for row in x:
        power += np.abs(rfft(row, size)) ** 2
    lags = np.arange(1, width)
    products = irfft(power, size)[1:width]
    pairs = rows * (width - lags)
    enough = pairs >= 200  # where the normal law holds
    return [_two_sided(z) for z in (products / np.sqrt(pairs))[enough]]


def _pair_p_values(a: Array, b: Array, *, same: bool) -> list[float]:
    """Of the correlations between all pairs of rows of two arrays."""
    if a.shape[1] < 200:
        return []
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN without noise: contradicted
        products = a @ b.T / np.sqrt(np.outer((a**2).sum(axis=1), (b**2).sum(axis=1)))
    z = products * math.sqrt(a.shape[1])
    return [_two_sided(v) for v in (z[np.triu_indices(len(z), 1)] if same else z.reshape(-1))]


def _two_sided(z: float) -> float:
    return float(erfc(abs(z) / math.sqrt(2)))


def _bonferroni(instrument: str, found: Mapping[str, Sequence[float]]) -> tuple[Check, ...]:
    """One check per kind of test: its least p-value, times how many of it there were."""
    kinds = {name: values for name, values in found.items() if len(values)}
    level = LEVEL / max(len(kinds), 1)
    return tuple(
        p_value(instrument, name, float(np.minimum(1.0, np.min(values) * len(values))), level)
        for name, values in kinds.items()
    )
