"""Appendix D: membership inference by a threshold on the loss, by class, with and without DP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from epsilons.analysis import loss_threshold_attack
from epsilons.analysis.figures import attack_success
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, scale

ATTACKED = ("cifar10-plain", "cifar10-attacked")
RANKED = "cifar10-cnn"  # whose mean ε orders the classes: those of the attacked run are all at C
RUNS = (*ATTACKED, RANKED)
BY = "class"
GROUPS = ("cat", "ship")
PAPER = {"cat": 0.797, "ship": 0.614}
GUESSING = 0.03


def numbers(lab: Lab) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ATTACKED:
        run = lab.runs(name)[0]
        attack = loss_threshold_attack(run.examples, run.test, BY)
        found[name] = {
            "everyone": attack.everyone.success,
            "groups": {str(row.group): row.success for row in attack.rows},
            "intervals": {str(row.group): list(row.interval) for row in attack.rows},
            "test_accuracy": lab.facts(name)["found"][0]["accuracy"],
        }
    private = lab.runs(RANKED)[0]
    values, labels = epsilons_of(private).values, private.examples.groups[BY]
    found["mean_epsilon"] = {g: float(values[labels == g].mean()) for g in sorted(set(labels))}
    return found


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    attacks = {
        label: loss_threshold_attack(run.examples, run.test, BY)
        for label, run in (
            ("without DP", lab.runs(ATTACKED[0])[0]),
            ("with DP", lab.runs(ATTACKED[1])[0]),
        )
    }
    order = sorted(found["mean_epsilon"], key=found["mean_epsilon"].__getitem__)
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    attack_success(figure.subplots(), attacks, order)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    plain, private = (found[name] for name in ATTACKED)
    hard, easy = _two(found["mean_epsilon"])
    names = sorted(found["mean_epsilon"])
    ranks = spearmanr(
        [found["mean_epsilon"][g] for g in names], [plain["groups"][g] for g in names]
    )
    most = max(abs(s - 0.5) for s in private["groups"].values())
    return [
        Row("App. D", "without DP: success on the class of worst and of best ε",
            "Cat 79.7 %, Ship 61.4 %",
            ", ".join(f"{g} {100 * plain['groups'][g]:.1f} %" for g in (hard, easy)),
            scale(facts[ATTACKED[0]]), plain["groups"][hard] > plain["groups"][easy]),
        Row("App. D", "without DP: rank correlation of success and mean ε (of Fig. 2’s tanh CNN)",
            "positive", f"{float(np.asarray(ranks.statistic)):.2f}", scale(facts[ATTACKED[0]]),
            bool(ranks.statistic > 0.5)),
        Row("App. D", "with DP: success is near guessing in every class", "≈ 50 %",
            f"{100 * private['everyone']:.1f} %, classes within {100 * most:.1f} points of 50 %",
            scale(facts[ATTACKED[1]]), most < GUESSING),
    ]  # fmt: skip


def _two(means: dict[str, float]) -> tuple[str, str]:
    """The paper's two classes; of other data those of the largest and the least mean ε."""
    if set(GROUPS) <= set(means):
        return GROUPS
    return max(means, key=means.__getitem__), min(means, key=means.__getitem__)
