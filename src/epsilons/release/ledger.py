"""What everyone may read of a run's publications: the ledger, its total, and checksums.

RUN/public/publications.json    every question, its cost and its answer; the total
RUN/public/checksums.json       SHA-256 of the other files in public/
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epsilons.accounting.composition import NOTHING, Releases
from epsilons.accounting.plan import Plan
from epsilons.files import public_file
from epsilons.release.budget import LEDGER, Budget, Entry, Limit, Spent, recorded
from epsilons.release.persons import person_worst_case
from epsilons.runs import HIGH, LOW, Run

CHECKSUMS = "checksums.json"
EPSILONS = "individual epsilons"
_LOOKS, _PAUSE = 20, 0.05  # seconds
# Heads of chains go on by themselves, and are checked by them.
_MOVING = {CHECKSUMS, "anchor.json", "budget_anchor.json"}
_COMPOSITION = (
    "The clip bound and the publications are Gaussian releases, whose costs add in mu squared "
    "(Dong, Roth & Su 2022). Such a release is a step that uses every record, and composes with "
    "the steps of the training as these do among themselves. Neighbours: {} added or "
    "removed; n is public."
)
_NEIGHBOURS = {"record": "one record", "person": "all records of one person"}


def write_ledger(run: Run, budget: Budget) -> Path:
    """Write the public ledger of `run` as the `budget` stands, and the checksums.

    Its path comes back. Of several that write at the same time the one that knows most stays, if it
    is noted in the budget: one that someone edited is replaced.
    """
    file = run.path / "public" / LEDGER
    with budget._transaction():
        page = _page(run, budget.entries(), budget.limit)
        noted = budget._ledger
        if noted is None or _digest(file) != noted or not _knows_more(file, page):
            _write(file, page)
            _write(file.with_name(CHECKSUMS), _checksums(file.parent))
            budget._note_ledger(_digest(file))
    budget._publish()
    return file


def renew_ledger(run: Run) -> None:
    """Bring the public ledger of `run` up to date: training may have begun, or gone on.

    Where nothing was let out it says so, and no budget is made. ValueError if the budget was
    changed.
    """
    if Spent.of_run(run.path).questions:
        with Budget.of_run(run.path) as budget:
            write_ledger(run, budget)
    else:
        _write_first(run, _page(run, [], None))


def _write_first(run: Run, page: dict[str, Any]) -> None:
    """Write the ledger of a run that has let nothing out, unless someone did so meanwhile."""
    file = run.path / "public" / LEDGER
    try:
        overtaken = file.exists() and _knows_more(file, page)
    except (ValueError, KeyError, TypeError):
        overtaken = False
    if not overtaken:
        _write(file, page)
        _write(file.with_name(CHECKSUMS), _checksums(file.parent))


def verify_ledger(run: Run) -> None:
    """Check that the public ledger of `run` and its checksum are what was last written.

    ValueError if not. The budget has noted the digest of the ledger. A ledger that is not noted,
    since a crash came between or nothing was ever charged, must be the one that would be written
    now.
    """
    wrong = _wrong(run)
    for _ in range(_LOOKS):
        if wrong is None:
            return
        time.sleep(_PAUSE)  # someone may be writing it just now
        wrong = _wrong(run)
    if wrong is not None:
        raise ValueError(
            f"{run.path / 'public' / wrong} is not what was written; `epsilons report --public "
            f"{run.path}` writes it anew"
        )


def _wrong(run: Run) -> str | None:
    """Which of the two files is not as it should be."""
    folder = run.path / "public"
    content = (folder / LEDGER).read_bytes() if (folder / LEDGER).exists() else None
    budget = recorded(run.path)
    if content is None:
        return None if budget.ledger is None else LEDGER
    digest = hashlib.sha256(content).hexdigest()
    if digest == budget.ledger:
        return None if _stated_checksum(folder) == digest else CHECKSUMS
    try:
        stated = json.loads(content)
        now = json.loads(json.dumps(_page(run, budget.entries, budget.limit)))
        # of their moment: they change with what is recorded
        now["kind"] = stated["kind"]
        now["training"]["sums_covered"] = stated["training"]["sums_covered"]
        earlier = stated["training"]["steps"] < now["training"]["steps"]
        untouched = budget.ledger is None and earlier and stated["publications"] == []
        return None if untouched or _alike(stated, now) else LEDGER
    except (ValueError, KeyError, TypeError):
        return LEDGER


def _stated_checksum(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / CHECKSUMS).read_bytes())[LEDGER])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _alike(stated: Any, true: Any) -> bool:
    """The same, up to what another version would price more loosely."""
    if isinstance(stated, dict) and isinstance(true, dict):
        return stated.keys() == true.keys() and all(_alike(stated[k], true[k]) for k in true)
    if isinstance(stated, float) and isinstance(true, float):
        return LOW * true <= stated <= HIGH * true
    return bool(stated == true)


def _page(run: Run, entries: Sequence[Entry], limit: Limit | None) -> dict[str, Any]:
    plan = run.plan
    at = plan.delta if limit is None else limit.delta
    releases = Spent.on(entries).releases.at_least(plan.releases)
    # What is to come counts too, unless no one knows how much it is.
    steps = run.journal.charged(until=plan.steps)
    return {
        "questions": len(entries),
        "answered": sum(entry.answer is not None for entry in entries),
        # what the individual ε's are worth that statistics are published of; None if none are:
        # a clip bound is paid for before the first norm is recorded
        "kind": run.journal.kind if _about_epsilons(entries) else None,
        "training": {
            "epsilon": _known(plan, steps, NOTHING),
            "delta": plan.delta,
            "steps": sum(steps),
            "repeated_steps": run.journal.repeated,
            "sums_covered": run.journal.sums_covered,
        },
        "clip_bound": {"epsilon": plan.clip_bound.epsilon(plan.delta), "delta": plan.delta},
        "releases": {"epsilon": releases.epsilon(at), "delta": at},
        "limit": limit and asdict(limit),
        "total": {
            "epsilon": _known(plan, steps, releases),
            "delta": plan.delta,
            "composition": _COMPOSITION.format(_NEIGHBOURS[plan.per]),
            "per": plan.per,
        },
        "promises": [promise.to_dict() for promise in run.promises],
        "per_person": _per_person(run, releases),
        "publications": [asdict(entry) for entry in entries],
    }


def _about_epsilons(entries: Sequence[Entry]) -> bool:
    return any(entry.question["statistics"] == EPSILONS for entry in entries)


def _per_person(run: Run, releases: Releases) -> dict[str, Any] | None:
    """The total for all records of one person; None where the plan does not limit them."""
    most = run.plan.max_records_per_owner
    if most is None:
        return None
    found = person_worst_case(run, most, releases, until=run.plan.steps)
    return {
        "records": most,
        "epsilon": None if _unknown(run.plan, run.journal.charged()) else _finite(found),
        "delta": run.plan.delta,
    }


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""


def _knows_more(ledger: Path, page: dict[str, Any]) -> bool:
    return _knowledge(json.loads(ledger.read_text(encoding="utf-8"))) > _knowledge(page)


def _known(plan: Plan, steps: Sequence[int], releases: Releases) -> float | None:
    return (
        None if _unknown(plan, steps) else _finite(plan.worst_case(steps=steps, releases=releases))
    )


def _unknown(plan: Plan, steps: Sequence[int]) -> bool:
    """Whether nobody knows how many steps there will be, and none is taken: no 0 is stated."""
    return plan.endless and not sum(steps)


def _finite(epsilon: float) -> float | None:
    """JSON has no ∞: None, without a bound."""
    return epsilon if math.isfinite(epsilon) else None


def _knowledge(page: dict[str, Any]) -> tuple[int, int, int]:
    """How many questions, answers and steps it has: none of them falls."""
    return page["questions"], page["answered"], page["training"]["steps"]


def _checksums(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(".") and file.name not in _MOVING
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    with public_file(path) as file:
        file.write(json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
