"""What a check found, and what follows from several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["kept", "contradicted", "inconclusive"]
"""What came of an attempt to contradict a claim."""


@dataclass(frozen=True)
class Check:
    """One attempt to contradict a sentence of the guarantee.

    `instrument`: which attacked. `name`: the sentence. `outcome`: `"kept"`, `"contradicted"` or
    `"inconclusive"`. `value` and `limit`: what was measured, and what it may be at most. `reason`:
    why it is inconclusive, or how it was contradicted.
    """

    instrument: str
    name: str
    outcome: Outcome
    value: float = 0.0
    limit: float = 0.0
    reason: str = ""


def together(checks: Iterable[Check]) -> Outcome:
    """Contradicted if one of the `checks` is; else kept only if all are, and there is one."""
    found = {check.outcome for check in checks}
    if "contradicted" in found:
        return "contradicted"
    return "kept" if found == {"kept"} else "inconclusive"


def at_most(instrument: str, name: str, value: float, limit: float, reason: str = "") -> Check:
    """Kept if the value is at most the limit; NaN is not."""
    outcome: Outcome = "kept" if value <= limit else "contradicted"
    return Check(instrument, name, outcome, float(value), float(limit), reason)


def p_value(instrument: str, name: str, p: float, level: float) -> Check:
    """Contradicted if what was seen is less likely than the level; NaN is."""
    outcome: Outcome = "kept" if p >= level else "contradicted"
    reason = "" if outcome == "kept" else f"so far off with probability {p:.1e}"
    return Check(instrument, name, outcome, float(p), float(level), reason)
