"""What the page of a statement shows, from the statement as JSON: sentences, figures, a scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from epsilons.release import meaningful
from epsilons.report.sentences import guess
from epsilons.service.catalogue import Messages

# The three numbers of an example, in the order of the page: what happened, then what is promised.
_NUMBERS = ("individual", "promised", "worst_case")
WIDTH, LEFT, RIGHT = 400, 14, 386  # of the drawing, and of its axis


class Figure(NamedTuple):
    """One ε with its name, and what it says in a sentence."""

    name: str
    label: str
    value: str
    says: str


class Mark(NamedTuple):
    """Where an ε stands on the scale."""

    name: str
    x: float


class Tick(NamedTuple):
    """A number below the scale."""

    x: float
    text: str


class Scale(NamedTuple):
    """An axis from 0 to beyond the largest ε; `said` is the drawing in words."""

    marks: list[Mark]
    ticks: list[Tick]
    said: str


def numbers(statement: Mapping[str, Any]) -> dict[str, float | None]:
    """Those of the three numbers that the run has; None is ∞. A promise may not be there."""
    found = {name: statement[name] for name in _NUMBERS}
    if found["promised"] is None:
        del found["promised"]
    return found


def figures(statement: Mapping[str, Any], m: Messages) -> list[Figure]:
    """Every number of the statement with its sentence, the own ε first."""
    delta = statement["delta"]
    found = []
    for name, value in numbers(statement).items():
        if value is None or not meaningful(value, delta):
            says = m(f"{name}.nothing")
        else:
            roughly = name == "individual" and statement["kind"] == "estimate"
            key = "individual.estimate" if roughly else f"{name}.says"
            says = m(key, guess=m.percent(guess(value, delta)))
        found.append(Figure(name, m(f"{name}.label"), m.epsilon(value), says))
    return found


def scale(statement: Mapping[str, Any], m: Messages) -> Scale | None:
    """The numbers on one line; None if none is finite."""
    known = {name: value for name, value in numbers(statement).items() if value is not None}
    if not known:
        return None
    step, top = _axis(max(known.values()))

    def place(value: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * value / top, 1)

    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    ticks = [
        Tick(place(k * step), m.number(k * step, f".{digits}f"))
        for k in range(round(top / step) + 1)
    ]
    said = "; ".join(f"{m(f'{name}.label')}: {m.epsilon(value)}" for name, value in known.items())
    marks = [Mark(name, place(value)) for name, value in known.items()]
    return Scale(marks, ticks, m("scale.said", said=said, top=m.number(top, f".{digits}f")))


def _axis(largest: float) -> tuple[float, float]:
    """Step and end of an axis of at most six steps of 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return 0.2, 1.0
    power = 10.0 ** math.floor(math.log10(largest / 5))
    step = next(k * power for k in (1, 2, 5, 10) if largest <= 5 * k * power * (1 + 1e-9))
    return step, step * max(1, math.ceil(largest / step * (1 - 1e-9)))


def caveats(statement: Mapping[str, Any], m: Messages) -> list[str]:
    """What the figures are worth, and what they leave out."""
    found = [m(f"kind.{statement['kind']}")]
    if statement["per"] == "person":
        found.append(m("caveat.person"))
    if not statement["randomness"]["secret"]:
        found.append(m("caveat.not_secret"))
    if not statement["sums_covered"]:
        found.append(m("caveat.sums"))
    found += [
        m("caveat.included", steps=_steps(statement, m), releases=statement["releases"],
          date=statement["date"]),
        m("caveat.not_included"),
        m("caveat.delta", delta=m.decimal(statement["delta"])),
    ]  # fmt: skip
    return found


def records(statement: Mapping[str, Any], m: Messages) -> list[tuple[str, str, str]]:
    """Every record: its id, ε of the training alone, ε with everything let out since."""
    return [
        (record["id"], m.epsilon(record["training_epsilon"]), m.epsilon(record["epsilon"]))
        for record in statement["records"]
    ]


def published(statistics: Mapping[str, Any], unit: str, m: Messages) -> list[tuple[str, str, str]]:
    """The published statistics: name, value, and the interval that their noise leaves."""
    quantile = "published.quantile_person" if unit == "owner" else "published.quantile_record"
    rows = [
        (m(quantile, share=m.number(100 * float(share), "g")), number)
        for share, number in statistics["quantiles"].items()
    ]
    if statistics["mean"]:
        rows.append((m("published.mean"), statistics["mean"]))
    return [
        (name, m.number(n["value"]), f"{m.number(n['low'])} – {m.number(n['high'])}")
        for name, n in rows
    ]


def _steps(statement: Mapping[str, Any], m: Messages) -> str:
    planned, repeated = statement["planned_steps"], statement["repeated_steps"]
    known = "caveat.steps" if planned is None else "caveat.steps_of"
    text = m(known, steps=statement["steps"], planned=planned)
    return text + (m("caveat.repeated", repeated=repeated) if repeated else "")
