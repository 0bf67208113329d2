"""The statement of every owner of a run, for a service that hands them out.

All records are priced at once, which takes little longer than pricing a few; only owners of several
records need more, since each of theirs has a δ of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from epsilons.accounting.composition import NOTHING, Releases
from epsilons.accounting.results import Epsilons
from epsilons.release.owner import Statement, common_facts, stated
from epsilons.release.total import CombinedRuns
from epsilons.runs import Run


def owner_names(run: Run) -> NDArray[np.str_]:
    """Who can ask for a statement of `run`, sorted: its owners; without any, the ids of records."""
    return np.unique(_names(run))


def owner_statements(run: Run, *, delta: float | None = None) -> Iterator[Statement]:
    """What `owner_statement` says to every owner of `run`, one after the other, sorted by name.

    `delta`: the plan's unless given. Open `run` by `Run.checked`. The figures are bounds like
    those of `owner_statement`, and within 1e-5 of them relative to each other.
    """
    at = run.plan.delta if delta is None else float(delta)
    priced = _PricedAtOnce(run, at)
    facts = common_facts(priced, at)
    names = _names(run)
    order = np.argsort(names, kind="stable")
    owners, first = np.unique(names[order], return_index=True)
    for owner, rows in zip(owners.tolist(), np.split(order, first[1:]), strict=True):
        yield stated(priced, priced, facts, owner, rows, [[int(row)] for row in rows], 0)


class _PricedAtOnce(CombinedRuns):
    """A run whose records are all priced at one δ; at other δ's they are priced when asked for."""

    def __init__(self, run: Run, delta: float, releases: Releases | None = None) -> None:
        super().__init__([run], releases=releases)
        self._worst: dict[tuple[float, Releases], float] = {}
        self._delta = delta
        self._all = super().epsilons([np.arange(run.plan.n)], delta)

    @cached_property
    def training(self) -> CombinedRuns:
        if self.releases == NOTHING:
            return self
        return _PricedAtOnce(self.runs[0], self._delta, NOTHING)

    def worst_case(self, delta: float, *, releases: Releases | None = None) -> float:
        key = delta, self.releases if releases is None else releases
        if key not in self._worst:
            self._worst[key] = super().worst_case(delta, releases=releases)
        return self._worst[key]

    def epsilons(self, positions: Sequence[NDArray[np.int64]], delta: float) -> Epsilons:
        if delta != self._delta:
            return super().epsilons(positions, delta)
        values = self._all.values[np.asarray(positions[0])]
        return replace(self._all, values=values, cautious=None)  # type: ignore[arg-type]


def _names(run: Run) -> NDArray[np.str_]:
    examples = run.examples
    names = examples.ids if examples.owners is None else examples.owners
    return np.asarray(names).astype(str)
