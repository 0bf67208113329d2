"""The tight accountant: ε from δ(ε) itself, by a contour integral of the cumulant function.

For a history with total cumulant K and any c > 1, exactly,

    δ_remove(ε) = (1/2πi) ∫_{c−i∞}^{c+i∞} exp(K(t) − ε(t−1)) / (t(t−1)) dt,

and δ_add with K(1−t) in place of K(t). The trapezoid sum of step h,

    δ̂ = (h/2π)·e^{K(c)−ε(c−1)}·[A_0 + 2 Re Σ_{j≥1} A_j e^{−ijhε}],
    A_j = e^{K(t_j)−K(c)}/(t_j(t_j−1)),  t_j = c + ijh,

equals Σ_k δ(ε + 2πk/h)·e^{2π(c−1)k/h} over all integers k, whose terms are all ≥ 0: it can only
be too large. What could make it too small is bounded and added before solving for ε: the nodes
left out (`contours.Contour.tail`), rounding, and the interpolation between levels. So whatever
ε is reported is a proof that δ(ε) ≤ δ; where there is none below it, the RDP ε is reported.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting import checks, threads
from epsilons.accounting.contours import NO_BOUND, contour
from epsilons.accounting.cumulants import LARGEST_S, cumulants
from epsilons.accounting.rdp import DEFAULT_ORDERS, SPACED_ORDERS, rdp_epsilon

Array = NDArray[np.float64]
Direction = Literal["both", "remove", "add"]

# Aliases may raise δ by this much, relatively.
_ALIAS = 1e-8
# The nodes left out may raise δ by this much, and by that much when there are no more to add.
_TAIL, _LAST_TAIL = 1e-8, 1e-6
_LEAST_NODES, _MOST_NODES = 16, 4096
# Between rows more nodes would not help: where K needs them, its interpolation has no bound.
_MOST_NODES_BETWEEN = 256
# Steps of contours are powers of this, so that many histories share a table.
_STEP_BASE = 1.3
# Contours pass through every third of the spaced orders: c − 1 within 11 % of the best.
_CENTRES = SPACED_ORDERS[::3].copy()
_COLUMNS = np.searchsorted(DEFAULT_ORDERS, _CENTRES)
# Relative errors of the solver's polynomial, of K(c), and of sums over levels, per level.
_ROUNDING, _START_ERROR, _SUM_ERROR = 1e-12, 1e-11, 1.2e-16
# Stands for ∞, and what is as good, in a table of prices, where 0 · ∞ would be NaN.
_HUGE = 1e290
# From which relative difference on the bound of interpolation is called loose.
_LOOSE = 1e-5
# Histories × nodes summed at a time (four tables of 32 MiB).
_AT_ONCE = 2**22
# Entries of contour tables kept at a time (256 MiB).
_KEPT = 2**25


def tight_epsilon(
    noise_multiplier: ArrayLike,
    sample_rate: ArrayLike,
    steps: ArrayLike,
    delta: float,
    *,
    direction: Direction = "both",
) -> float:
    """ε at `delta` of a composition of sampled-Gaussian steps; certified, hence never too small.

    `noise_multiplier`: standard deviation of the noise over the norm of the example (σ/z), ≥ 0.
    `sample_rate`: probability of being drawn, in [0, 1]. `steps`: how many such steps, whole
    numbers ≥ 0. Of each one per entry of the composition (k,), or a number for all. `delta`: δ in
    (0, 1). Neighbours differ by removing or adding the example; the larger ε of the two comes back,
    unless one `direction` (`"remove"`, `"add"`) is asked for. ValueError for anything else; so
    steps where the rate belongs are no silent mistake.

    Guarantee: never below the exact ε, never above the RDP ε (Balle et al. 2020). Within 1e-6
    relative of the exact one if the example is drawn about twice or more in all; a run that
    draws it more rarely costs 1e-5 to a few per cent more, or the RDP ε. So does one with a
    noise multiplier below 0.02.

    >>> round(tight_epsilon(3.32622, 4096 / 50_000, 3662, 1e-5), 4)
    7.2389
    """
    noise = checks.non_negative("noise_multiplier", noise_multiplier)
    p = checks.probability("sample_rate", sample_rate)
    times = checks.counts("steps", steps)
    noise, times, p = (a.ravel() for a in np.broadcast_arrays(noise, times, p))
    with np.errstate(divide="ignore", over="ignore"):
        entries, which = np.unique(np.stack([1 / noise, p]), axis=1, return_inverse=True)
    weights = np.zeros((1, entries.shape[1]))
    np.add.at(weights[0], which.reshape(-1), times)
    accountant = TightAccountant(
        entries[0], entries[1], checks.open_unit("delta", delta), direction=direction
    )
    return float(accountant.epsilons(weights)[0])


class _Line:
    """One step's K along a contour in one direction; rows are computed when first asked for."""

    def __init__(
        self, c: float, h: float, nodes: int, s: Array, p: Array, levels: int | None, *, add: bool
    ) -> None:
        self._c, self._h, self._add = c, h, add
        self._s, self._p = s, p
        self._below = _next_below(s, levels)
        self._known = np.zeros(s.size, dtype=np.bool_)
        self.start = np.zeros(s.size)  # K(c), or K(1−c) to add
        self.log_ratio = np.zeros((s.size, nodes))  # log |M(t_j)/M(c)|
        self.phase = np.zeros((s.size, nodes))  # arg M(t_j)
        self.error = np.zeros((s.size, nodes))  # what rounding may have changed
        self.tail = np.zeros(s.size)  # bound of log_ratio beyond the last node
        if levels is not None:  # the same for norms between two rows, and of each interval
            self.gap = np.zeros((s.size, nodes))
            self.tail_between = np.zeros(s.size)
            self._chord = np.zeros((s.size, nodes))
            self._turn = np.zeros((s.size, nodes))
            self._tails = np.zeros((s.size, 2))

    def cover(self, rows: NDArray[np.bool_]) -> None:
        """Computes the `rows` (mask) that are not known yet."""
        if self._below is not None:
            # With both neighbours, so that bounds do not depend on what other histories use.
            inner = ~np.isnan(self._below)
            rows = rows | (np.roll(rows, 1) & inner) | np.roll(rows & inner, -1)
        new = np.flatnonzero(rows & ~self._known)
        if not new.size:
            return
        s, p, nodes = self._s[new], self._p[new], self.phase.shape[1]
        below = None if self._below is None else self._below[new]
        table = contour(self._c, self._h, nodes, s, p, add=self._add, below=below)
        self.start[new] = cumulants(1 - self._c if self._add else self._c, s, p)
        self.log_ratio[new], self.phase[new], self.tail[new] = (
            table.log_ratio,
            table.phase,
            table.tail,
        )
        share = table.error * np.exp(np.minimum(-table.log_ratio, 500.0))
        self.error[new] = np.log1p(share)
        self._known[new] = True
        if table.between is None or self._below is None:
            return
        self._chord[new], self._turn[new] = table.between.gap, table.between.turn
        self._tails[new] = np.stack([table.between.tail_below, table.between.tail], axis=1)
        self._bridge(self._below)

    def _bridge(self, below: Array) -> None:
        """What a step costs at most between two rows that are known, divided between them."""
        upper = np.flatnonzero(self._known & np.roll(self._known, 1) & ~np.isnan(below))
        lower = upper - 1
        chord, turn = self._chord[upper], self._turn[upper]
        # A table follows arg M along its line, so that two may differ by 2π: then no chord of them
        # is near K. Where K can't change by as much between the rows, it shows.
        apart = np.abs(self.phase[upper] - self.phase[lower])
        chord[(turn > 3.0) | (apart > 1.01 * turn + 1e-9)] = NO_BOUND
        self.gap[:] = 0.0
        np.maximum.at(self.gap, upper, chord)
        np.maximum.at(self.gap, lower, chord)
        # K itself must be known, not only M.
        share = np.expm1(self.error)
        self.gap += np.where(share < 0.5, -np.log1p(-np.minimum(share, 0.5)), NO_BOUND)
        self.tail_between[:] = self.tail
        np.maximum.at(self.tail_between, upper, self._tails[upper, 1])
        np.maximum.at(self.tail_between, lower, self._tails[upper, 0])


class TightAccountant:
    """ε's of histories that are weights over the same rows (s, p); keeps the tables it computes.

    `levels`: if norms may lie between rows, how many successive ones each phase has.
    """

    def __init__(
        self,
        s: Array,
        p: Array,
        delta: float,
        *,
        levels: int | None = None,
        direction: Direction = "both",
    ) -> None:
        checks.one_of("direction", direction, ("both", "remove", "add"))
        self._s, self._p, self._delta, self._levels = s, p, delta, levels
        self._adding = {"both": (False, True), "remove": (False,), "add": (True,)}[direction]
        prices = cumulants(DEFAULT_ORDERS, s, p)
        # As good as no noise: a contour would take for ever, and the RDP ε is as tight.
        self._laid_bare = (s > LARGEST_S) & (p > 0)
        self._prices = np.minimum(prices, _HUGE)
        self._lines: dict[tuple[int, int, int], list[_Line]] = {}

    def totals(self, weights: Array) -> Array:
        """(m, orders): K of each history at `DEFAULT_ORDERS`; `weights` (m, rows) in steps."""
        k = _product(weights, self._prices)
        k[k > _HUGE / 1e12] = np.inf
        return k

    def epsilons(self, weights: Array) -> Array:
        """(m,): ε of each history; `weights` (m, rows) are whole numbers of steps at these rows."""
        return self._epsilons(weights, between=False)[:, 1]

    def epsilons_between(self, weights: Array) -> tuple[Array, NDArray[np.bool_]]:
        """(m,): ε of each history, and where its bound is loose; norms are split linearly in s².

        A bound of the error of the interpolation is added to δ. Where there is none, that of RDP is
        reported, which the split never lowers: for orders α ≥ 1 and Y as in `contours`, under the
        weight L^α, by the derivatives there,

            ∂²K/∂q² ≥ α(α−1)·E[Y²(1−Y)(½ + (α−3/2)Y)] ≥ 0.
        """
        without, proved, ceiling = self._epsilons(weights, between=True).T
        return proved, (proved > without * (1 + _LOOSE)) | ((proved == ceiling) & (proved > 0))

    def _epsilons(self, weights: Array, *, between: bool) -> Array:
        """(m, 3): ε of each history without and with the bound of interpolation, and by RDP."""
        k = self.totals(weights)
        ceiling = np.atleast_1d(rdp_epsilon(DEFAULT_ORDERS, k / (DEFAULT_ORDERS - 1), self._delta))
        found = np.stack([ceiling, ceiling, ceiling], axis=1)
        # Total variation ≤ √(e^{K(2)} − 1)/2 (Cauchy–Schwarz): up to δ there is nothing to pay.
        second = int(np.searchsorted(DEFAULT_ORDERS, 2.0))
        free = np.sqrt(np.expm1(np.minimum(k[:, second], 1.0))) / 2 <= self._delta
        found[free] = 0.0
        laid_bare = (weights[:, self._laid_bare] > 0).any(axis=1)
        work = np.flatnonzero(~free & ~laid_bare & np.isfinite(ceiling))
        keys = _contours(
            k[np.ix_(work, _COLUMNS)], ceiling[work], math.log(1 / (_ALIAS * self._delta))
        )
        first = True
        while work.size:
            before = found[work, 1]
            groups, group = np.unique(keys, axis=0, return_inverse=True)
            late = np.zeros(work.size, dtype=np.bool_)
            for g, (order, power, nodes) in enumerate(groups.tolist()):
                members = np.flatnonzero(group.reshape(-1) == g)
                mine = work[members]
                late[members] = self._solve(
                    (order, power, nodes), weights[mine], ceiling, mine, found, between=between
                )
            # Between rows more nodes can also be worse: once they gained nothing, they never did.
            if between and not first:
                late &= found[work, 1] < before * (1 - _LOOSE)
            work, keys, first = work[late], keys[late], False
            keys[:, 2] *= 2
        return found

    def _solve(
        self,
        key: tuple[int, int, int],
        weights: Array,
        ceiling: Array,
        mine: NDArray[np.int64],
        found: Array,
        *,
        between: bool,
    ) -> NDArray[np.bool_]:
        """Writes the ε's of a group to `found`; True for those that need more nodes."""
        c, h = float(_CENTRES[key[0]]), _STEP_BASE ** key[1]
        sides = self._sides(key)
        used = np.asarray((weights > 0).any(axis=0))
        for side in sides:
            side.cover(used)
        ends = [side.tail_between if between else side.tail for side in sides]
        tails = _product(weights, np.stack(ends, axis=1)).T
        # Beyond the last node Σ 2|A_j| ≤ 2e^tail/(h²(J−1)), to compare with A_0 = 1/(c(c−1)).
        unit = math.log(h * h * (key[2] - 1) / (2 * c * (c - 1)))
        short = tails.max(axis=0) > math.log(_TAIL) + unit
        # With no more nodes to add, a fictitious Gaussian release makes the tail vanish. It is
        # one more step of the history, so it can only raise δ.
        excess = tails.max(axis=0) - math.log(_LAST_TAIL) - unit
        extra = 2 * np.maximum(excess, 0.0) / (h * key[2]) ** 2
        last = key[2] >= (_MOST_NODES_BETWEEN if between else _MOST_NODES)
        # Between rows more nodes can also be worse: every number of them is a proof to choose from.
        ready = np.arange(mine.size) if last or between else np.flatnonzero(~short)
        for first in range(0, ready.size, max(1, _AT_ONCE // key[2])):
            go = ready[first : first + max(1, _AT_ONCE // key[2])]
            roots = np.zeros((len(sides), go.size, 2))
            w = weights if go.size == mine.size else weights[go]
            for side, tail, out in zip(sides, tails, roots, strict=True):
                tables = (side.log_ratio, side.phase, side.error)
                sums = tuple(_product(w, table) for table in tables)
                gap = _product(w, side.gap) if between else np.zeros((go.size, 0))
                given = (
                    _product(w, side.start[:, None])[:, 0],
                    ceiling[mine[go]],
                    extra[go],
                    tail[go],
                )
                _in_parts(c, h, math.log(self._delta), self._s.size, given, (*sums, gap), out)
            found[mine[go], :2] = np.minimum(found[mine[go], :2], roots.max(axis=0))
        return np.zeros_like(short) if last else short

    def _sides(self, key: tuple[int, int, int]) -> list[_Line]:
        """The tables of a contour, one for each direction."""
        if key not in self._lines:
            # Both sides have up to six tables of the size of `phase`.
            if 12 * sum(sides[0].phase.size for sides in self._lines.values()) > _KEPT:
                self._lines.clear()
            c, h = float(_CENTRES[key[0]]), _STEP_BASE ** key[1]
            given = (c, h, key[2], self._s, self._p, self._levels)
            self._lines[key] = [_Line(*given, add=add) for add in self._adding]
        return self._lines[key]


def _product(weights: Array, table: Array) -> Array:
    """`weights @ table`, each row summed in the order of the levels, whatever other rows there are.

    BLAS sums a row in an order that depends on how many there are, so that an example's ε would
    depend on the examples that are priced with it. It is slower, too: histories have zeros at many
    levels, which are skipped here.
    """
    out = np.zeros((weights.shape[0], table.shape[1]))

    def part(k: int, n: int) -> None:
        some = slice(k * len(out) // n, (k + 1) * len(out) // n)
        _add_products(weights[some], table, out[some])

    threads.run(part, worthwhile=weights.shape[0] * table.size >= 2**24)
    return out


@njit(cache=True, nogil=True)
def _add_products(weights, table, out):  # type: ignore[no-untyped-def]
    levels = weights.shape[1]
    # Four rows of the table at a time, so that a sum is loaded and stored once for four products.
    row, weight = np.zeros(levels + 4, dtype=np.int64), np.zeros(levels + 4)
    for i in range(weights.shape[0]):
        used = 0
        for level in range(levels):
            if weights[i, level] != 0.0:
                row[used], weight[used] = level, weights[i, level]
                used += 1
        weight[used : used + 4] = 0.0
        total = out[i]
        for k in range(0, used, 4):
            a, b, c, d = table[row[k]], table[row[k + 1]], table[row[k + 2]], table[row[k + 3]]
            wa, wb, wc, wd = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
            for j in range(total.size):
                total[j] = total[j] + wa * a[j] + wb * b[j] + wc * c[j] + wd * d[j]


def _next_below(s: Array, levels: int | None) -> Array | None:
    """(rows,): s of the row before, NaN for the first of each phase; None without levels."""
    if levels is None:
        return None
    below = np.roll(s, 1)
    below[::levels] = np.nan
    return below


def _contours(k: Array, ceiling: Array, alias: float) -> NDArray[np.int64]:
    """(m, 3): for each history the place of its contour, the power of its step, and its nodes.

    `k` (m, contours) holds K at `_CENTRES`. The contour is the one with the least period 2π/h whose
    aliases stay below e^−alias, with ε ≥ half the RDP ε; the nodes are those of a Gaussian with the
    variance K''(c).
    """
    keys = np.zeros((k.shape[0], 3), dtype=np.int64)

    def part(i: int, parts: int) -> None:
        some = slice(i * len(keys) // parts, (i + 1) * len(keys) // parts)
        _choose(k[some], _CENTRES, ceiling[some], alias, keys[some])

    threads.run(part, worthwhile=len(keys) >= 64)
    return keys


@njit(cache=True, nogil=True)
def _choose(k, centres, ceiling, alias, keys):  # type: ignore[no-untyped-def]
    for i in range(k.shape[0]):
        period, best = math.inf, 1
        for a in range(1, centres.size - 1):
            c = centres[a]
            right = math.inf
            for b in range(a + 1, centres.size):
                bound = (k[i, b] - 0.5 * ceiling[i] * (centres[b] - 1) + alias) / (centres[b] - c)
                right = min(right, bound)
            needed = max(alias / (c - 1), right)
            if needed < period:
                period, best = needed, a
        power = math.floor(math.log(2 * math.pi / period) / math.log(_STEP_BASE))
        left, middle, after = centres[best - 1], centres[best], centres[best + 1]
        variance = (
            (k[i, best + 1] - k[i, best]) / (after - middle)
            - (k[i, best] - k[i, best - 1]) / (middle - left)
        ) / ((after - left) / 2)
        reach = math.sqrt(-2 * math.log(_TAIL) / max(variance, 1e-300))
        nodes = min(max(1.1 * reach / _STEP_BASE**power, _LEAST_NODES), _MOST_NODES)
        keys[i, 0] = best
        keys[i, 1] = power
        keys[i, 2] = math.ceil(2 ** (math.ceil(2 * math.log2(nodes)) / 2))


def _in_parts(
    c: float,
    h: float,
    log_delta: float,
    levels: int,
    given: tuple[Array, ...],
    sums: tuple[Array, ...],
    out: Array,
) -> None:
    n = out.shape[0]
    t = c + 1j * h * np.arange(sums[0].shape[1])
    share, angle = 1 / abs(t * (t - 1)), np.angle(t * (t - 1))  # of 1/(t(t−1)), in polar form
    share[1:] *= 2

    def part(i: int, parts: int) -> None:
        some = slice(i * n // parts, (i + 1) * n // parts)
        k, ceiling, extra, tail = (a[some] for a in given)
        log_ratio, phase, error, gap = (a[some] for a in sums)
        _roots(
            c, h, log_delta, levels, share, angle, k, ceiling, extra, tail,
            log_ratio, phase, error, gap, out[some],
        )  # fmt: skip

    threads.run(part, worthwhile=n >= 64)


@njit(cache=True, nogil=True)
def _roots(  # type: ignore[no-untyped-def]
    c, h, log_delta, levels, share, angle,
    k, ceiling, extra, tail, log_ratio, phase, error, gap, out,
):  # fmt: skip
    """The least ε with δ̂ + bounds ≤ δ: without (first) and with (second) interpolation's bound."""
    m, nodes = log_ratio.shape
    real, imaginary = np.empty(nodes), np.empty(nodes)
    for i in range(m):
        slack, between = 0.0, 0.0
        for j in range(nodes):
            omega = j * h
            up = log_ratio[i, j] - omega * omega * extra[i] / 2
            turn = phase[i, j] + omega * (c - 0.5) * extra[i] - angle[j]
            amount = share[j] * math.exp(up)
            real[j], imaginary[j] = amount * math.cos(turn), amount * math.sin(turn)
            doubt = _ROUNDING + _START_ERROR * k[i]
            doubt += _SUM_ERROR * levels * (abs(phase[i, j]) - up)
            slack += share[j] * _spread(up, doubt + error[i, j])
            if gap.shape[1] > 0:
                between += share[j] * _spread(up, doubt + gap[i, j])
        beyond = 2 * math.exp(min(tail[i] - (h * nodes) ** 2 * extra[i] / 2, 700.0))
        beyond /= h * h * (nodes - 1)
        level = k[i] + c * (c - 1) * extra[i] / 2 + math.log(h / (2 * math.pi)) - log_delta
        out[i, 0] = _root(c, h, level, slack + beyond, real, imaginary, ceiling[i])
        out[i, 1] = out[i, 0]
        if gap.shape[1] > 0:
            out[i, 1] = _root(c, h, level, between + beyond, real, imaginary, ceiling[i])


@njit(cache=True, nogil=True)
def _spread(log_size: float, error: float) -> float:
    """How far e^z can be from e^{z'} with |e^{z'}| = e^log_size and |z − z'| ≤ error."""
    if error < 1.0:
        return math.exp(log_size) * math.expm1(error)
    # In one exponent: the size may be 0 in floating point, and what it is off by not.
    return math.exp(min(log_size + error, 700.0))


@njit(cache=True, nogil=True)
def _root(c, h, level, slack, real, imaginary, ceiling):  # type: ignore[no-untyped-def]
    """The least ε in [0, ceiling] with log δ̂ ≤ log δ, from the safe side; ∞ if there is none.

    log δ is concave in ε, so that Newton's steps from the safe side stay there. A δ that would be
    negative, whatever the bounds allow for, refutes them: ∞.
    """
    low, high = 0.0, ceiling
    value, _ = _log_excess(c, h, level, slack, real, imaginary, low)
    if value <= 0:
        return low if value > -math.inf else math.inf
    value, slope = _log_excess(c, h, level, slack, real, imaginary, high)
    if value > 0 or value == -math.inf:
        return math.inf
    at = high
    for _ in range(100):
        after = at - value / slope if slope < 0 else low
        if not low < after < high:
            after = (low + high) / 2
        if high - low <= 1e-11 * high or (value <= 0 and high - after <= 1e-11 * high):
            break
        at = after
        value, slope = _log_excess(c, h, level, slack, real, imaginary, at)
        if value == -math.inf:
            return math.inf
        if value <= 0:
            high = at
        else:
            low = at
    return high


@njit(cache=True, nogil=True)
def _log_excess(c, h, level, slack, real, imaginary, eps):  # type: ignore[no-untyped-def]
    """log of (δ̂(ε) + bounds)/δ, −∞ if negative, and its slope; by Horner's rule in e^{−ihε}."""
    turn = complex(math.cos(h * eps), -math.sin(h * eps))
    total, weighted = 0j, 0j
    for j in range(real.size - 1, 0, -1):
        weighted = weighted * turn + j * complex(real[j], imaginary[j])
        total = total * turn + complex(real[j], imaginary[j])
    known = (total * turn).real + real[0]
    if known + slack < 0:
        return -math.inf, 0.0
    value = max(known, 0.0) + slack
    # d/dε of e^{−ijhε} is −ijh times it
    slope = h * (weighted * turn).imag / value - (c - 1)
    return level - eps * (c - 1) + math.log(value), slope
