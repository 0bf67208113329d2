"""Budget: what was released of a run, what it cost, and what is left; one chain in a SQLite file.

A question is charged before its answer is drawn, and answered once: whoever asks it again gets the
stored answer at no cost. A process that dies in between leaves it charged and open; the next one
to ask draws the answer. Of several that draw at the same time one answer is stored, and all return
that one, so that a charge never releases two.

Charges and answers are entries of a `Chain` whose head is published, and the budget of a run is
compared with what was published of it: one that was deleted, changed or put back from an earlier
time would make everything cheaper than it was, and is refused.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Self

from epsilons.accounting import checks
from epsilons.accounting.composition import (
    Releases,
    gaussian_epsilon,
    gaussian_keeps,
    gaussian_mu,
)
from epsilons.journal.chain import SALT_BYTES, Chain
from epsilons.release.mechanisms import DISTANCE
from epsilons.runs import Run

# Costs are whole numbers of μ² · 10¹⁵: sums are exact in any order.
_UNIT = 10**15
_ROOM = 2**20  # more draws than one question has

LEDGER = "publications.json"

Answer = dict[str, Any]


class OverBudget(ValueError):
    """A question that would cost more than is left."""


@dataclass(frozen=True)
class Limit:
    """What the clip bound and all publications of a run together may cost: (ε, δ).

    Both `epsilon` (by default 1) > 0 and `delta` (by default 1e-5) in (0, 1), else ValueError. A
    budget keeps the limit that it was made with.
    """

    epsilon: float = 1.0
    delta: float = 1e-5

    def __post_init__(self) -> None:
        checks.positive("the limit's epsilon", self.epsilon)
        checks.open_unit("the limit's delta", self.delta)


@dataclass(frozen=True)
class Cost:
    """The price of a release: promised (ε, δ), kept by noise of total μ in `draws` numbers.

    `epsilon`, `delta`: what is promised. `units`: μ² in units of 10⁻¹⁵, so that sums are exact.
    Made by `Cost.of`; costs add up as Gaussian releases do, not by adding ε's.
    """

    epsilon: float
    delta: float
    units: int
    draws: int

    @classmethod
    def of(cls, epsilon: float, delta: float, draws: int) -> Self:
        """The most precise release of at most `draws` noisy numbers that is (ε, δ)-DP.

        ValueError if the pair of `epsilon` and `delta` leaves room for no noise that is worth
        drawing.

        >>> round(Cost.of(0.1, 1e-5, draws=1).mu, 5)
        0.03252
        """
        units = int(gaussian_mu(epsilon, delta, draws * DISTANCE) ** 2 * _UNIT)
        if units == 0:
            raise ValueError(f"epsilon={epsilon:g} at delta={delta:g} is too small to be released")
        return cls(epsilon, delta, units, draws)

    @property
    def mu(self) -> float:
        """The μ of a Gaussian release of this cost."""
        return self.releases.mu

    @property
    def releases(self) -> Releases:
        """The cost as releases, which compose with a training."""
        return _releases(self.units, self.draws)


def reserved(epsilon: float, delta: float) -> Releases:
    """What a plan sets aside for publications of (ε, δ) together: its reserve_mu and distance.

    `epsilon`, `delta`: as for `Cost.of`. ValueError where they leave room for no noise.

    >>> round(reserved(0.1, 1e-5).mu, 5)
    0.03252
    """
    units = Cost.of(epsilon, delta, draws=1).units
    return Releases(math.nextafter(_releases(units, 1).mu, math.inf), _ROOM * DISTANCE)


@dataclass(frozen=True)
class Entry:
    """One line of the ledger; `answer` is None while it is charged and not yet drawn.

    `number`: from 1. `asked`: when, in UTC. `question`: as it was given. `epsilon`, `delta`,
    `units` and `draws`: those of its `Cost`.
    """

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
    """What has been released so far, added up: μ, and the distance of its noise from Gaussian.

    `units`: μ² in units of 10⁻¹⁵. `draws`: how many noisy numbers. `questions`: how many were
    charged.
    """

    units: int
    draws: int
    questions: int

    @classmethod
    def of_run(cls, run_path: str | os.PathLike[str]) -> Self:
        """What the run at `run_path` has let out; no budget is made where there is none."""
        return cls.on(recorded(run_path).entries)

    @classmethod
    def on(cls, entries: Sequence[Entry]) -> Self:
        """What `entries` cost together."""
        return cls(
            sum(entry.units for entry in entries),
            sum(entry.draws for entry in entries),
            len(entries),
        )

    @property
    def releases(self) -> Releases:
        """What was spent, as releases, which compose with a training."""
        return _releases(self.units, self.draws)

    def epsilon(self, delta: float) -> float:
        """ε of everything let out beside the training, at `delta`."""
        return self.releases.epsilon(delta)


def releases_of(run: Run) -> Releases:
    """Everything that `run` has let out beside its training: clip bound and publications.

    With budgets the reserve for publications counts from the start, as in the promises. It enters
    the worst case and every individual ε that is told from now on. ValueError if the budget was
    changed.
    """
    return Spent.of_run(run.path).releases.at_least(run.plan.releases)


class Recorded(NamedTuple):
    """What a run's budget says, read at one moment; its limit is None where there is no budget.

    `ledger`: SHA-256 of the public ledger when it was last written and noted here, if it was.
    """

    entries: list[Entry]
    limit: Limit | None = None
    ledger: str | None = None


def recorded(run_path: str | os.PathLike[str]) -> Recorded:
    """The budget of the run folder for reading; ValueError if it was changed or knows too little.

    The public half is read first: whatever is published was in the budget before.
    """
    published, anchored = _published(run_path), _anchor(run_path).exists()
    file = _file(run_path)
    if not file.exists():
        if anchored or published:
            raise ValueError(_gone(file))
        return Recorded([])
    with closing(_undamaged(file, _anchor(run_path))) as chain:
        found = Recorded(_entries(chain), _limit(chain), _noted(chain))
    _expect_known(found.entries, published, file)
    return found


class Budget:
    """The account of one run, at `path`; made with `limit` where it is not there yet.

    The limit is fixed when the budget is made. `anchor`: where the head of its chain is published.
    `limit`: what everything together may cost, by default (1, 1e-5). `path`: its SQLite file. A
    context manager, which closes it. ValueError if it was changed, deleted, put back from an
    earlier time, or made with another limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        limit: Limit | None = None,
        *,
        anchor: Path | None = None,
    ) -> None:
        self.path = Path(path)
        self._anchor = anchor
        if not self.path.exists():
            _create(self.path, anchor, Limit() if limit is None else limit)
        self._chain = _undamaged(self.path, anchor, writable=True)
        self.limit = _limit(self._chain)
        if limit is not None and limit != self.limit:
            self.close()
            raise ValueError(
                f"the limit of this run is {_pair(self.limit)} since its budget was made; "
                f"it can't become {_pair(limit)}"
            )
        if anchor is not None and not anchor.exists():
            self._chain.publish()  # a crash came before the first one, and nothing is charged yet

    @classmethod
    def of_run(cls, run_path: str | os.PathLike[str], limit: Limit | None = None) -> Self:
        """The budget of the run folder; ValueError if it knows less than the public half.

        `run_path`: the folder of the run. `limit`: for a budget that is not there yet, by default
        (1, 1e-5).
        """
        published, anchor, file = _published(run_path), _anchor(run_path), _file(run_path)
        if published and not file.exists():
            raise ValueError(_gone(file))
        anchor.parent.mkdir(exist_ok=True)
        budget = cls(file, limit, anchor=anchor)
        try:
            _expect_known(budget.entries(), published, file)
        except ValueError:
            budget.close()
            raise
        return budget

    def close(self) -> None:
        """Close the file; nothing can be asked any more."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def ask(
        self,
        question: Mapping[str, Any],
        cost: Cost,
        answer: Callable[[], Answer],
        *,
        promised: Releases | None = None,
    ) -> Answer:
        """The answer to the question: the stored one, or a new one charged first.

        `question`: what is asked, as plain values; the same values are the same question. `answer`:
        called without arguments to draw what `json` can write, once it is charged. `promised`: what
        all releases of the run together may be, where promises include no more; by default any.

        Raises `OverBudget`, and charges nothing, where less than `cost` is left.
        """
        key = json.dumps(question, sort_keys=True, ensure_ascii=False)
        with self._transaction():
            found = self._found(key)
            if found is None:
                self._charge(key, cost, promised)
        if found is None:
            self._chain.publish()
        elif found.answer is not None:
            return found.answer
        drawn = json.dumps(answer(), ensure_ascii=False, allow_nan=False)
        with self._transaction():
            found = self._found(key)
            assert found is not None
            if found.answer is None:
                facts = {"to": found.number, "answer": drawn}
                self._chain.insert("answer", facts, b"", b"")
        self._chain.publish()
        return _read(drawn) if found.answer is None else found.answer

    @property
    def spent(self) -> Spent:
        """What everything charged so far costs together."""
        return Spent.on(self.entries())

    def entries(self) -> list[Entry]:
        """Every question charged so far, in order."""
        return _entries(self._chain)

    def _transaction(self) -> AbstractContextManager[None]:
        """Lock out other writers until the block is left; then its entries are on disk."""
        return self._chain.transaction()

    @property
    def _ledger(self) -> str | None:
        """The SHA-256 of the public ledger when it was last written; None if it never was."""
        return _noted(self._chain)

    def _note_ledger(self, digest: str) -> None:
        """Note the SHA-256 of the public ledger, which was just written, inside `alone`."""
        if self._ledger != digest:
            self._chain.insert("ledger", {"sha256": digest}, b"", b"")

    def _publish(self) -> None:
        """Publish the head of the chain as it stands."""
        self._chain.publish()

    def left(self, delta: float) -> float:
        """The ε at δ that one more question may cost, rounded down to four digits.

        `delta` in (0, 1) is that of the question.
        """
        return self._left(self.spent, delta)

    def _left(self, spent: Spent, delta: float) -> float:
        distance = (spent.draws + _ROOM) * DISTANCE
        most = int(gaussian_mu(self.limit.epsilon, self.limit.delta, distance) ** 2 * _UNIT)
        if most <= spent.units:
            return 0.0
        epsilon = gaussian_epsilon(math.sqrt((most - spent.units) / _UNIT), delta)
        return math.floor(epsilon * 1e4) / 1e4

    def _found(self, key: str) -> Entry | None:
        question = json.loads(key)
        return next((e for e in self.entries() if e.question == question), None)

    def _charge(self, key: str, cost: Cost, promised: Releases | None) -> None:
        before = self.spent
        after = Spent(before.units + cost.units, before.draws + cost.draws, before.questions + 1)
        total = after.releases
        if promised is not None and total.at_least(promised) != promised:
            raise OverBudget(
                f"ε = {cost.epsilon:g} at δ = {cost.delta:g} is more than is left of the reserve "
                "for publications: people were promised their budgets with that and no more. Ask "
                "for less, or plan a larger reserve (reserve_mu) before training."
            )
        if not gaussian_keeps(self.limit.epsilon, self.limit.delta, total.mu, total.distance):
            raise OverBudget(
                f"ε = {cost.epsilon:g} at δ = {cost.delta:g} is more than is left of this run's "
                f"{_pair(self.limit)}: ε = {self._left(before, cost.delta):g} at "
                f"δ = {cost.delta:g}. Ask with a smaller ε, or a question answered before."
            )
        asked = datetime.now(UTC).isoformat(timespec="seconds")
        self._chain.insert("charge", {"asked": asked, "question": key, **asdict(cost)}, b"", b"")


def discard(budget: Budget) -> None:
    """Remove a budget that nothing was charged to."""
    assert not budget.entries()
    budget.close()
    for file in (budget._anchor, budget.path):
        if file is not None:
            file.unlink(missing_ok=True)


def _file(run_path: str | os.PathLike[str]) -> Path:
    return Path(run_path) / "private" / "budget.sqlite"


def _anchor(run_path: str | os.PathLike[str]) -> Path:
    return Path(run_path) / "public" / "budget_anchor.json"


def _create(path: Path, anchor: Path | None, limit: Limit) -> None:
    salt = os.urandom(SALT_BYTES).hex()
    try:
        Chain.create(
            path, anchor, "open", {"format": 1, "limit": asdict(limit), "salt": salt}
        ).close()
    except ValueError:
        if not path.exists():  # else another process was faster
            raise


def _undamaged(path: Path, anchor: Path | None, *, writable: bool = False) -> Chain:
    """The chain of a budget, checked against its anchor."""
    chain = None
    try:
        chain = Chain(path, anchor, writable=writable)
        chain.verify()
        return chain
    except (sqlite3.DatabaseError, ValueError) as error:
        if chain is not None:
            chain.close()
        older = "no such table" in str(error)
        why = "an earlier version made it, whose budgets were not chained" if older else str(error)
        raise ValueError(
            f"{path} is not a budget that can be trusted: {why}. Restore the run folder from a copy"
            + (", or use that version for this run" if older else "")
        ) from error


def _limit(chain: Chain) -> Limit:
    opening = chain.last("open")
    assert opening is not None  # the chain was verified
    return Limit(**opening.facts["limit"])


def _noted(chain: Chain) -> str | None:
    last = chain.last("ledger")
    return None if last is None else str(last.facts["sha256"])


def _entries(chain: Chain) -> list[Entry]:
    found: list[Entry] = []
    for entry in chain.entries("charge", "answer"):
        facts = dict(entry.facts)
        if entry.kind == "charge":
            question = json.loads(facts.pop("question"))
            found.append(Entry(len(found) + 1, question=question, answer=None, **facts))
        else:
            k = facts["to"] - 1
            found[k] = replace(found[k], answer=_read(facts["answer"]))
    return found


def _published(run_path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The publications in the public ledger; none if there is no ledger."""
    file = Path(run_path) / "public" / LEDGER
    try:
        found: list[dict[str, Any]] = json.loads(file.read_bytes())["publications"]
        return found
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: {error!r}. Restore it from a copy") from error


def _expect_known(entries: Sequence[Entry], published: list[dict[str, Any]], file: Path) -> None:
    """ValueError if something was published that the budget doesn't know, or knows otherwise."""
    ours = json.loads(json.dumps([asdict(entry) for entry in entries]))
    for number, theirs in enumerate(published, 1):
        known = ours[number - 1] if number <= len(ours) else {}
        if theirs.get("answer") is None:  # it may have been answered since
            theirs = {**theirs, "answer": known.get("answer")}
        if known != theirs:
            raise ValueError(
                f"{file} and the public {LEDGER} differ in publication {number}: one of them was "
                "changed, or is of an earlier time. Restore the run folder from a copy"
            )


def _gone(file: Path) -> str:
    return (
        f"{file} is gone, and the public half of the run says that something was charged to it: "
        "what was spent is not known any more. Restore it from a copy"
    )


def _releases(units: int, draws: int) -> Releases:
    return Releases(math.sqrt(units / _UNIT), draws * DISTANCE)


def _pair(limit: Limit) -> str:
    return f"(ε, δ) = ({limit.epsilon:g}, {limit.delta:g})"


def _read(text: str) -> Answer:
    answer: Answer = json.loads(text)
    return answer
