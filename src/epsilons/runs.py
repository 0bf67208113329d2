"""Run: the folder a run leaves behind, read without torch.

RUN/public/plan.json          the plan, its worst case, steps repeated: safe for everyone
RUN/private/                  mode 0700, every file 0600: for the curator alone
    journal.sqlite  model.pt  report.html
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from epsilons.accounting.composition import NOTHING, Releases
from epsilons.accounting.holding import Hold
from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.margins import Margin
from epsilons.accounting.plan import Plan
from epsilons.accounting.promises import Promise
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples, packed, unpacked
from epsilons.files import private_folder, public_file
from epsilons.journal import Journal, Verified, run_entries
from epsilons.journal.promised import assigned_budgets
from epsilons.randomness import Randomness

CHECKPOINT = "checkpoint.pt"  # in the private half; a run that has none is finished
_HALVES = ("public", "private")
_BUDGET = "budget"  # budget.sqlite and budget_anchor.json
_FIRST_FILES = (_BUDGET, "plan.json", "journal.sqlite")
# A stated worst case may be above ours, since other versions priced more loosely; hardly below.
LOW, HIGH = 1 - 1e-6, 1 + 1e-2


class Run:
    """What one run left behind, in the folder `.path`.

    Opened by `open`, `checked` or `create`; trained by `fit` and `PrivateTraining`. `.plan`,
    `.journal`, `.examples` (training) and `.test` (held-out, or None), `.epsilons()`. A run that
    was opened for reading stays as it was at that moment: `stated` is the public half of then.
    """

    def __init__(self, path: Path, journal: Journal, stated: bytes | None = None) -> None:
        self.path = path
        self.journal = journal
        self._text = stated  # `public/plan.json` of the journal's moment, if it is for reading

    def __repr__(self) -> str:
        return f"<Run {self.path} steps={self.journal.steps_charged}/{self.plan.steps}>"

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        plan: Plan,
        examples: Examples,
        *,
        margin: Margin | None = None,
        random_loss: bool = False,
        random_data: bool = False,
        batch_invariant: bool = False,
        seed: int | None = None,
        randomness: Randomness | None = None,
    ) -> Self:
        """A new run folder at `path` for `plan` and `examples`, with an empty journal.

        A budget may be there already: what the plan is made of is charged before. `margin`,
        `random_loss`, `random_data` and `batch_invariant` as for `Journal.create`. A `seed` marks
        the run as reproducible, for experiments: its noise is no secret. `randomness`: where noise
        and coins come from, if that is known. ValueError if something else is at `path`, or the
        examples are not those that the plan speaks of.
        """
        path = Path(path)
        expect_free(path)
        expect_planned(plan, examples)
        private_folder(path / "private")
        (path / "public").mkdir(exist_ok=True)
        source = Randomness.recorded({"seed": seed}) if randomness is None else randomness
        first = _summary(plan, plan.promises, plan.steps, 0, seed, source.to_dict())
        _write_summary(path, first)
        # the journal comes last: a folder without one has released nothing
        journal = Journal.create(
            path / "private" / "journal.sqlite",
            plan,
            examples.ids,
            margin=margin,
            columns=packed(examples, ids=False),
            budgets=examples.budgets,
            random_loss=random_loss,
            random_data=random_data,
            batch_invariant=batch_invariant,
            anchor=path / "public" / "anchor.json",
            salt=None if seed is None else hashlib.sha256(f"salt {seed}".encode()).digest(),
            seed=seed,
            randomness=source,
        )
        return cls(path, journal)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False) -> Self:
        """The run at `path` as it is now, for reading; `writable`: for going on with it.

        ValueError if there is no run.
        """
        path = Path(path)
        file, anchor = path / "private" / "journal.sqlite", path / "public" / "anchor.json"
        if not file.is_file():
            raise ValueError(f"{path} is not a run folder: {file} is not there")
        if writable:
            return cls(path, Journal.open(file, anchor=anchor, writable=True))
        while True:  # a restart between would give a plan of another moment
            before = _plan_text(path)
            journal = Journal.open(file, anchor=anchor)
            if _plan_text(path) == before:
                return cls(path, journal, before)
            journal.close()

    @classmethod
    def checked(cls, path: str | os.PathLike[str]) -> Self:
        """The run at `path` for handing out figures: ValueError if what they rest on was changed.

        That is the journal, with its anchor and seal, and `public/plan.json`.
        """
        run = cls.open(path)
        try:
            run.journal.check()
            run._check_summary()
        except ValueError as error:
            raise ValueError(
                f"{error}. No figure of this run can be trusted: restore its folder from a copy"
            ) from error
        return run

    def verify(self) -> Verified:
        """Check the run as `checked` does: what was found, with every example priced anew."""
        found = self.journal.verify()
        self._check_summary()
        return found

    @property
    def plan(self) -> Plan:
        """The public constants of the run."""
        return self.journal.plan

    @cached_property
    def seed(self) -> int | None:
        """The seed of a reproducible run; None if its sampling and noise are secret."""
        facts = run_entries.opening(self.journal).facts
        # a journal from before seeds were noted in it leaves it to the public half
        seed: int | None = facts["seed"] if "seed" in facts else self._stated()["seed"]
        return seed

    def _summary(self, at: int | None = None) -> dict[str, Any]:
        """What the public half is to state; with the run at step `at`, if that is given."""
        journal = self.journal
        counts = journal.charged(until=self.plan.steps, at=at)
        repeated = journal.repeated
        if at is not None:
            repeated += journal.steps_charged - at
        recorded = run_entries.opening(journal).facts.get("randomness")
        return _summary(self.plan, journal.promises, counts, repeated, self.seed, recorded)

    def _stated(self) -> dict[str, Any]:
        try:
            text = _plan_text(self.path) if self._text is None else self._text
            stated = json.loads(text)
            plan = Plan.from_dict(stated["plan"])
            worst = stated["worst_case"]
            return {
                "plan": plan.to_dict(),
                "worst_case": worst and {method: float(worst[method]) for method in METHODS},
                "parts": {
                    part: float(value) for part, value in (stated.get("parts") or {}).items()
                },
                "promises": stated.get("promises", []),
                "seed": stated["seed"],
                "randomness": stated.get("randomness"),
                "repeated_steps": int(stated.get("repeated_steps", 0)),
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{_plan_file(self.path)} is damaged: {error}") from error

    def _check_summary(self) -> None:
        """ValueError if the public half states something else than the journal.

        It is written after a restart and before what is charged next: in between it is as before.
        """
        stated = self._stated()
        turns = reversed(run_entries.turns(self.journal))
        found = [_differences(stated, self._summary(at)) for at in turns]
        if all(found):
            raise ValueError(
                f"{_plan_file(self.path)} differs from the journal in {', '.join(found[0])}; "
                "if the run was stopped, resuming it writes the file anew"
            )

    @property
    def promises(self) -> tuple[Promise, ...]:
        """What each of the plan's budgets was promised before training; none without budgets.

        Public: who has which budget is not (`examples.budgets`).
        """
        return self.journal.promises

    @property
    def finished(self) -> bool:
        """Whether the run has ended: its model is there, and nothing to go on from."""
        return self.model_file.exists() and not (self.private / CHECKPOINT).exists()

    @property
    def private(self) -> Path:
        """The half of the folder that is for the curator alone."""
        return self.path / "private"

    @property
    def model_file(self) -> Path:
        """The final weights, as `torch.save` wrote them; there once the run has ended."""
        return self.private / "model.pt"

    @property
    def report_file(self) -> Path:
        """Where `epsilons report` writes its page."""
        return self.private / "report.html"

    @cached_property
    def examples(self) -> Examples:
        """The training examples, with their outcomes once the run has them."""
        journal = self.journal
        if run_entries.opening(journal).format == 1:
            examples = self._stored_beside("examples.npz")
        else:
            examples = unpacked(run_entries.columns(journal), journal.ids)
        examples = replace(examples, budgets=journal.budgets)
        outcomes = run_entries.outcomes(journal)
        if outcomes is None:
            return examples
        found = unpacked(outcomes[0], journal.ids)
        assert found.losses is not None
        return examples.with_outcomes(found.losses, found.correct)

    @cached_property
    def test(self) -> Examples | None:
        """The held-out examples with their outcomes, if there are any."""
        outcomes = run_entries.outcomes(self.journal)
        if outcomes is not None:
            return unpacked(outcomes[1]) if outcomes[1] else None
        first_format = run_entries.opening(self.journal).format == 1
        if first_format and (self.private / "test.npz").exists():
            return self._stored_beside("test.npz")
        return None

    def _stored_beside(self, name: str) -> Examples:
        """Examples of a run of format 1, whose chain doesn't cover them."""
        file = self.private / name
        try:
            return unpacked(file.read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{file} is not there or damaged; put it back from a copy of the run folder"
            ) from error

    def record_outcomes(
        self, losses: ArrayLike, correct: ArrayLike | None = None, test: Examples | None = None
    ) -> None:
        """Record the `losses` (n,) of the training examples under the final model.

        `correct` (n,): whether the model is right about each. `test`: held-out examples, with their
        own losses and correctness. To be called before the journal is sealed: they are covered by
        its chain.
        """
        training = packed(Examples(self.journal.ids).with_outcomes(losses, correct), ids=False)
        held_out = b"" if test is None else packed(test)
        run_entries.record_outcomes(self.journal, training, held_out)
        for name in ("examples", "test"):
            self.__dict__.pop(name, None)

    def epsilons(
        self,
        delta: float | None = None,
        method: Method = "tight",
        *,
        only: ArrayLike | None = None,
        releases: Releases | None = None,
        hold: Hold = "nearest",
        progress: Callable[[int], None] | None = None,
        processes: int = 1,
    ) -> Epsilons:
        """ε of every training example for the steps taken so far, in data set order.

        `delta`: by default the plan's. `method`: the accountant, `"tight"` (the default), `"rdp"`
        or `"rdp-classic"`. `only`: of the examples at these ascending positions, without computing
        the others'. `releases`: everything let out beside the training; by default the plan's clip
        bound. `hold`: which record a step without one is charged; `progress` and `processes`: how
        it is computed; see `Journal.epsilons`.
        """
        return self.journal.epsilons(
            delta, method, only=only, releases=releases, hold=hold, progress=progress,
            processes=processes,
        )  # fmt: skip


