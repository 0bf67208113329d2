"""What everyone may read of a run's publications: the ledger, its total, and checksums.

RUN/public/publications.json    every question, its cost and its answer; the total
RUN/public/checksums.json       SHA-256 of the other files in public/
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epsilons.accounting.composition import NOTHING, Releases
from epsilons.files import public_file
from epsilons.release.budget import Budget, Spent
from epsilons.release.persons import person_worst_case
from epsilons.runs import Run

LEDGER = "publications.json"
CHECKSUMS = "checksums.json"
_COMPOSITION = (
    "The clip bound and the publications are Gaussian releases, whose costs add in mu squared "
    "(Dong, Roth & Su 2022). Such a release is a step that uses every record, and composes with "
    "the steps of the training as these do among themselves. Neighbours: one record added or "
    "removed; n is public."
)


def write_ledger(run: Run, budget: Budget) -> Path:
    """Write the public ledger as the budget stands, and the checksums; say where the ledger is.

    Of several that write at the same time the one that knows most stays.
    """
    page = _page(run, budget)
    folder = run.path / "public"
    with budget.alone():
        if _progress(folder / LEDGER) <= _knowledge(page):
            _write(folder / LEDGER, page)
            _write(folder / CHECKSUMS, _checksums(folder))
    return folder / LEDGER


def renew_ledger(run: Run) -> None:
    """Bring the public ledger up to date, if anything was let out: training may have gone on."""
    if Spent.of_run(run.path).questions:
        with Budget.of_run(run.path) as budget:
            write_ledger(run, budget)


def _page(run: Run, budget: Budget) -> dict[str, Any]:
    plan, entries, limit = run.plan, budget.entries(), budget.limit
    releases = Spent.on(entries).releases.at_least(plan.clip_bound)
    # What is to come counts too, unless no one knows how much it is.
    steps = run.journal.charged(until=plan.steps)
    return {
        "questions": len(entries),
        "answered": sum(entry.answer is not None for entry in entries),
        # what the individual ε's are worth that statistics are published of
        "kind": run.journal.kind,
        "training": {
            "epsilon": plan.worst_case(steps=steps, releases=NOTHING),
            "delta": plan.delta,
            "steps": sum(steps),
            "repeated_steps": run.journal.repeated,
        },
        "releases": {"epsilon": releases.epsilon(limit.delta), "delta": limit.delta},
        "limit": asdict(limit),
        "total": {
            "epsilon": plan.worst_case(steps=steps, releases=releases),
            "delta": plan.delta,
            "composition": _COMPOSITION,
            "per": "record",
        },
        "per_person": _per_person(run, releases),
        "publications": [asdict(entry) for entry in entries],
    }


def _per_person(run: Run, releases: Releases) -> dict[str, Any] | None:
    """The total for all records of one person; None where the plan does not limit them."""
    most = run.plan.max_records_per_owner
    if most is None:
        return None
    found = person_worst_case(run, most, releases, until=run.plan.steps)
    return {
        "records": most,
        "epsilon": found if math.isfinite(found) else None,
        "delta": run.plan.delta,
    }


def _progress(ledger: Path) -> tuple[int, int, int]:
    """How much the ledger on disk knows."""
    if not ledger.exists():
        return -1, -1, -1
    return _knowledge(json.loads(ledger.read_text(encoding="utf-8")))


def _knowledge(page: dict[str, Any]) -> tuple[int, int, int]:
    """How many questions, answers and steps it has: none of them falls."""
    return page["questions"], page["answered"], page["training"]["steps"]


def _checksums(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != CHECKSUMS and not file.name.startswith(".")
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    with public_file(path) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
