"""What came of `epsilons audit`, as the reports show it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epsilons.analysis.figures import audit_strips
from epsilons.files import public_file
from epsilons.report.charts import Chart, chart, rows_height

AUDIT = "audit.json"
# Instruments that look at planted examples alone: what they found depends on no data.
_PLANTED = frozenset({"noise", "coins", "keys"})


@dataclass(frozen=True)
class Audited:
    """An attempt to contradict the run's claims: by whom it is not said, as it is not proved.

    `strata`: name, lower bound, claim. `checks`: instrument, how many kept, of how many.
    """

    outcome: str
    sentence: str
    reasons: tuple[str, ...]
    strata: tuple[tuple[str, float, float], ...]
    checks: tuple[tuple[str, int, int], ...]


def read_audit(folder: Path) -> Audited | None:
    """What is in the folder's audit.json; None if there is none, ValueError if it is damaged."""
    file = folder / AUDIT
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        instruments = dict.fromkeys(check["instrument"] for check in found["checks"])
        outcomes = {
            name: [c["outcome"] for c in found["checks"] if c["instrument"] == name]
            for name in instruments
        }
        return Audited(
            outcome=str(found["outcome"]),
            sentence=str(found["sentence"]),
            reasons=tuple(map(str, found["reasons"])),
            strata=tuple(
                (str(s["name"]), max(float(s["bounds"][b]) for b in ("family", "exact")),
                 float(s["claim"]))
                for s in found["strata"]
            ),
            checks=tuple(
                (str(name), each.count("kept"), len(each)) for name, each in outcomes.items()
            ),
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged: {error!r}; `epsilons audit` writes it anew"
        ) from error


def publish_audit(run: Path) -> None:
    """Write what depends on no data, the planted examples and their noise and coins, for everyone.

    Nothing if the run was not audited, or if what is private contradicted it: then the public part
    alone would mislead.
    """
    private, public = run / "private" / AUDIT, run / "public" / AUDIT
    found = read_audit(run / "private")
    if found is None:
        return
    content: Mapping[str, Any] = json.loads(private.read_text(encoding="utf-8"))
    checks = [check for check in content["checks"] if check["instrument"] in _PLANTED]
    kept = [check["outcome"] for check in checks] + [s["outcome"] for s in content["strata"]]
    planted = "contradicted" in kept
    if content["outcome"] != "kept" and not planted:
        public.unlink(missing_ok=True)
        return
    part = {
        "outcome": content["outcome"],
        "sentence": _CONTRADICTED if planted else content["sentence"],
        "reasons": [],
        "strata": content["strata"],
        "checks": checks,
    }
    with public_file(public) as file:
        file.write(json.dumps(part, indent=2, ensure_ascii=False).encode() + b"\n")


_CONTRADICTED = "We tried to contradict the guarantee, and could, by planted examples."


def audit_chart(found: Audited | None) -> list[Chart]:
    """A strip from bound to claim for each stratum; none if the run was not audited."""
    if found is None or not found.strata:
        return []
    said = "; ".join(
        f"{name}: at least {low:.3f} of {claim:.3f}" for name, low, claim in found.strata
    )
    return [
        chart("audit", "From what an attack shows to what is stated", f"{said}.",
              lambda axes: audit_strips(axes, found.strata),
              height=rows_height(len(found.strata)))
    ]  # fmt: skip
