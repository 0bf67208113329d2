"""UTKFace, gender and age under 30, groups by race: where --data has the folder UTKFace.

Four races, labels balanced within each. The paper starts ResNet20 from weights that ImageNet
trained; here a linear model is trained on features of a network that ImageNet trained
(`pretrained`). `utkface_resnet20` has ResNet20 from scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from epsilons.analysis import group_summary, loss_relation, loss_threshold_attack
from epsilons.analysis.figures import epsilon_histogram, group_bars, loss_scatter
from experiments import figure2, figure4, figure5
from experiments.lab import Lab, epsilons_of
from experiments.rows import TITLES, Row, mean, scale, spread

RUNS = ("utkface-gender-imagenet", "utkface-age-imagenet")
BY = "race"
GUESSING, NEAR = 0.5, 0.03


def numbers(lab: Lab, runs: Sequence[str] = RUNS) -> dict[str, Any]:
    return {name: _task(lab, name) for name in runs}


def _task(lab: Lab, name: str) -> dict[str, Any]:
    epsilons = [epsilons_of(run) for run in lab.runs(name)]
    return {
        "accuracy": [entry["accuracy"] for entry in lab.facts(name)["found"]],
        "worst_case": [e.worst_case for e in epsilons],
        "at_worst_case": [float(e.at_worst_case.mean()) for e in epsilons],
        "lowest": [float(e.values.min()) for e in epsilons],
        "quantiles_30_50_70": [[float(e.quantile(q)) for q in (0.3, 0.5, 0.7)] for e in epsilons],
        "groups": figure2.summaries(lab, name, BY),
        "agreement": figure4.agreements(lab, name),
        "relation": figure5.relations(lab, name),
        "attack": attacks(lab, name),
    }


def attacks(lab: Lab, name: str) -> list[dict[str, float]]:
    """Success of a threshold on the loss, on everyone and by race, for each seed."""
    each = [loss_threshold_attack(run.examples, run.test, BY) for run in lab.runs(name)]
    return [
        {"everyone": attack.everyone.success, **{str(r.group): r.success for r in attack.rows}}
        for attack in each
    ]


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(11, 2.6 * len(found)), layout="constrained", dpi=90)
    for row, name in zip(figure.subplots(len(found), 3), found, strict=True):
        run = lab.runs(name)[0]
        epsilons = epsilons_of(run)
        epsilon_histogram(row[0], epsilons)
        group_bars(row[1], group_summary(epsilons, run.examples, run.test, BY))
        loss_scatter(row[2], loss_relation(epsilons, run.examples.losses))
        row[0].set_ylabel(TITLES[name].replace(", ", ",\n"))
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    return [row for name in found for row in _rows_of(name, found[name], scale(facts[name]))]


def _rows_of(name: str, part: dict[str, Any], size: str) -> list[Row]:
    groups, title = part["groups"], TITLES[name]
    expected = "Asian over Indian +35.1 %" if "gender" in name else "worse accuracy, larger ε"
    gap = [value for value in groups["gap_percent"] if value is not None]
    order = [value for value in groups["rank_correlation"] if value is not None]
    pair = f"{groups['least_accurate'][0]} over {groups['most_accurate'][0]}"
    return [
        Row("Fig. 1", f"{title}: range of ε, share at the worst case", "0.1 … 4.5",
            f"{spread(part['lowest'], 2)} … {max(part['worst_case']):.1f}, "
            f"{spread(part['at_worst_case'], 1, 100)} %; accuracy "
            f"{spread(part['accuracy'], 1, 100)} %", size, None),
        Row("Fig. 2, 6", f"{title}: mean ε of the least over the most accurate race", expected,
            f"{pair} {spread(gap, 1, signed=True)} %" if gap else "groups too small", size,
            min(gap) > 0 if gap else None),
        Row("Fig. 2, 6", f"{title}: rank correlation of accuracy and mean ε of the races",
            "negative", spread(order, 2), size, sum(order) < 0 if order else None),
        *(figure4.row(part["agreement"][gamma], "Fig. 4", f"{title}, γ = {float(gamma):g}", size)
          for gamma in part["agreement"]),
        figure5.row(part["relation"], "Fig. 5", title, "> 0.9", size, figure5.PAPER),
        attack_row(f"{title}, with DP: success is near guessing in every race", "≈ 50 %",
                   part["attack"], size, near=True),
    ]  # fmt: skip


def attack_row(
    claim: str, paper: str, each: list[dict[str, float]], size: str, *, near: bool
) -> Row:
    """Success of the attack by race, mean of the seeds: `near` guessing, or above it."""
    success = {group: mean([one[group] for one in each]) for group in each[0]}
    far = max(abs(share - GUESSING) for share in success.values())
    return Row("App. D", claim, paper,
               ", ".join(f"{group} {100 * share:.1f} %" for group, share in success.items()), size,
               far < NEAR if near else success["everyone"] > GUESSING + NEAR)  # fmt: skip