def expect_planned(plan: Plan, examples: Examples) -> None:
    """ValueError if the examples are not those that the plan speaks of."""
    if len(examples) != plan.n:
        raise ValueError(f"{len(examples)} examples were given; the plan says n={plan.n}")
    assigned_budgets(plan, examples.budgets)
    if plan.unit == "record" and plan.max_records_per_owner is not None:
        expect_few_records(examples, plan.max_records_per_owner)


def expect_few_records(examples: Examples, most: int) -> None:
    """ValueError if someone owns more than `most` of the examples, or owners are not known."""
    if examples.owners is None:
        raise ValueError(
            f"max_records_per_owner={most} can't be checked: the examples have no owners; "
            "give a column of owners, or leave it out"
        )
    # neither who, nor how many they have: both are private
    if (np.unique(examples.owners, return_counts=True)[1] > most).any():
        raise ValueError(
            f"an owner has more records than max_records_per_owner={most}; leave some of them "
            "out, or promise a larger number to everyone"
        )


def expect_free(path: str | os.PathLike[str]) -> None:
    """ValueError if anything but a budget is at `path`."""
    path = Path(path)
    inside = set(path.iterdir()) if path.is_dir() else {path} if path.exists() else set()
    if inside <= {path / half for half in _HALVES}:
        inside = {f for f in path.glob("*/*") if not f.name.startswith(_BUDGET)}
    if inside == {path}:
        raise ValueError(f"{path} is a file; give a new folder for the run")
    if inside:
        raise ValueError(f"{path} is not empty; give a new folder for the run")


