"""Journal: the facts of a run that privacy is priced from, one SQLite file, append-only.

It records norms and charges steps; what they cost is computed afterwards by `accounting`, so that
another δ, another method or another conversion needs no retraining.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.individual import Method, epsilons_from_blocks
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons

_SCHEMA = """
CREATE TABLE run (plan TEXT NOT NULL, ids BLOB NOT NULL, id_type TEXT NOT NULL);
CREATE TABLE refresh (
    number INTEGER PRIMARY KEY, step INTEGER NOT NULL UNIQUE, norms BLOB NOT NULL
);
CREATE TABLE charge (
    number INTEGER PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL
);
"""


class Journal:
    """The append-only record of one run.

    Algorithm 2 in facts: `record` says which norms hold from a step on, `charge` says which steps
    were taken. Steps charged before the first record are priced at the clip bound.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        plan, ids, id_type = connection.execute("SELECT plan, ids, id_type FROM run").fetchone()
        self.plan = Plan.from_dict(json.loads(plan))
        self.ids: NDArray[Any] = np.frombuffer(ids, dtype=np.dtype(id_type))

    @classmethod
    def create(cls, path: str | os.PathLike[str], plan: Plan, ids: ArrayLike | None = None) -> Self:
        """A new journal, mode 0600. `ids` (n,) name the examples in data set order."""
        path = Path(path)
        names = np.arange(plan.n) if ids is None else np.asarray(ids)
        if names.shape != (plan.n,) or names.dtype == object:
            raise ValueError(
                f"ids have shape {names.shape} and type {names.dtype}; "
                f"expected {plan.n} numbers or strings, one per example of the plan"
            )
        if path.exists():
            raise ValueError(f"{path} exists already; a journal is never overwritten")
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection = _connect(path)
        with connection:
            connection.executescript(_SCHEMA)
            connection.execute(
                "INSERT INTO run VALUES (?, ?, ?)",
                (json.dumps(plan.to_dict()), names.tobytes(), names.dtype.str),
            )
        return cls(connection, path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """The journal at `path`, for reading or for going on."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} is not there; expected the journal of a run")
        try:
            return cls(_connect(path), path)
        except (sqlite3.DatabaseError, TypeError) as error:
            raise ValueError(f"{path} is not a journal: {error}") from error

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def record(self, step: int, norms: ArrayLike) -> None:
        """The gradient norms (n,) of all examples, which hold from `step` until the next record.

        A norm that is not a number stands: it is priced at the clip bound.
        """
        row = np.ascontiguousarray(norms, dtype="<f8")
        if row.shape != (self.plan.n,):
            raise ValueError(f"norms have shape {row.shape}; expected ({self.plan.n},)")
        if (row < 0).any():
            raise ValueError("a norm is negative; expected norms ≥ 0")
        last = self._last_refresh()
        if step < 0 or (last is not None and step <= last):
            raise ValueError(f"step {step} does not follow the last record, of step {last}")
        if step < self.steps_charged:
            raise ValueError(f"step {step} is charged already; norms are recorded before the step")
        with self._connection:
            self._connection.execute(
                "INSERT INTO refresh (step, norms) VALUES (?, ?)", (step, row.tobytes())
            )

    def charge(self, first: int, last: int | None = None) -> None:
        """Steps `first` to `last`, both included: every example pays for each of them."""
        last = first if last is None else last
        if first != self.steps_charged or last < first:
            raise ValueError(
                f"steps {first} to {last} don't follow the {self.steps_charged} charged so far"
            )
        if last >= self.plan.steps:
            raise ValueError(f"step {last} is beyond the plan's {self.plan.steps} steps")
        with self._connection:
            self._connection.execute(
                "INSERT INTO charge (first, last) VALUES (?, ?)", (first, last)
            )

    @property
    def steps_charged(self) -> int:
        (last,) = self._connection.execute("SELECT max(last) FROM charge").fetchone()
        return 0 if last is None else int(last) + 1

    @property
    def refreshes(self) -> tuple[int, ...]:
        """The steps at which norms were recorded."""
        rows = self._connection.execute("SELECT step FROM refresh ORDER BY number")
        return tuple(step for (step,) in rows)

    def norms(self, step: int) -> NDArray[np.float64]:
        """The norms (n,) recorded at `step`."""
        found = self._connection.execute(
            "SELECT norms FROM refresh WHERE step = ?", (step,)
        ).fetchone()
        if found is None:
            raise ValueError(f"no norms were recorded at step {step}")
        return np.frombuffer(found[0], dtype="<f8")

    def histories(
        self, chunk: int = 4096
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Blocks (norms (rows, m), steps (rows,)) of `chunk` examples at a time, in order.

        A row's norms hold for its number of steps. Memory is bounded by the chunk: each row is
        read in slices.
        """
        numbers, starts = self._rows()
        steps = np.diff([*starts, self.steps_charged])
        for first in range(0, self.plan.n, chunk):
            m = min(chunk, self.plan.n - first)
            block = np.empty((len(numbers), m))
            for row, number in enumerate(numbers):
                block[row] = self._slice(number, first, m)
            yield block, steps

    def epsilons(self, delta: float | None = None, method: Method = "rdp") -> Epsilons:
        """ε of every example for the steps charged so far, in data set order."""
        plan = self.plan
        return epsilons_from_blocks(
            self.histories(),
            sample_rate=plan.sample_rate,
            noise_std=plan.noise_std,
            max_grad_norm=plan.max_grad_norm,
            delta=plan.delta if delta is None else delta,
            method=method,
            levels=plan.levels,
            rounding=plan.rounding,
            clipping=plan.clipping,
        )

    def _last_refresh(self) -> int | None:
        (step,) = self._connection.execute("SELECT max(step) FROM refresh").fetchone()
        return None if step is None else int(step)

    def _rows(self) -> tuple[list[int | None], list[int]]:
        """Numbers and first steps of the rows; number None is the row at the clip bound."""
        charged = self.steps_charged
        rows = self._connection.execute("SELECT number, step FROM refresh ORDER BY number")
        found: list[tuple[int | None, int]] = [row for row in rows if row[1] < charged]
        if not found or found[0][1] > 0:
            found.insert(0, (None, 0))
        return [number for number, _ in found], [step for _, step in found]

    def _slice(self, number: int | None, first: int, m: int) -> NDArray[np.float64]:
        if number is None:
            return np.full(m, self.plan.max_grad_norm)
        with self._connection.blobopen("refresh", "norms", number, readonly=True) as blob:
            blob.seek(8 * first)
            return np.frombuffer(blob.read(8 * m), dtype="<f8")


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection
