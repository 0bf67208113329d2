"""One ε per example from the norms of a run: the pure function behind every result.

norms → soft histogram (examples × levels) → times the table of cumulants → ε. Whatever the number
of norms, the work on the privacy loss is that of the levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting import checks
from epsilons.accounting.cumulants import cumulants
from epsilons.accounting.histories import (
    DEFAULT_LEVELS,
    PAPER_LEVELS,
    UNIT,
    Rounding,
    level_norms,
    soft_histogram,
)
from epsilons.accounting.rdp import DEFAULT_ORDERS, rdp_epsilon
from epsilons.accounting.results import Epsilons, Kind

Method = Literal["rdp", "rdp-classic"]
Clipping = Literal["max", "individual", "none"]
METHODS: tuple[Method, ...] = ("rdp", "rdp-classic")

# Entries of a histogram held at a time (64 MiB): bounds the memory, whatever n is.
_ENTRIES = 2**23
# Stands for ∞ in a table of prices, where 0 · ∞ would be NaN.
_HUGE = 1e290


def individual_epsilons(
    norms: ArrayLike,
    steps: ArrayLike,
    *,
    sample_rate: ArrayLike,
    noise_std: ArrayLike,
    max_grad_norm: ArrayLike,
    delta: float,
    method: Method = "rdp",
    levels: int | None = None,
    rounding: Rounding = None,
    clipping: Clipping = "max",
) -> Epsilons:
    """ε of every example, from its gradient norms in the course of a run.

    `norms` (rows, n), `steps` (rows,) or (rows, n): how many steps each row stands for.
    `sample_rate`, `noise_std` (absolute, not a multiplier) and `max_grad_norm`: numbers, or one
    per row. Norms above the bound, NaN and ∞ are charged at the bound.

    `levels`: how fine the histogram of norms is; by default 256, or 100 for `rounding="nearest"`,
    which is the paper's grid {0.01C, …, C}. `rounding`: see `soft_histogram`.
    With `clipping="individual"` norms are rounded up to levels and at least level 1, which are
    the thresholds that individual clipping used (`clipping_thresholds`).

    `kind`: individual clipping → exact; every row a single step → exact, or bound if rounded up;
    otherwise, and whenever rounded to nearest, estimate. No rows: nothing was released, ε = 0.

    >>> individual_epsilons([[0.2, 1.0]], [100], sample_rate=0.1, noise_std=2.0,
    ...                     max_grad_norm=1.0, delta=1e-5)
    <Epsilons n=2 δ=1e-05 rdp estimate>
    """
    table = np.asarray(norms)
    if table.ndim != 2:
        raise ValueError(f"norms of shape {table.shape} must be (rows, n).")
    return epsilons_from_blocks(
        [(table, steps)],
        sample_rate=sample_rate,
        noise_std=noise_std,
        max_grad_norm=max_grad_norm,
        delta=delta,
        method=method,
        levels=levels,
        rounding=rounding,
        clipping=clipping,
    )


def epsilons_from_blocks(
    blocks: Iterable[tuple[ArrayLike, ArrayLike]],
    *,
    sample_rate: ArrayLike,
    noise_std: ArrayLike,
    max_grad_norm: ArrayLike,
    delta: float,
    method: Method = "rdp",
    levels: int | None = None,
    rounding: Rounding = None,
    clipping: Clipping = "max",
    worst_case: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> Epsilons:
    """The same as `individual_epsilons`, from successive groups of examples.

    `blocks` yields (norms (rows, m), steps (rows,) or (rows, m)); the examples of the result are
    those of the blocks, in order. Memory is bounded by the largest block. `worst_case`: ε of an
    example that is at the bound in every step, if it is known; else it is computed from the rows.
    `progress` is called with the number of examples done.
    """
    checks.open_unit("delta", delta)
    checks.one_of("method", method, METHODS)
    checks.one_of("clipping", clipping, ("max", "individual", "none"))
    if clipping == "individual" and rounding == "nearest":
        raise ValueError(
            "individual clipping charges thresholds, which are norms rounded up; "
            "rounding='nearest' would charge less than was used. Use None or 'up'."
        )
    if levels is None:
        levels = PAPER_LEVELS if rounding == "nearest" else DEFAULT_LEVELS
    checks.whole("levels", levels, 1)
    rounded: Rounding = "up" if clipping == "individual" else rounding
    market = _Market(sample_rate, noise_std, max_grad_norm, levels)
    values: list[NDArray[np.float64]] = []
    most: NDArray[np.int64] | None = None
    single = True
    done = 0
    for norms, steps in blocks:
        z, times = np.asarray(norms), checks.counts("steps", steps)
        if z.ndim != 2 or times.ndim not in (1, 2) or times.shape[0] != z.shape[0]:
            raise ValueError(
                f"norms {z.shape} and steps {times.shape} of a block do not fit; "
                "expected (rows, m), and (rows,) or (rows, m)."
            )
        single = single and (times.size == 0 or int(times.max()) <= 1)
        phases = market.phases(z.shape[0])
        paid = _steps_by_phase(times, phases.of_row, len(phases.sample_rate))
        most = paid if most is None else np.maximum(most, paid)
        prices = market.prices(phases)
        m = z.shape[1]
        chunk = max(1, _ENTRIES // prices.shape[0])
        for first in range(0, m, chunk):
            some = slice(first, first + chunk)
            weights = soft_histogram(
                z[:, some],
                times if times.ndim == 1 else times[:, some],
                phases.max_grad_norm[phases.of_row],
                levels=levels,
                rounding=rounded,
                least_level=1 if clipping == "individual" else 0,
                phase=phases.of_row,
                phases=len(phases.sample_rate),
            )
            histories = weights.reshape(weights.shape[0], -1) / UNIT
            values.append(_rdp_values(histories, prices, delta, method))
            done += histories.shape[0]
            if progress is not None:
                progress(done)
    result = np.concatenate(values) if values else np.zeros(0)
    if clipping == "none":
        return _not_private(result.size, delta, method)
    if worst_case is None:
        worst_case = 0.0 if most is None else market.worst_case(most, delta, method)
    return Epsilons(
        values=np.minimum(result, worst_case),
        delta=delta,
        method=method,
        kind=_kind(clipping, rounding, single),
        worst_case=worst_case,
    )


@dataclass(frozen=True)
class _Phases:
    """The distinct (p, σ, C) of a run, and which of them each row has."""

    sample_rate: NDArray[np.float64]
    noise_std: NDArray[np.float64]
    max_grad_norm: NDArray[np.float64]
    of_row: NDArray[np.int64]


class _Market:
    """Prices of the levels in every phase; computed once, since all blocks share the rows."""

    def __init__(
        self, sample_rate: ArrayLike, noise_std: ArrayLike, max_grad_norm: ArrayLike, levels: int
    ) -> None:
        p = checks.probability("sample_rate", sample_rate)
        sigma = checks.non_negative("noise_std", noise_std)
        bound = checks.positive("max_grad_norm", max_grad_norm)
        for name, array in (("sample_rate", p), ("noise_std", sigma), ("max_grad_norm", bound)):
            if array.ndim > 1:
                raise ValueError(f"{name} of shape {array.shape} must be a number or one per row.")
        facts = np.stack([np.atleast_1d(a) for a in np.broadcast_arrays(p, sigma, bound)])
        self._per_row = max(p.ndim, sigma.ndim, bound.ndim) == 1
        self._facts, self._of_row = np.unique(facts, axis=1, return_inverse=True)
        self._of_row = self._of_row.reshape(-1)
        self._levels = levels
        self._prices: NDArray[np.float64] | None = None

    def phases(self, rows: int) -> _Phases:
        if self._per_row and self._of_row.size != rows:
            raise ValueError(
                f"sample_rate, noise_std or max_grad_norm has {self._of_row.size} entries for "
                f"{rows} rows of norms; expected a number or one per row."
            )
        of_row = self._of_row if self._per_row else np.zeros(rows, dtype=np.int64)
        return _Phases(self._facts[0], self._facts[1], self._facts[2], of_row)

    def prices(self, phases: _Phases) -> NDArray[np.float64]:
        """(phases · (levels + 1), orders): K(α) of one step at each level."""
        if self._prices is None:
            every = zip(phases.sample_rate, phases.noise_std, phases.max_grad_norm, strict=True)
            tables = [
                cumulants(DEFAULT_ORDERS, _ratio(level_norms(c, self._levels), sigma), p)
                for p, sigma, c in every
            ]
            self._prices = np.where(np.isinf(joined := np.concatenate(tables)), _HUGE, joined)
        return self._prices

    def worst_case(self, paid: NDArray[np.int64], delta: float, method: Method) -> float:
        """ε of an example that is at the bound for `paid` (phases,) steps of each phase."""
        if self._prices is None:
            return 0.0
        history = np.zeros((paid.size, self._levels + 1))
        history[:, -1] = paid
        return float(_rdp_values(history.reshape(1, -1), self._prices, delta, method)[0])


def _ratio(norms: NDArray[np.float64], sigma: float) -> NDArray[np.float64]:
    """s = z/σ, where a zero norm reveals nothing even without noise."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(norms == 0, 0.0, norms / sigma)


