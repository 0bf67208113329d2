"""PricedRecords: what a journal has recorded, read back and priced.

Nothing here is written. `Journal` is the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.composition import Releases
from epsilons.accounting.holding import Hold
from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons, Kind
from epsilons.journal import charges, norm_records, recorded_epsilons
from epsilons.journal.chain import Chain
from epsilons.journal.filtered import filtered_constants, filtered_histories
from epsilons.journal.norm_records import Constants
from epsilons.journal.opening import Opening
from epsilons.journal.promised import by_share


class PricedRecords:
    """The reading half of a `Journal`: worst case, norms, histories, and one ε per example."""

    plan: Plan
    _chain: Chain
    _opening: Opening

    def worst_case(
        self,
        method: Method = "tight",
        *,
        until: int | None = None,
        delta: float | None = None,
        releases: Releases | None = None,
    ) -> float:
        """ε of an example at the clip bound in every step charged: the DP guarantee of the run.

        `until`: as it will be before step `until`, by default as it is now. Of a whole run it is
        the plan's worst case, unless steps were charged again. `method`, `delta` (by default the
        plan's) and `releases` as for `Plan.worst_case`.
        """
        return recorded_epsilons.worst_case(
            self._chain, self.plan, method, until=until, delta=delta, releases=releases
        )

    @property
    def kind(self) -> Kind:
        """Whether individual ε's are `exact`, a `bound` or an `estimate`, by what was recorded.

        `plan.kind` is what the plan leads to expect.
        """
        return recorded_epsilons.kind(self._chain, self._opening, sampled=True)

    @property
    def refreshes(self) -> tuple[int, ...]:
        """The steps at which the norms of all examples were recorded."""
        return tuple(entry.facts["step"] for entry in self._chain.entries("refresh"))

    def refreshes_now(self) -> tuple[int, ...]:
        """The steps of `refreshes`, without those that a restart went back before."""
        return tuple(entry.facts["step"] for entry in charges.current_refreshes(self._chain))

    @property
    def restarts(self) -> int:
        """How often the run went back to an earlier step."""
        return sum(1 for _ in self._chain.entries("restart"))

    def norms(self, step: int) -> NDArray[np.float64]:
        """The norms (n,) of all examples recorded at `step`, the latest of several, with margin.

        ValueError if none were.
        """
        return norm_records.norms_of_all(self._chain, self._opening, step)

    def histories(
        self,
        chunk: int = 4096,
        *,
        sampled: bool = True,
        only: ArrayLike | None = None,
        hold: Hold = "nearest",
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Blocks (norms (rows, m), steps (rows,) or (rows, m)) of `chunk` examples, in order.

        `steps`: for how many charged steps a row's norms hold. Memory is bounded by the chunk.
        `sampled=False` leaves out norms of sampled examples. `only`: ascending indices of examples
        in the data set; by default all. `hold`: which record a step without one is charged; under
        individual clipping always `"previous"`, as the thresholds were used.
        """
        if self.plan.clipping == "filtered":
            return filtered_histories(self._chain, self._opening, chunk=chunk, only=only)
        return norm_records.histories(
            self._chain, self._opening, chunk=chunk, sampled=sampled, only=only, hold=hold
        )

    def constants(
        self, *, sampled: bool = True, only: ArrayLike | None = None, hold: Hold = "nearest"
    ) -> Constants:
        """Sample rate, noise, clip bound and `beside` (rows,) of the rows of `histories`.

        With the same `sampled`, `only` and `hold`. The noise is `noise_std`, in units of the
        gradient.
        """
        if self.plan.clipping == "filtered":
            return filtered_constants(self._chain, self.plan)
        return norm_records.row_constants(
            self._chain, self.plan, sampled=sampled, only=only, hold=hold
        )

    def shares(self, indices: ArrayLike) -> NDArray[np.float64]:
        """To what share of the clip bound the examples `indices` (k,) are clipped at most; private.

        1 unless promises are kept by Scale. Levels are those of each one's own bound.
        """
        chosen, found = np.asarray(indices, dtype=np.int64), np.ones(len(np.atleast_1d(indices)))
        for where, share in by_share(self._opening.promised, chosen):
            found[where] = share
        return found

    def epsilons(
        self,
        delta: float | None = None,
        method: Method = "tight",
        *,
        sampled: bool = True,
        only: ArrayLike | None = None,
        releases: Releases | None = None,
        hold: Hold = "nearest",
        progress: Callable[[int], None] | None = None,
        processes: int = 1,
    ) -> Epsilons:
        """ε of every example for the steps charged so far, in data set order.

        `delta`: by default the plan's. `method`: the accountant, `"tight"` (the default), `"rdp"`
        or `"rdp-classic"`. `sampled=False` leaves out norms of sampled examples. `only`: ascending
        indices of examples; their values are those among all, to the last bit, and nothing is
        computed for the others: machines may share a data set (`Epsilons.joined`). `releases`:
        everything released beside the training; by default the plan's clip bound and reserve.

        `hold`: which record a step without one of its own is charged: the nearest in time, the
        larger of its two neighbours (`"cautious"`) or the one before it (`"previous"`, the
        paper's). By default `values` are by the nearest, and those of an estimate have a second
        reading, `cautious`. What is no estimate is the same for all.

        `progress` is called with the number of examples done. `processes`: how many price them, by
        default this one alone. More are started afresh and import the caller's script, as always in
        Python (`if __name__ == "__main__":`).
        """
        return recorded_epsilons.epsilons(
            self._chain, self._opening, delta, method, sampled=sampled, only=only,
            releases=releases, hold=hold, progress=progress, processes=processes,
        )  # fmt: skip

    def followed(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices (m,) and norms (charged steps, m) of the followed examples.

        A charged step without their norms has the clip bound. ValueError if none were followed.
        """
        return norm_records.followed(self._chain, self.plan)

    def followed_epsilons(self, delta: float | None = None, method: Method = "tight") -> Epsilons:
        """ε of the followed examples from their norms at every step, in `followed`'s order.

        `delta` and `method` as for `epsilons`. ValueError if none were followed.
        """
        return recorded_epsilons.followed_epsilons(self._chain, self._opening, delta, method)
