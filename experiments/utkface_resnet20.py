"""UTKFace by ResNet20-GN from scratch, both tasks, and without privacy (Appendix D)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments import utkface
from experiments.lab import Lab
from experiments.rows import Row, scale

PRIVATE, PLAIN = ("utkface-gender", "utkface-age"), "utkface-gender-plain"
RUNS = (*PRIVATE, PLAIN)


def numbers(lab: Lab) -> dict[str, Any]:
    return {"private": utkface.numbers(lab, PRIVATE), PLAIN: utkface.attacks(lab, PLAIN)}


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    utkface.picture(lab, found["private"], file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    plain = utkface.attack_row(
        "UTKFace gender, without DP: success by race", "above guessing", found[PLAIN],
        scale(facts[PLAIN]), near=False,
    )  # fmt: skip
    return [*utkface.rows(found["private"], facts), plain]
