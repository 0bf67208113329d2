"""Run: the folder a run leaves behind, read without torch.

RUN/public/plan.json          the plan and its worst case: safe for everyone
RUN/private/                  mode 0700, every file 0600: for the curator alone
    journal.sqlite  examples.npz  test.npz  model.pt  report.html
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Self

from numpy.typing import ArrayLike

from epsilons.accounting.individual import METHODS, Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.files import private_file, private_folder, public_file
from epsilons.journal import Journal

_HALVES = ("public", "private")
_BUDGET = "budget.sqlite"
_FIRST_FILES = (_BUDGET, "plan.json", "examples.npz", "journal.sqlite")


class Run:
    """What one run left behind.

    `.plan`, `.journal`, `.examples` (training) and `.test` (held-out, or None), `.epsilons()`.
    """

    def __init__(self, path: Path, journal: Journal) -> None:
        self.path = path
        self.journal = journal

    def __repr__(self) -> str:
        return f"<Run {self.path} steps={self.journal.steps_charged}/{self.plan.steps}>"

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        plan: Plan,
        examples: Examples,
        *,
        random_loss: bool = False,
        seed: int | None = None,
    ) -> Self:
        """A new run folder with its plan, an empty journal and its examples.

        A budget may be there already: what the plan is made of is charged before. A `seed` marks
        the run as reproducible, for experiments: its noise is no secret.
        """
        path = Path(path)
        cls.expect_free(path)
        if len(examples) != plan.n:
            raise ValueError(f"{len(examples)} examples were given; the plan says n={plan.n}")
        private_folder(path / "private")
        (path / "public").mkdir()
        examples.save(path / "private" / "examples.npz")
        summary = {
            "plan": plan.to_dict(),
            "worst_case": _worst_cases(plan),
            "seed": seed,
        }
        with public_file(path / "public" / "plan.json") as file:
            file.write(json.dumps(summary, indent=2).encode() + b"\n")
        # the journal comes last: a folder without one has released nothing
        journal = Journal.create(
            path / "private" / "journal.sqlite",
            plan,
            examples.ids,
            random_loss=random_loss,
            anchor=path / "public" / "anchor.json",
            salt=None if seed is None else hashlib.sha256(f"salt {seed}".encode()).digest(),
        )
        return cls(path, journal)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        path = Path(path)
        journal = path / "private" / "journal.sqlite"
        if not journal.is_file():
            raise ValueError(f"{path} is not a run folder: {journal} is not there")
        return cls(path, Journal.open(journal, anchor=path / "public" / "anchor.json"))

    @staticmethod
    def expect_free(path: str | os.PathLike[str]) -> None:
        """ValueError if anything but a budget is at `path`."""
        path = Path(path)
        inside = set(path.iterdir()) if path.is_dir() else {path} if path.exists() else set()
        if inside == {path / "private"}:
            inside = {f for f in path.glob("private/*") if not f.name.startswith(_BUDGET)}
        if inside:
            raise ValueError(f"{path} is not empty; give a new folder for the run")

    @staticmethod
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

    @property
    def plan(self) -> Plan:
        return self.journal.plan

    @cached_property
    def seed(self) -> int | None:
        """The seed of a reproducible run; None if its sampling and noise are secret."""
        summary = json.loads((self.path / "public" / "plan.json").read_text(encoding="utf-8"))
        seed: int | None = summary["seed"]
        return seed

    @property
    def finished(self) -> bool:
        """Whether the run has ended: its model is there, and nothing to go on from."""
        return self.model_file.exists() and not self.checkpoint_file.exists()

    @property
    def checkpoint_file(self) -> Path:
        return self.path / "private" / "checkpoint.pt"

    @property
    def releases_file(self) -> Path:
        return self.path / "private" / "releases.bin"

    @property
    def model_file(self) -> Path:
        return self.path / "private" / "model.pt"

    @property
    def report_file(self) -> Path:
        return self.path / "private" / "report.html"

    @cached_property
    def examples(self) -> Examples:
        return Examples.load(self.path / "private" / "examples.npz")

    @cached_property
    def test(self) -> Examples | None:
        file = self.path / "private" / "test.npz"
        return Examples.load(file) if file.exists() else None

    def save_examples(self, examples: Examples, test: Examples | None = None) -> None:
        """Write what is known of the training examples and, if given, of the held-out ones."""
        examples.save(self.path / "private" / "examples.npz")
        if test is not None:
            test.save(self.path / "private" / "test.npz")
        for name in ("examples", "test"):
            self.__dict__.pop(name, None)

    def append_line(self, name: str, line: str) -> None:
        """One more line in a file of `private/`."""
        file = self.path / "private" / name
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as lines:
            lines.write(line + "\n")

    def save_timings(self, seconds: dict[str, float]) -> None:
        """Where the time of the last sitting went, in seconds."""
        with private_file(self.path / "private" / "timings.json") as file:
            file.write(json.dumps(seconds).encode())

    def epsilons(
        self,
        delta: float | None = None,
        method: Method = "tight",
        *,
        only: ArrayLike | None = None,
    ) -> Epsilons:
        """ε of every training example for the steps taken so far, in data set order.

        `only`: of the examples at these ascending positions, without computing the others'.
        """
        return self.journal.epsilons(delta, method, only=only)


def _worst_cases(plan: Plan) -> dict[str, float] | None:
    """By method; None if the length is unknown or nothing is private."""
    if plan.endless or plan.kind == "none":
        return None
    return {method: plan.worst_case(method) for method in METHODS}
