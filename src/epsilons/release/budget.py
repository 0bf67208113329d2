"""Budget: what was let out of a run, what it cost, and what is left; one SQLite file.

A question is charged before its answer is drawn, and answered once: whoever asks it again gets the
stored answer at no cost. A process that dies in between leaves it charged and open; the next one
to ask draws the answer. Of several that draw at the same time one answer is stored, and all return
that one, so that a charge never lets out two.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from epsilons.accounting import checks
from epsilons.accounting.composition import (
    Releases,
    gaussian_epsilon,
    gaussian_keeps,
    gaussian_mu,
)
from epsilons.release.mechanisms import DISTANCE
from epsilons.runs import Run

# Costs are whole numbers of μ² · 10¹⁵: sums are exact in any order.
_UNIT = 10**15
_ROOM = 2**20  # more draws than one question has
_PATIENCE = 120.0  # seconds to wait for others; each holds the lock for milliseconds

_SCHEMA = """
CREATE TABLE IF NOT EXISTS budget (
    only INTEGER PRIMARY KEY CHECK (only = 1), epsilon REAL NOT NULL, delta REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS release (
    number INTEGER PRIMARY KEY, asked TEXT NOT NULL, question TEXT NOT NULL UNIQUE,
    epsilon REAL NOT NULL, delta REAL NOT NULL,
    units INTEGER NOT NULL, draws INTEGER NOT NULL, answer TEXT
);
"""

Answer = dict[str, Any]


class OverBudget(ValueError):
    """A question that would cost more than is left."""


@dataclass(frozen=True)
class Limit:
    """What the clip bound and all publications of a run together may cost: (ε, δ)."""

    epsilon: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        checks.positive("the limit's epsilon", self.epsilon)
        checks.open_unit("the limit's delta", self.delta)


@dataclass(frozen=True)
class Cost:
    """The price of a release: promised (ε, δ), kept by noise of total μ in `draws` numbers."""

    epsilon: float
    delta: float
    units: int
    draws: int

    @classmethod
    def of(cls, epsilon: float, delta: float, draws: int) -> Self:
        """The most precise release of at most `draws` noisy numbers that is (ε, δ)-DP.

        >>> round(Cost.of(0.1, 1e-5, draws=1).mu, 5)
        0.03252
        """
        units = int(gaussian_mu(epsilon, delta, draws * DISTANCE) ** 2 * _UNIT)
        if units == 0:
            raise ValueError(f"epsilon={epsilon:g} at delta={delta:g} is too small to be released")
        return cls(epsilon, delta, units, draws)

    @property
    def mu(self) -> float:
        return self.releases.mu

    @property
    def releases(self) -> Releases:
        """What it adds to a composition."""
        return _releases(self.units, self.draws)


@dataclass(frozen=True)
class Entry:
    """One line of the ledger; `answer` is None while it is charged and not yet drawn."""

    number: int
    asked: str
    question: dict[str, Any]
    epsilon: float
    delta: float
    units: int
    draws: int
    answer: Answer | None


@dataclass(frozen=True)
class Spent:
    """What has been let out so far, together: μ, and the distance of its noise from Gaussian."""

    units: int
    draws: int
    questions: int

    @classmethod
    def of_run(cls, run_path: str | os.PathLike[str]) -> Self:
        """What the run has let out; reading it makes no budget where there is none."""
        if not _file(run_path).exists():
            return cls.on([])
        with Budget.of_run(run_path) as budget:
            return cls.on(budget.entries())

    @classmethod
    def on(cls, entries: Sequence[Entry]) -> Self:
        return cls(
            sum(entry.units for entry in entries),
            sum(entry.draws for entry in entries),
            len(entries),
        )

    @property
    def releases(self) -> Releases:
        """What it adds to a composition."""
        return _releases(self.units, self.draws)

    def epsilon(self, delta: float) -> float:
        """ε at δ of everything let out beside the training."""
        return self.releases.epsilon(delta)


def releases_of(run: Run) -> Releases:
    """Everything that the run has let out beside its training: clip bound and publications."""
    return Spent.of_run(run.path).releases.at_least(run.plan.clip_bound)


class Budget:
    """The account of one run, at `path`; made with `limit` where it is not there yet.

    The limit is fixed when the budget is made.
    """

    def __init__(self, path: str | os.PathLike[str], limit: Limit | None = None) -> None:
        self.path = Path(path)
        asked = Limit() if limit is None else limit
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        self._connection = sqlite3.connect(self.path, timeout=_PATIENCE, isolation_level=None)
        self._connection.execute("PRAGMA synchronous = FULL")
        with self.alone() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(
                "INSERT OR IGNORE INTO budget VALUES (1, ?, ?)", (asked.epsilon, asked.delta)
            )
            self.limit = Limit(*connection.execute("SELECT epsilon, delta FROM budget").fetchone())
        if limit is not None and limit != self.limit:
            self.close()
            raise ValueError(
                f"the limit of this run is {_pair(self.limit)} since its budget was made; "
                f"it can't become {_pair(limit)}"
            )

    @classmethod
    def of_run(cls, run_path: str | os.PathLike[str], limit: Limit | None = None) -> Self:
        """The budget of the run folder."""
        return cls(_file(run_path), limit)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(self, question: Mapping[str, Any], cost: Cost, answer: Callable[[], Answer]) -> Answer:
        """The answer to the question: the stored one, or a new one charged first.

        Raises `OverBudget`, and charges nothing, where less than `cost` is left.
        """
        key = json.dumps(question, sort_keys=True, ensure_ascii=False)
        with self.alone() as connection:
            found = connection.execute(
                "SELECT answer FROM release WHERE question = ?", (key,)
            ).fetchone()
            if found is None:
                self._charge(connection, key, cost)
        if found is not None and found[0] is not None:
            return _read(found[0])
        drawn = json.dumps(answer(), ensure_ascii=False, allow_nan=False)
        with self.alone() as connection:
            connection.execute(
                "UPDATE release SET answer = ? WHERE question = ? AND answer IS NULL", (drawn, key)
            )
            (stored,) = connection.execute(
                "SELECT answer FROM release WHERE question = ?", (key,)
            ).fetchone()
        return _read(stored)

    @property
    def spent(self) -> Spent:
        return _spent(self._connection)

    def entries(self) -> list[Entry]:
        """Every question charged so far, in order."""
        rows = self._connection.execute(
            "SELECT number, asked, question, epsilon, delta, units, draws, answer FROM release "
            "ORDER BY number"
        )
        return [
            Entry(
                number, asked, json.loads(key), epsilon, delta, units, draws, text and _read(text)
            )
            for number, asked, key, epsilon, delta, units, draws, text in rows
        ]

    def left(self, delta: float) -> float:
        """The ε at δ that one more question may cost, rounded down to four digits."""
        return self._left(self.spent, delta)

    def _left(self, spent: Spent, delta: float) -> float:
        distance = (spent.draws + _ROOM) * DISTANCE
        most = int(gaussian_mu(self.limit.epsilon, self.limit.delta, distance) ** 2 * _UNIT)
        if most <= spent.units:
            return 0.0
        epsilon = gaussian_epsilon(math.sqrt((most - spent.units) / _UNIT), delta)
        return math.floor(epsilon * 1e4) / 1e4

    def _charge(self, connection: sqlite3.Connection, key: str, cost: Cost) -> None:
        before = _spent(connection)
        after = Spent(before.units + cost.units, before.draws + cost.draws, before.questions + 1)
        total = after.releases
        if not gaussian_keeps(self.limit.epsilon, self.limit.delta, total.mu, total.distance):
            raise OverBudget(
                f"ε = {cost.epsilon:g} at δ = {cost.delta:g} is more than is left of this run's "
                f"{_pair(self.limit)}: ε = {self._left(before, cost.delta):g} at "
                f"δ = {cost.delta:g}. Ask with a smaller ε, or a question answered before."
            )
        asked = datetime.now(UTC).isoformat(timespec="seconds")
        connection.execute(
            "INSERT INTO release (asked, question, epsilon, delta, units, draws) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (asked, key, cost.epsilon, cost.delta, cost.units, cost.draws),
        )

    @contextmanager
    def alone(self) -> Iterator[sqlite3.Connection]:
        """A transaction that no other process writes beside; on disk once the block is left."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")


def _file(run_path: str | os.PathLike[str]) -> Path:
    return Path(run_path) / "private" / "budget.sqlite"


def _spent(connection: sqlite3.Connection) -> Spent:
    totals = connection.execute("SELECT sum(units), sum(draws), count(*) FROM release").fetchone()
    return Spent(*(int(total or 0) for total in totals))


def _releases(units: int, draws: int) -> Releases:
    return Releases(math.sqrt(units / _UNIT), draws * DISTANCE)


def _pair(limit: Limit) -> str:
    return f"(ε, δ) = ({limit.epsilon:g}, {limit.delta:g})"


def _read(text: str) -> Answer:
    answer: Answer = json.loads(text)
    return answer
