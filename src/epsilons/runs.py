"""Run: the folder a run leaves behind, read without torch.

RUN/public/plan.json          the plan and its worst case: safe for everyone
RUN/private/                  mode 0700, every file 0600: for the curator alone
    journal.sqlite  examples.npz  test.npz  model.pt  report.html
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import Self

from epsilons.accounting.individual import Method
from epsilons.accounting.plan import Plan
from epsilons.accounting.results import Epsilons
from epsilons.examples import Examples
from epsilons.files import private_folder
from epsilons.journal import Journal


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
    def create(cls, path: str | os.PathLike[str], plan: Plan, examples: Examples) -> Self:
        """A new run folder with its plan, an empty journal and its examples."""
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path} is not empty; give a new folder for the run")
        if len(examples) != plan.n:
            raise ValueError(f"{len(examples)} examples were given; the plan says n={plan.n}")
        private_folder(path / "private")
        (path / "public").mkdir()
        summary = {"plan": plan.to_dict(), "worst_case": {"rdp": plan.worst_case("rdp")}}
        (path / "public" / "plan.json").write_text(json.dumps(summary, indent=2) + "\n")
        run = cls(path, Journal.create(path / "private" / "journal.sqlite", plan, examples.ids))
        run.save_examples(examples)
        return run

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        path = Path(path)
        journal = path / "private" / "journal.sqlite"
        if not journal.is_file():
            raise ValueError(f"{path} is not a run folder: {journal} is not there")
        return cls(path, Journal.open(journal))

    @property
    def plan(self) -> Plan:
        return self.journal.plan

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

    def epsilons(self, delta: float | None = None, method: Method = "rdp") -> Epsilons:
        """ε of every training example for the steps taken so far, in data set order."""
        return self.journal.epsilons(delta, method)