def _steps_by_phase(
    steps: NDArray[np.int64], of_row: NDArray[np.int64], phases: int
) -> NDArray[np.int64]:
    """(phases,): the most steps that any example spent in each phase."""
    table = steps if steps.ndim == 2 else steps[:, None]
    return np.array(
        [int(table[of_row == k].sum(axis=0).max(initial=0)) for k in range(phases)], dtype=np.int64
    )


def _rdp_values(
    histories: NDArray[np.float64], prices: NDArray[np.float64], delta: float, method: Method
) -> NDArray[np.float64]:
    """ε of each history (m, entries) at prices (entries, orders)."""
    k = histories @ prices
    k[k > _HUGE / 1e12] = np.inf
    return rdp_epsilon(DEFAULT_ORDERS, k / (DEFAULT_ORDERS - 1), delta, method)


def _kind(clipping: Clipping, rounding: Rounding, single: bool) -> Kind:
    if clipping == "individual":
        return "exact"
    if rounding == "nearest" or not single:
        return "estimate"
    return "bound" if rounding == "up" else "exact"


def _not_private(n: int, delta: float, method: Method) -> Epsilons:
    """Without clipping no noise hides a gradient: ∞ for everyone."""
    return Epsilons(
        values=np.full(n, np.inf), delta=delta, method=method, kind="none", worst_case=np.inf
    )
