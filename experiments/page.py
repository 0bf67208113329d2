"""The generated parts of docs/reproduction.md, from the JSON of the results.

python -m experiments.page            write them
python -m experiments.page --check    exit 1 if they differ from what is written
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.catalogue import EXPERIMENTS
from experiments.presets import PRESETS
from experiments.reasons import REASONS
from experiments.recipes import Recipe
from experiments.rows import DATA, NETWORKS, Row

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
RESULTS = Path(__file__).parent / "results"
BEYOND = "Beyond"


def generated(results: Path = RESULTS) -> dict[str, str]:
    """Markdown of each generated part, by the name in its markers."""
    found = stored(results)
    rows = [row for name, result in found.items() for row in _rows(name, result)]
    return {
        "verdict": _verdict(rows, found),
        "claims": _table([row for row in rows if row.where != BEYOND]),
        "beyond": _table([row for row in rows if row.where == BEYOND]),
        "settings": _settings(found),
        "times": _times(found),
    }


def stored(results: Path) -> dict[str, Any]:
    """The results by experiment, in the order of the paper."""
    files = {name: results / f"{name}.json" for name in EXPERIMENTS}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name, file in files.items()
        if file.exists()
    }


def inserted(page: str, parts: Mapping[str, str]) -> str:
    """The page with each part between its markers."""
    for name, text in parts.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page needs {begin} and {end}, once each")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def _rows(name: str, result: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = EXPERIMENTS[name].rows(result["numbers"], result["runs"])
    return rows


def _table(rows: list[Row]) -> str:
    lines = ["| where | claim | paper | ours | scale | agrees? |", "|---|---|---|---|---|---|"]
    for row in rows:
        why = REASONS.get((row.where, row.claim), "") if row.agrees is False else ""
        verdict = f"{row.verdict}{'; ' if row.why and why else ': ' if why else ''}{why}"
        cells = (row.where, row.claim, row.paper, row.ours, row.scale, verdict)
        lines.append("| " + " | ".join(cell.replace("|", "∣") for cell in cells) + " |")
    return "\n".join(lines)


def _verdict(rows: list[Row], found: Mapping[str, Any]) -> str:
    judged = [row for row in rows if row.agrees is not None]
    yes = sum(row.agrees is True for row in judged)
    missing = [name for name in EXPERIMENTS if name not in found]
    said = f"Of {len(judged)} claims that were judged, {yes} agree and {len(judged) - yes} do not."
    if missing:
        said += f" Not run here: {', '.join(missing)}."
    return said


def _trained(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of each training that was run, and what was found in its runs."""
    known: dict[str, dict[str, Any]] = {}
    for result in found.values():
        known |= result["runs"]
    return {name: known[name] for name in PRESETS["cpu"] if name in known}


def _recipe(facts: Mapping[str, Any]) -> Recipe:
    fields = {field.name: facts[field.name] for field in dataclasses.fields(Recipe)}
    return Recipe(**{**fields, "seeds": tuple(facts["seeds"])})


def _settings(found: Mapping[str, Any]) -> str:
    """One line per training: what the paper's preset has, and what was run here."""
    lines = ["| training | `paper` | `cpu` |", "|---|---|---|"]
    trained = _trained(found)
    for name, recipe in PRESETS["paper"].items():
        ours = _words(_recipe(trained[name])) if name in trained else "not run"
        lines.append(f"| {name} | {_words(recipe)} | {ours} |")
    return "\n".join(lines)


def _words(recipe: Recipe) -> str:
    bound = f"{recipe.factor:g} × median norm" if recipe.bound is None else f"{recipe.bound:g}"
    often = "none"
    if recipe.refresh_every:
        often = f"K = {recipe.refresh_every}"
    elif recipe.refreshes_per_epoch:
        often = f"γ = {recipe.refreshes_per_epoch:g}"
    privacy = "not private" if recipe.epsilon is None else f"ε {recipe.epsilon:g}, C {bound}"
    size = "all" if recipe.n is None else f"{recipe.n:,}"
    extra = "".join(
        f", {text}"
        for text, said in (
            ("hinge loss", recipe.loss == "hinge"),
            ("individual clipping", recipe.clipping == "individual"),
        )
        if said
    )
    return (
        f"{DATA[recipe.data]} n {size}, {NETWORKS[recipe.network]}, batch {recipe.batch:g}, "
        f"{recipe.epochs:g} epochs, {privacy}, {often}, seeds {len(recipe.seeds)}{extra}"
    )


def _times(found: Mapping[str, Any]) -> str:
    """One line per training: what it took, and what it came to."""
    lines = [
        "| training | n | steps | noise multiplier | C | test accuracy in % | "
        "core seconds per seed | of it norm passes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    spent: dict[Recipe, list[float]] = {}  # a training with two names was run once
    for name, facts in _trained(found).items():
        each = facts["found"]
        spent[_recipe(facts)] = [entry["core_seconds"] / 60 for entry in each]
        first = each[0]
        accuracy = " ".join(f"{100 * entry['accuracy']:.2f}" for entry in each)
        core = sum(entry["core_seconds"] for entry in each) / len(each)
        passes = sum(e["refresh_seconds"] / e["seconds"] for e in each) / len(each)
        lines.append(
            f"| {name} | {first['n']:,} | {first['steps']} | {first['noise_multiplier']:.3f} | "
            f"{first['bound']:.3f} | {accuracy} | {core:.0f} | {100 * passes:.0f} % |"
        )
    each_run = [minutes for seeds in spent.values() for minutes in seeds]
    total = (
        f"All {len(each_run)} runs: {sum(each_run):.0f} core minutes; "
        f"the longest: {max(each_run):.0f}."
    )
    return "\n".join([*lines, "", total])


def main(arguments: list[str] | None = None) -> int:
    ask = argparse.ArgumentParser(prog="python -m experiments.page", description=__doc__)
    ask.add_argument("--check", action="store_true", help="write nothing")
    given = ask.parse_args(arguments)
    before = PAGE.read_text(encoding="utf-8")
    after = inserted(before, generated())
    if given.check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