def discard_unbegun(path: str | os.PathLike[str]) -> None:
    """Remove what a crash left of a folder whose journal was never made, except its budget."""
    path = Path(path)
    if not path.is_dir() or not {entry.name for entry in path.iterdir()} <= set(_HALVES):
        return
    files = list(path.glob("*/*"))
    begun = (path / "private" / "journal.sqlite").exists()
    if begun or not all(file.name.strip(".").startswith(_FIRST_FILES) for file in files):
        return
    for file in files:
        if not file.name.startswith(_BUDGET):
            file.unlink()
    for folder in (*(path / half for half in _HALVES), path):
        with suppress(OSError):  # a budget keeps its folder
            folder.rmdir()


def publish_plan(run: Run) -> None:
    """Write `public/plan.json` as the journal stands; it changes with every restart."""
    _write_summary(run.path, run._summary())


def _summary(
    plan: Plan,
    promises: Sequence[Promise],
    steps: int | Sequence[int],
    repeated: int,
    seed: int | None,
    randomness: Mapping[str, str] | None,
) -> dict[str, Any]:
    """What everyone may know; no worst case if the length is unknown or nothing is private.

    `parts`: what training and clip bound cost alone, where the worst case has both.
    """
    known = not plan.endless and plan.kind != "none"
    parts = None
    if known and plan.releases.mu:
        parts = {"training": plan.worst_case(steps=steps, releases=NOTHING)}
        reserve = plan.releases.without(plan.clip_bound)
        for name, part in (("clip_bound", plan.clip_bound), ("reserve", reserve)):
            if part.mu:
                parts[name] = part.epsilon(plan.delta)
    return {
        "plan": plan.to_dict(),
        "worst_case": {m: plan.worst_case(m, steps=steps) for m in METHODS} if known else None,
        "parts": parts,
        "promises": [promise.to_dict() for promise in promises],
        "seed": seed,
        "randomness": randomness,
        "repeated_steps": repeated,
    }


def _differences(stated: dict[str, Any], true: dict[str, Any]) -> list[str]:
    priced = ("worst_case", "parts")
    wrong = [name for name in true if name not in priced and stated[name] != true[name]]
    worst, ours = (
        {key: value for name in priced for key, value in (said[name] or {}).items()}
        for said in (stated, true)
    )
    if worst.keys() != ours.keys() or any(
        not LOW * ours[method] <= worst[method] <= HIGH * ours[method] for method in ours
    ):
        wrong.append("worst_case")
    return wrong


def _plan_file(path: Path) -> Path:
    return path / "public" / "plan.json"


def _plan_text(path: Path) -> bytes:
    """The public plan; empty if it is not there."""
    file = _plan_file(path)
    return file.read_bytes() if file.exists() else b""


def _write_summary(path: Path, summary: dict[str, Any]) -> None:
    with public_file(_plan_file(path)) as file:
        file.write(json.dumps(summary, indent=2).encode() + b"\n")
