"""SST-2: a language model fine-tuned privately, with ε for every sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from epsilons.analysis import group_summary, loss_relation
from epsilons.analysis.figures import epsilon_histogram, group_bars, loss_scatter
from experiments import figure2, figure4, figure5, language
from experiments.lab import Lab, epsilons_of
from experiments.rows import Row, mean, scale, spread

STRICT, LOOSE, INDIVIDUAL = PRIVATE = ("sst2-3", "sst2-8", "sst2-8-individual")
PLAIN, HEADS = "sst2-plain", ("sst2-3-head", "sst2-8-head")
RUNS = (*PRIVATE, PLAIN, *HEADS)
TITLES = {STRICT: "SST-2, ε = 3", LOOSE: "SST-2, ε = 8", INDIVIDUAL: "SST-2, ε = 8, individual"}
BY = ("class", "length")
SHOWN = 3  # sentences of each end


def numbers(lab: Lab) -> dict[str, Any]:
    for name in RUNS:
        lab.runs(name)
    accuracy = {name: [e["accuracy"] for e in lab.facts(name)["found"]] for name in RUNS}
    return {"accuracy": accuracy, **{name: _private(lab, name) for name in PRIVATE}}


def _private(lab: Lab, name: str) -> dict[str, Any]:
    (run,) = lab.runs(name)
    epsilons = epsilons_of(run)
    assert lab.data is not None
    whole = language.texts(lab.data)
    texts = [whole[int(row)] for row in run.examples.ids]
    order = np.argsort(epsilons.values, kind="stable")
    return {
        "kind": epsilons.kind,
        "worst_case": epsilons.worst_case,
        "at_worst_case": float(epsilons.at_worst_case.mean()),
        "lowest": float(epsilons.values.min()),
        "quantiles_30_50_70": [float(epsilons.quantile(q)) for q in (0.3, 0.5, 0.7)],
        "relation": figure5.relations(lab, name),
        "groups": {by: figure2.summaries(lab, name, by) for by in BY},
        "agreement": None if name == INDIVIDUAL else figure4.agreements(lab, name),
        "largest": [[texts[i], float(epsilons.values[i])] for i in order[: -SHOWN - 1 : -1]],
        "smallest": [[texts[i], float(epsilons.values[i])] for i in order[:SHOWN]],
    }


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(11, 2.6 * len(PRIVATE)), layout="constrained", dpi=90)
    for row, name in zip(figure.subplots(len(PRIVATE), 3), PRIVATE, strict=True):
        (run,) = lab.runs(name)
        epsilons = epsilons_of(run)
        epsilon_histogram(row[0], epsilons)
        group_bars(row[1], group_summary(epsilons, run.examples, run.test, "length"))
        loss_scatter(row[2], loss_relation(epsilons, run.examples.losses))
        row[0].set_ylabel(TITLES[name].replace(", ", ",\n"))
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    def percent(name: str) -> str:
        return f"{spread(found['accuracy'][name], 1, 100)} %"

    size = scale(facts[LOOSE])
    heads = " and ".join(percent(name) for name in HEADS)
    return [
        Row("Text", "accuracy at ε = 3 and 8, adapters of every layer", "–",
            f"{percent(STRICT)} and {percent(LOOSE)}; head alone {heads}; "
            f"not private {percent(PLAIN)}", size, None),
        Row("Text", "individual clipping does not change the accuracy", "as in Table 3",
            f"{percent(INDIVIDUAL)} against {percent(LOOSE)}", scale(facts[INDIVIDUAL]),
            abs(mean(found["accuracy"][INDIVIDUAL]) - mean(found["accuracy"][LOOSE])) < 0.015),
        *(row for name in PRIVATE for row in _rows_of(name, found[name], scale(facts[name]))),
    ]  # fmt: skip


def _rows_of(name: str, part: dict[str, Any], size: str) -> list[Row]:
    title = TITLES[name]
    lengths = part["groups"]["length"]["groups"]
    found = [
        Row("Text", f"{title}: range of ε, share at the worst case", "–",
            f"{part['lowest']:.2f} … {part['worst_case']:.1f}, "
            f"{100 * part['at_worst_case']:.0f} %", size, None),
        Row("Text", f"{title}: the sentences of the largest and of the least ε", "–",
            "; ".join(f"“{text}” {value:.2f}" for text, value in
                      (part["largest"][0], part["smallest"][0])), size, None),
        Row("Text", f"{title}: mean ε by length", "–",
            ", ".join(f"{group} {of['mean_epsilon']:.2f}" for group, of in lengths.items()),
            size, None),
        figure5.row(part["relation"], "Text", title, "as in Fig. 5: > 0.9", size, figure5.PAPER),
    ]  # fmt: skip
    if part["agreement"] is not None:
        found += [
            figure4.row(each, "Text", f"{title}, γ = {float(gamma):g}", size)
            for gamma, each in part["agreement"].items()
        ]
    return found
