"""The two ways in which numbers leave: noisy sums and noisy ranks. All noise is drawn here.

Neighbours differ by one record, added or removed; n is a public constant. So a count may be
centred: #(x ≤ t) = n/2 + Σᵢ(±½), and one record moves it by ½ instead of 1.

Values go onto an integer grid and get discrete Gaussian noise from OpenDP, whose sampler is exact:
no floating-point number leaks. The grid is so fine that the noise is a rounded continuous Gaussian
up to `DISTANCE` in total variation per number, hence μ-GDP at that price.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Standard deviation of the noise, in steps of the grid.
NOISE = 2.0**36
# Discrete and rounded Gaussian differ by the midpoint rule's error, relatively
# |z² − 1|/24σ² + O(σ⁻⁴); half its mean is 0.0202/σ².
DISTANCE = 1 / (12 * NOISE**2)
_LARGEST = 2.0**62


@dataclass(frozen=True)
class Noisy:
    """Released numbers and the standard deviation of each one's noise."""

    values: NDArray[np.float64]
    std: float


@dataclass(frozen=True)
class Size:
    """How many values there are: public (std 0), or released with noise."""

    value: float
    std: float = 0.0


def noisy_sum(values: NDArray[np.float64], upper: float, mu: float) -> Noisy:
    """Σᵢ(xᵢ − U/2) of values in [0, U], with noise of standard deviation U/2μ. One number.

    Guarantee: μ-GDP for one record added or removed, up to `DISTANCE`.
    """
    unit = _units(mu, len(values))
    share = np.clip(np.nan_to_num(values, nan=upper) / upper, 0.0, 1.0)
    moved = np.rint((2 * share - 1) * unit).astype(np.int64)
    released = _with_noise(np.array([moved.sum()]))
    return Noisy(released / unit * upper / 2, NOISE / unit * upper / 2)


def noisy_size(members: NDArray[np.bool_], mu: float) -> Size:
    """The number of members, with noise of standard deviation 1/μ; μ-GDP. One number."""
    unit = _units(mu, len(members))
    released = _with_noise(np.array([int(members.sum()) * unit]))
    return Size(float(released[0]) / unit, NOISE / unit)


def noisy_ranks(
    values: NDArray[np.float64], thresholds: NDArray[np.float64], n: float, mu: float
) -> Noisy:
    """How many values lie at or below each of k ascending thresholds, given that there are n.

    The k centred counts of one record are a row of ±½ that changes sign once: a negacyclic
    matrix M. Noise goes onto |M|^½, and M|M|^{−½} brings it back: of all Gaussian mechanisms that
    treat the thresholds alike, this factorisation has the least noise. Each count has the standard
    deviation γ_k/μ,

        γ_k = (1/k) Σ_j 1/(2 sin(π(2j+1)/2k))          (½, 0.99, 2.9 for k = 1, 5, 2048)

    Guarantee: μ-GDP for one record added or removed, up to k · `DISTANCE`, for thresholds that
    depend on anything released before.
    """
    k = len(thresholds)
    root, back = _factors(k)
    unit = _units(mu, len(values)) / float(np.linalg.norm(root)) * (1 - 1e-12)
    column = np.trunc(root * unit).astype(np.int64)
    cells = np.bincount(np.searchsorted(thresholds, values, side="left"), minlength=k + 1)
    signed = cells[:k].astype(np.int64)
    signed[0] -= cells[k]  # above all thresholds: the negative of below all
    released = _with_noise(_negacyclic_product(column, signed)) / unit
    counts = _negacyclic(released, back)
    return Noisy(n / 2 + counts, rank_noise(k, mu))


def rank_noise(k: int, mu: float) -> float:
    """γ_k/μ: the standard deviation of each of k noisy ranks."""
    return float(np.abs(_spectrum(k)).mean()) / mu


def _spectrum(k: int) -> NDArray[np.complex128]:
    """Eigenvalues of the k × k matrix with +½ on and below the diagonal and −½ above."""
    result: NDArray[np.complex128] = 1 / (1 - np.exp(-1j * np.pi * (2 * np.arange(k) + 1) / k))
    return result


@cache
def _factors(k: int) -> tuple[NDArray[np.float64], NDArray[np.complex128]]:
    """First column of |M|^½, and the eigenvalues of M|M|^{−½}."""
    spectrum = _spectrum(k)
    root = np.sqrt(np.abs(spectrum))
    return _negacyclic(np.eye(1, k)[0], root), spectrum / root


def _negacyclic(
    vector: NDArray[np.float64], spectrum: NDArray[np.complex128] | NDArray[np.float64]
) -> NDArray[np.float64]:
    """The vector times the negacyclic matrix that has these eigenvalues."""
    twist = np.exp(-1j * np.pi * np.arange(len(vector)) / len(vector))
    result: NDArray[np.float64] = (np.fft.ifft(np.fft.fft(vector * twist) * spectrum) / twist).real
    return result


def _negacyclic_product(column: NDArray[np.int64], vector: NDArray[np.int64]) -> NDArray[np.int64]:
    """The same for whole numbers, exactly, from the matrix's first column."""
    k = len(column)
    diagonals = np.r_[-column[1:], column]
    rows = np.lib.stride_tricks.sliding_window_view(diagonals, k)
    result: NDArray[np.int64] = rows @ vector[::-1]
    return result


def _units(mu: float, n: int) -> int:
    """By how many steps of the grid one record may move a release of cost μ."""
    if not mu > 0:
        raise ValueError(f"mu={mu} must be > 0")
    if n * mu * NOISE >= _LARGEST:
        raise ValueError(f"{n} records at mu={mu:g} exceed 64-bit sums; use a smaller epsilon")
    unit = int(mu * NOISE * (1 - 1e-12))  # less by more than any rounding error
    if unit < 2**10:
        raise ValueError(f"mu={mu:g} is too small to be released; use a larger epsilon")
    return unit


def _with_noise(exact: NDArray[np.int64]) -> NDArray[np.float64]:
    """The whole numbers with discrete Gaussian noise of standard deviation `NOISE`."""
    return np.array(_sampler()(exact.tolist()), dtype=np.float64)


@cache
def _sampler() -> Any:
    try:
        import opendp.prelude as dp
    except ImportError as missing:
        raise ImportError("publishing needs OpenDP: pip install 'epsilons[publish]'") from missing
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=dp.i64)), dp.l2_distance(T=dp.i64)
    return dp.m.make_gaussian(*space, scale=NOISE)
