"""The public report: the same story from what is in `public/` alone.

| file                | what it tells                                                  |
|---------------------|----------------------------------------------------------------|
| `plan.json`         | the plan, its worst case with the steps repeated               |
| `anchor.json`       | head, length and seal of the journal                           |
| `publications.json` | statistics published under differential privacy, and the total |
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from epsilons.accounting.plan import Plan
from epsilons.accounting.printed import epsilon_text
from epsilons.accounting.results import Kind
from epsilons.analysis.figures import published_intervals
from epsilons.files import public_file
from epsilons.randomness import Randomness
from epsilons.release import renew_ledger
from epsilons.release.ledger import EPSILONS
from epsilons.report.audited import Audited, audit_chart, publish_audit, read_audit
from epsilons.report.charts import Chart, chart, rows_height
from epsilons.report.page import TITLE, render
from epsilons.report.sentences import drawn_together, guess, per_person_published, promised
from epsilons.runs import Run

_BOUND = "median of initial gradient norms"
_NOISE = "what is published of them carries noise, whose effect the intervals show."
WORTH: dict[str | None, tuple[str, str]] = {
    "exact": (
        "exact, plus noise",
        f"Each individual ε follows from what the steps really used; {_NOISE}",
    ),
    "bound": ("upper bounds, plus noise", f"Each individual ε is an upper bound; {_NOISE}"),
    "estimate": (
        "estimates, plus noise",
        "Each individual ε is an estimate, from norms refreshed now and then or of other random "
        "draws than the steps had. It is the cautious reading, by the larger of the norms before "
        f"and after a step: mostly too high, and may be too low. On top, {_NOISE}",
    ),
    "none": ("certain", "There is no ε."),
    None: ("not stated", "What the individual ε’s are worth is stated with what is published."),
}
_SAME = 1e-6  # relative: the same worst case, computed twice


class Number(NamedTuple):
    """A published number with the interval that its noise leaves, 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Published:
    """What `public/` tells. `mean`, `quantiles` and `groups` are of the latest publication.

    `kind`: what the individual ε's are worth, as stated with the publications; None if nothing is.
    `sums_covered`: as stated there; False in a ledger that says nothing of it. `promises`: what
    each budget was promised before training.
    """

    name: str
    plan: Plan
    kind: Kind | None
    worst_case: float
    repeated: int
    seed: int | None
    randomness: Randomness
    sums_covered: bool
    anchor: Mapping[str, Any]
    ledger: Mapping[str, Any] | None
    mean: Number | None
    quantiles: Mapping[float, Number]
    groups: Mapping[str, Mapping[str, Number | None]]
    clip_bound: Number | None
    promises: Sequence[Mapping[str, Any]] = ()
    audited: Audited | None = None


def write_public_report(run: str | os.PathLike[str]) -> Path:
    """Write `public/report.html` from the run's public files and say where it is.

    In the curator's hands the journal is at hand: the public files are checked against it first,
    and the costs of publications brought up to date. `run`: the path of its folder, or of a copy
    that has the public half alone. ValueError if the public files are damaged.
    """
    folder = Path(run) / "public"
    if (Path(run) / "private" / "journal.sqlite").is_file():
        renew_ledger(Run.checked(run))
        publish_audit(Path(run))
    page = render_public_report(read_published(run)).encode()
    target = folder / "report.html"
    with public_file(target) as file:
        file.write(page)
    _renew_checksum(folder / "checksums.json", target.name, page)
    return target


def read_published(run: str | os.PathLike[str]) -> Published:
    """What everyone can read of a run; nothing below `private/` is opened."""
    try:
        return _published(Path(run))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{Path(run) / 'public'} was damaged: {error!r}") from error


def _published(run: Path) -> Published:
    folder = run / "public"
    summary = _json(folder / "plan.json")
    if summary is None:
        raise ValueError(f"{run} is not a run folder: {folder / 'plan.json'} is not there")
    ledger = _json(folder / "publications.json")
    answered = [
        entry for entry in (ledger or {}).get("publications", ()) if entry["answer"] is not None
    ]
    parts = [e["answer"] for e in answered if e["question"]["statistics"] == EPSILONS]
    bounds = [e["answer"] for e in answered if e["question"]["statistics"] == _BOUND]
    means = [part["everyone"]["mean"] for part in parts if part["everyone"]["mean"]]
    plan = Plan.from_dict(summary["plan"])
    return Published(
        name=run.resolve().name,
        plan=plan,
        kind="none" if plan.kind == "none" else (ledger or {}).get("kind"),
        worst_case=_worst_case(plan, summary, ledger),
        repeated=summary.get("repeated_steps", 0),
        seed=summary["seed"],
        randomness=Randomness.recorded(summary),
        sums_covered=(ledger or {}).get("training", {}).get("sums_covered", False),
        anchor=_json(folder / "anchor.json") or {},
        ledger=ledger,
        mean=_number(means[-1]) if means else None,
        quantiles=_quantiles(parts),
        groups=_groups(parts),
        clip_bound=_number(bounds[-1]) if bounds else None,
        promises=tuple(summary.get("promises", ())),
        audited=read_audit(folder),
    )


