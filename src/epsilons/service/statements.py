"""The statements in the store: computed when the run has changed, and never by a request."""

from __future__ import annotations

import hashlib
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from epsilons.release import owner_names, owner_statements
from epsilons.report.published import Number, Published, read_published
from epsilons.runs import Run
from epsilons.service.store import Store
from epsilons.terminal import counting

_FORMAT = 1  # of what is stored; another one is computed anew
_STATES = ("plan.json", "anchor.json", "budget_anchor.json", "publications.json")


def state_of(run_path: str | os.PathLike[str]) -> str:
    """What changes whenever the run's journal, budget or public half does: a hash."""
    folder = Path(run_path) / "public"
    found = hashlib.sha256(f"format {_FORMAT}".encode())
    for name in _STATES:
        content = (folder / name).read_bytes() if (folder / name).exists() else b""
        found.update(hashlib.sha256(content).digest())
    return found.hexdigest()


def refresh(run_path: str | os.PathLike[str], store: Store) -> bool:
    """Compute everyone's statement anew if the run at `run_path` has changed since.

    `store`: where they are kept; all of them are replaced at once. Whether there was anything to do
    comes back. ValueError if what the figures rest on was tampered with.
    """
    basis = state_of(run_path)  # read first: what comes in between is found by the next look
    if store.basis() == basis:
        return False
    run = Run.checked(run_path)
    public = _public(run_path)
    journal = {key: public["anchor"].get(key) for key in ("head", "length", "seal")}
    made = datetime.now(UTC).isoformat(timespec="seconds")

    rows = []  # all of them before the store is touched: it is locked for a moment only
    with counting("statements", len(owner_names(run))) as advance:
        for statement in owner_statements(run):
            page = {"statement": statement.to_dict(), "journal": journal, "computed": made}
            rows.append((statement.owner, _json(page)))
            advance(len(rows))
    store.replace_statements(basis, _json(public), rows)
    return True


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _public(run_path: str | os.PathLike[str]) -> dict[str, Any]:
    """What everyone may know of the run, for machines and for the comparison on the page."""
    folder = Path(run_path) / "public"
    files = {
        name: json.loads((folder / f"{name}.json").read_bytes())
        for name in ("plan", "anchor", "publications")
        if (folder / f"{name}.json").exists()
    }
    found = read_published(run_path)
    return {
        "run": found.name,
        "plan": files["plan"],
        "anchor": files.get("anchor", {}),
        "publications": files.get("publications"),
        "statistics": _statistics(found),
    }


def _statistics(found: Published) -> dict[str, Any]:
    def plain(number: Number | None) -> dict[str, float] | None:
        return None if number is None else number._asdict()

    return {
        "mean": plain(found.mean),
        "quantiles": {f"{q:g}": plain(number) for q, number in sorted(found.quantiles.items())},
    }
