"""What everyone may read of a run's publications: the ledger, its total, and checksums.

RUN/public/publications.json    every question, its cost and its answer; the total
RUN/public/checksums.json       SHA-256 of the other files in public/
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epsilons.accounting.plan import Plan
from epsilons.files import public_file
from epsilons.release.budget import Budget, Spent
from epsilons.release.composition import Profile, composed_epsilon
from epsilons.runs import Run

LEDGER = "publications.json"
CHECKSUMS = "checksums.json"
_COMPOSITION = (
    "The clip bound and the publications are Gaussian releases, whose costs add in mu squared "
    "(Dong, Roth & Su 2022); training and releases compose through their dominating pairs "
    "(Zhu, Dong & Wang 2022, Theorem 10). Neighbours: one record added or removed; n is public."
)


def total_epsilon(
    plan: Plan, spent: Spent, delta: float, steps: int | Sequence[int] | None = None
) -> float:
    """ε at δ of the training (`steps` of it, or all), the clip bound and all publications.

    `steps` as `Plan.worst_case` takes them: `Journal.charged` counts what was charged again.

    Guarantee: an upper bound; see `composed_epsilon`.
    """
    alone = plan.worst_case(delta=delta, steps=steps)
    if spent.mu == 0 or not math.isfinite(alone):
        return alone
    training = Profile.around(lambda d: plan.worst_case(delta=d, steps=steps), delta, spent.mu)
    return composed_epsilon(training, spent.mu, delta, spent.distance)


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
    spent = Spent.on(entries)
    # What is to come counts too, unless no one knows how much it is.
    steps = run.journal.charged(until=plan.steps)
    return {
        "questions": len(entries),
        "answered": sum(entry.answer is not None for entry in entries),
        "training": {
            "epsilon": plan.worst_case(steps=steps),
            "delta": plan.delta,
            "steps": sum(steps),
            "repeated_steps": run.journal.repeated,
        },
        "releases": {"epsilon": spent.epsilon(limit.delta), "delta": limit.delta},
        "limit": asdict(limit),
        "total": {
            "epsilon": total_epsilon(plan, spent, plan.delta, steps),
            "delta": plan.delta,
            "composition": _COMPOSITION,
        },
        "publications": [asdict(entry) for entry in entries],
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