def render_public_report(found: Published) -> str:
    """The page as text."""
    return render(
        "public.html.j2",
        title=TITLE,
        kicker=f"public report on {found.name}",
        f=found,
        guess=guess(found.worst_case, found.plan.delta),
        per_person=drawn_together(found.plan)
        if found.plan.unit == "owner"
        else per_person_published((found.ledger or {}).get("per_person")),
        promised=promised([(one["budget"], one["epsilon"]) for one in found.promises]),
        half=found.quantiles.get(0.5),
        worth=WORTH[found.kind],
        charts=_charts(found),
        audit_charts=audit_chart(found.audited),
    )


def _charts(found: Published) -> list[Chart]:
    charts = []
    rows = [(f"{100 * q:.4g} %", *number) for q, number in sorted(found.quantiles.items())]
    if found.mean:
        rows.append(("mean", *found.mean))
    if rows:
        said = ", ".join(
            f"{name}: {value:.3f} ({low:.3f}–{high:.3f})" for name, value, low, high in rows
        )
        charts.append(
            chart("quantiles", "Below which ε so many examples are",
                  f"Published with 95 % intervals: {said}. The worst case is "
                  f"{epsilon_text(found.worst_case)}.",
                  lambda axes: published_intervals(axes, rows, found.worst_case),
                  height=rows_height(len(rows)))
        )  # fmt: skip
    for k, (column, parts) in enumerate(found.groups.items()):
        known = [(label, *number) for label, number in parts.items() if number is not None]
        if known:
            known.sort(key=lambda row: -row[1])
            top, low = known[0], known[-1]
            charts.append(
                chart(f"groups-{k}", f"Mean ε by {column}",
                      f"Highest for {column} {top[0]}, {top[1]:.3f} ({top[2]:.3f}–{top[3]:.3f}); "
                      f"lowest for {low[0]}, {low[1]:.3f} ({low[2]:.3f}–{low[3]:.3f}).",
                      lambda axes, known=known: published_intervals(  # type: ignore[misc]
                          axes, known, found.worst_case),
                      height=rows_height(len(known)))
            )  # fmt: skip
    return charts


def _worst_case(plan: Plan, summary: Mapping[str, Any], ledger: Mapping[str, Any] | None) -> float:
    """The total as the ledger has it, else the plan's; ∞ if the run is not private."""
    if plan.kind == "none":
        return math.inf
    known = summary["worst_case"]
    planned = float(next(iter(known.values()))) if known else None
    stated = None if ledger is None else ledger["total"]["epsilon"]
    told = None if stated is None else float(stated)
    if told is not None and planned is not None and told < planned * (1 - _SAME):
        raise ValueError(
            f"publications.json states ε = {epsilon_text(told)} in all, plan.json "
            f"{epsilon_text(planned)}: steps were repeated since. `epsilons report --public` "
            "renews it in the whole folder"
        )
    found = planned if told is None else told
    if found is None:
        raise ValueError(
            "the plan has no last step, so that its worst case is not known; "
            "it is published with the first statistics (epsilons publish)"
        )
    return found


def _quantiles(parts: list[dict[str, Any]]) -> dict[float, Number]:
    """The quantiles of everyone; of several publications the latest that has them."""
    found = [part["everyone"]["quantiles"] for part in parts if part["everyone"]["quantiles"]]
    return {float(q): _number(value) for q, value in found[-1].items()} if found else {}


def _groups(parts: list[dict[str, Any]]) -> dict[str, dict[str, Number | None]]:
    """Mean ε by column and label; None where the group is too small to publish."""
    found: dict[str, dict[str, Number | None]] = {}
    for part in parts:
        for column, by in part["groups"].items():
            found[column] = {
                label: _number(one["mean"]) if one and one["mean"] else None
                for label, one in by.items()
            }
    return found


def _number(fields: Mapping[str, float]) -> Number:
    return Number(fields["value"], fields["low"], fields["high"])


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged: {error}; put it back from a copy of the run folder"
        ) from error
    return found


def _renew_checksum(checksums: Path, name: str, content: bytes) -> None:
    """Enter the file into the list of checksums, if there is one."""
    known = _json(checksums)
    if known is not None:
        known[name] = hashlib.sha256(content).hexdigest()
        with public_file(checksums) as file:
            file.write(json.dumps(known, indent=2, sort_keys=True).encode() + b"\n")
