"""One ε per example from the norms of a run: the pure function behind every result.

norms → soft histogram (examples × levels) → times the table of cumulants → ε. Whatever the number
of norms, the work on the privacy loss is that of the levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting import checks
from epsilons.accounting.histories import (
    DEFAULT_LEVELS,
    PAPER_LEVELS,
    UNIT,
    Rounding,
    level_norms,
    soft_histogram,
)
from epsilons.accounting.processes import in_processes
from epsilons.accounting.rdp import DEFAULT_ORDERS, rdp_epsilon
from epsilons.accounting.results import Epsilons, Kind
from epsilons.accounting.tight import TightAccountant

Method = Literal["tight", "rdp", "rdp-classic"]
Clipping = Literal["max", "individual", "none"]
METHODS: tuple[Method, ...] = ("tight", "rdp", "rdp-classic")

# Entries of a histogram, or orders, in memory at a time (64 MiB): bounds the memory, whatever n is.
_ENTRIES = 2**23


def individual_epsilons(
    norms: ArrayLike,
    steps: ArrayLike,
    *,
    noise_std: ArrayLike,
    sample_rate: ArrayLike,
    max_grad_norm: ArrayLike,
    delta: float,
    method: Method = "tight",
    levels: int | None = None,
    rounding: Rounding = None,
    clipping: Clipping = "max",
) -> Epsilons:
    """ε of every example, from its gradient norms in the course of a run.

    `norms` (rows, n) of n examples; `steps` (rows,) or (rows, n): how many steps of the training
    each row stands for, drawn or not. `noise_std`: standard deviation of the noise on the sum of
    clipped gradients, in units of the gradient (the noise multiplier times the clip bound).
    `sample_rate`: probability of being drawn, in [0, 1]. `max_grad_norm`: the clip bound. These
    three are numbers, or one per row. Norms above the bound, NaN and ∞ are charged at the bound.
    `delta`: δ in (0, 1). `method`: the accountant, `"tight"` (the default), `"rdp"`, or
    `"rdp-classic"`, the paper's.

    `levels`: how fine the histogram of norms is; by default 256, or 100 for `rounding="nearest"`,
    which is the paper's grid {0.01C, …, C}. `rounding`: see `soft_histogram`.
    With `clipping="individual"` norms are rounded up to levels and at least level 1, which are
    the thresholds that individual clipping used (`clipping_thresholds`).

    `values` are never below the ε of these norms (rounded to nearest: of the rounded ones). On
    levels the tight accountant's own bounds make it so. Between levels its K is interpolated, and
    a bound of that error is part of them; where there is none or it costs much (few steps, little
    noise, few levels), the least of it, of the ε of the norms rounded up to levels and of RDP is
    reported. At the paper's settings `values` is above the exact ε by less than 1e-4 of it.

    `kind`: individual clipping → exact; every row a single step → exact, or bound if rounded up;
    otherwise, and whenever rounded to nearest, estimate. No rows: nothing was released, ε = 0.
    ValueError for shapes that don't fit and values out of range.

    >>> individual_epsilons([[0.2, 1.0]], [100], noise_std=2.0, sample_rate=0.1,
    ...                     max_grad_norm=1.0, delta=1e-5)
    <Epsilons n=2 δ=1e-05 tight estimate>
    """
    table = np.asarray(norms)
    if table.ndim != 2:
        raise ValueError(f"norms of shape {table.shape} must be (rows, n).")
    return epsilons_from_blocks(
        [(table, steps)],
        noise_std=noise_std,
        sample_rate=sample_rate,
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
    noise_std: ArrayLike,
    sample_rate: ArrayLike,
    max_grad_norm: ArrayLike,
    delta: float,
    method: Method = "tight",
    levels: int | None = None,
    rounding: Rounding = None,
    clipping: Clipping = "max",
    worst_case: float | None = None,
    progress: Callable[[int], None] | None = None,
    processes: int = 1,
    beside: ArrayLike = 0.0,
) -> Epsilons:
    """The same as `individual_epsilons`, from successive groups of examples.

    `blocks` yields (norms (rows, m), steps (rows,) or (rows, m)); the examples of the result are
    those of the blocks, in order. Memory is bounded by the largest block. `noise_std`,
    `sample_rate`, `max_grad_norm`, `delta`, `method`, `levels`, `rounding` and `clipping` as there,
    with the same rows in every block. `worst_case`: ε of an example that is at the bound in every
    step, if it is known; else it is computed from the rows. `progress` is called with the number of
    examples done. `processes`: how many price the blocks, by default this one alone; more are
    started afresh and import the caller's script, as always in Python. ε's depend neither on that,
    to the last bit, nor on how the examples are divided into blocks. `beside`: how far everyone
    moves what the steps of a row release beside the gradient, in standard deviations of its noise,
    a number or one per row. ValueError as there.
    """
    checks.open_unit("delta", delta)
    checks.one_of("method", method, METHODS)
    checks.one_of("rounding", rounding, (None, "up", "nearest"))
    checks.one_of("clipping", clipping, ("max", "individual", "none"))
    if clipping == "individual" and rounding == "nearest":
        raise ValueError(
            "individual clipping charges thresholds, which are norms rounded up; "
            "rounding='nearest' would charge less than was used. Use None or 'up'."
        )
    if levels is None:
        levels = PAPER_LEVELS if rounding == "nearest" else DEFAULT_LEVELS
    checks.whole("levels", levels, 1)
    checks.whole("processes", processes, 1)
    phases = _Phases(sample_rate, noise_std, max_grad_norm, beside, levels)
    pricer = _Pricer(phases, delta, method, levels, rounding, clipping)
    found: list[NDArray[np.float64]] = [np.zeros(0)]
    most = np.zeros(phases.count, dtype=np.int64)
    single = True
    done = 0
    for part in in_processes(pricer, blocks, processes):
        found.append(part.values)
        most, single = np.maximum(most, part.most), single and part.single
        done += part.values.size
        if progress is not None:
            progress(done)
    values = np.concatenate(found)
    if clipping == "none":
        return _not_private(values.size, delta, method)
    if worst_case is None:
        top = slice(levels, None, levels + 1)
        at_bound = TightAccountant(phases.s[top], phases.p[top], delta)
        worst_case = float(_priced(at_bound, most[None].astype(np.float64), delta, method)[0])
    return Epsilons(
        values=np.minimum(values, worst_case),
        delta=delta,
        method=method,
        kind=_kind(clipping, rounding, single),
        worst_case=worst_case,
    )


class _Part(NamedTuple):
    """One block, priced."""

    values: NDArray[np.float64]  # (m,)
    most: NDArray[np.int64]  # (phases,): the most steps that any example spent in each phase
    single: bool  # whether every row of norms stands for a single step


class _Pricer:
    """Prices one block of examples after the other; an example's ε depends on its own block alone.

    Arguments as for `epsilons_from_blocks`, checked there.
    """

    def __init__(
        self,
        phases: _Phases,
        delta: float,
        method: Method,
        levels: int,
        rounding: Rounding,
        clipping: Clipping,
    ) -> None:
        self._phases, self._delta, self._method, self._levels = phases, delta, method, levels
        self._rounding: Rounding = "up" if clipping == "individual" else rounding
        self._least_level = 1 if clipping == "individual" else 0

    @cached_property
    def _accountant(self) -> TightAccountant:
        between = self._levels + 1 if self._rounding is None else None
        return TightAccountant(self._phases.s, self._phases.p, self._delta, levels=between)

    def __call__(self, block: tuple[ArrayLike, ArrayLike]) -> _Part:
        """The block (norms (rows, m), steps (rows,) or (rows, m)), priced."""
        z, times = np.asarray(block[0]), checks.counts("steps", block[1])
        if z.ndim != 2 or times.shape not in (z.shape[:1], z.shape):
            raise ValueError(
                f"norms {z.shape} and steps {times.shape} of a block do not fit; "
                "expected (rows, m), and (rows,) or (rows, m)."
            )
        phases = self._phases
        of_row = phases.of_rows(z.shape[0])
        histories = partial(
            _histories,
            bound=phases.max_grad_norm[of_row],
            levels=self._levels,
            least_level=self._least_level,
            phase=of_row,
            phases=phases.count,
        )
        chunk = max(1, _ENTRIES // max(phases.s.size, DEFAULT_ORDERS.size))
        values = np.empty(z.shape[1])
        for first in range(0, z.shape[1], chunk):
            some = slice(first, first + chunk)
            own = z[:, some], times if times.ndim == 1 else times[:, some]
            values[some] = self._values(histories, *own)
        return _Part(
            values, _steps_by_phase(times, of_row, phases.count), int(times.max(initial=0)) <= 1
        )

    def _values(
        self,
        histories: Callable[..., NDArray[np.float64]],
        norms: NDArray[Any],
        steps: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        weights = histories(norms, steps, rounding=self._rounding)
        if self._method != "tight" or self._rounding is not None:
            return _priced(self._accountant, weights, self._delta, self._method)
        values, loose = self._accountant.epsilons_between(weights)
        if loose.any():
            up = histories(*(_columns(a, loose) for a in (norms, steps)), rounding="up")
            values[loose] = np.minimum(values[loose], self._accountant.epsilons(up))
        return values


class _Phases:
    """The distinct constants of a run, (p, σ, C, beside), and (s, p) of their levels.

    And which of them each row has.
    """

    def __init__(
        self,
        sample_rate: ArrayLike,
        noise_std: ArrayLike,
        max_grad_norm: ArrayLike,
        beside: ArrayLike,
        levels: int,
    ) -> None:
        facts = (
            checks.probability("sample_rate", sample_rate),
            checks.non_negative("noise_std", noise_std),
            checks.clip_bound("max_grad_norm", max_grad_norm),
            checks.non_negative("beside", beside),
        )
        if any(fact.ndim > 1 for fact in facts):
            raise ValueError(
                "sample_rate, noise_std, max_grad_norm and beside must be numbers or one per row; "
                f"got the shapes {[fact.shape for fact in facts]}."
            )
        self._per_row = any(fact.ndim == 1 for fact in facts)
        together = np.stack([np.atleast_1d(fact) for fact in np.broadcast_arrays(*facts)])
        distinct, of_row = np.unique(together, axis=1, return_inverse=True)
        self._of_row = of_row.reshape(-1)
        self.count = distinct.shape[1]
        self.max_grad_norm = distinct[2]
        norms = np.stack([level_norms(bound, levels) for bound in distinct[2]])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            # A zero norm reveals nothing, even without noise.
            s = np.where(norms == 0, 0.0, norms / distinct[1][:, None])
        s = np.hypot(s, distinct[3][:, None])
        self.s = s.ravel()
        self.p = np.repeat(distinct[0], levels + 1)

    def of_rows(self, rows: int) -> NDArray[np.int64]:
        """(rows,): the phase of each row of norms."""
        if not self._per_row:
            return np.zeros(rows, dtype=np.int64)
        if self._of_row.size != rows:
            raise ValueError(
                f"sample_rate, noise_std or max_grad_norm has {self._of_row.size} entries for "
                f"{rows} rows of norms; expected a number or one per row."
            )
        return self._of_row


def _steps_by_phase(
    steps: NDArray[np.int64], of_row: NDArray[np.int64], phases: int
) -> NDArray[np.int64]:
    """(phases,): the most steps that any example spent in each phase."""
    table = steps if steps.ndim == 2 else steps[:, None]
    return np.array(
        [int(table[of_row == k].sum(axis=0).max(initial=0)) for k in range(phases)], dtype=np.int64
    )


def _histories(
    norms: NDArray[Any],
    steps: NDArray[np.int64],
    *,
    bound: NDArray[np.float64],
    rounding: Rounding,
    levels: int,
    least_level: int,
    phase: NDArray[np.int64],
    phases: int,
) -> NDArray[np.float64]:
    """(m, phases × levels): for each example its steps at each level."""
    weights = soft_histogram(
        norms, steps, bound, levels=levels, rounding=rounding, least_level=least_level,
        phase=phase, phases=phases,
    )  # fmt: skip
    return weights.reshape(weights.shape[0], -1) / UNIT


def _columns(table: NDArray[Any], chosen: NDArray[np.bool_]) -> NDArray[Any]:
    """The examples' own columns; what has one axis is the same for all of them."""
    return table if table.ndim == 1 else table[:, chosen]


def _priced(
    accountant: TightAccountant, histories: NDArray[np.float64], delta: float, method: Method
) -> NDArray[np.float64]:
    """(m,): ε of each history, on levels or by RDP, which a split between levels never lowers."""
    if method == "tight":
        return accountant.epsilons(histories)
    rho = accountant.totals(histories) / (DEFAULT_ORDERS - 1)
    return rdp_epsilon(DEFAULT_ORDERS, rho, delta, method)


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
