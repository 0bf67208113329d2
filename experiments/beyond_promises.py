"""Beyond the paper: what budgets of one's own cost in accuracy, kept by Scale or by a filter.

Everyone has chosen one of a few ε's, dealt out by position. Scale keeps all of them in one
training. The alternatives: the smallest for everyone, or a larger one for those alone who allow it.
A filter keeps ε = 1 for everyone, paced or as Feldman & Zrnic have it, with bounds up to twice the
paced one. Clip bounds and learning rates were chosen on other seeds, for each kind of training.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Examples, Plan, Run
from epsilons.data import Data, adult, digits, fewer, mnist
from epsilons.training import correct_class, fit, supervised
from experiments.lab import Lab
from experiments.rows import Row, spread

RUNS = ()
FZ = "filter ε = 1, Feldman–Zrnic"
TITLES = {"digits": "digits", "mnist": "MNIST", "adult": "Adult"}


@dataclass(frozen=True)
class Setting:
    """A data set, what is the same for all trainings on it, and C and rate · C by training.

    `most`: so many of the training examples; None: all.
    """

    budgets: tuple[float, ...]
    sample_rate: float
    steps: int
    delta: float
    refresh_every: int
    seeds: tuple[int, ...]
    tuned: Mapping[str, tuple[float, float]]
    filters: bool = True
    momentum: float = 0.0
    most: int | None = None


_DIGITS = Setting(
    budgets=(1, 2, 4), sample_rate=0.2, steps=150, delta=1e-4, refresh_every=10,
    seeds=tuple(range(1, 11)),
    tuned={
        "1": (0.5, 2.0), "2": (0.25, 2.0), "4": (0.5, 2.0), "scale": (0.5, 4.0), "fz": (4.0, 2.0),
    },
)  # fmt: skip
_MNIST = Setting(
    budgets=(1, 2, 4), sample_rate=0.05, steps=400, delta=1e-5, refresh_every=20,
    seeds=(1, 2, 3, 4, 5),
    tuned={
        "1": (1.0, 4.0), "2": (0.5, 4.0), "4": (1.0, 4.0), "scale": (1.0, 8.0), "fz": (4.0, 4.0),
    },
)  # fmt: skip
_ADULT = Setting(
    budgets=(1, 4), sample_rate=1024 / 32561, steps=600, delta=1e-5, refresh_every=20,
    seeds=(1, 2, 3, 4), filters=False, momentum=0.9,
    tuned={"1": (1.0, 0.5), "4": (1.0, 0.5), "scale": (1.0, 0.5)},
)  # fmt: skip
SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "smoke": {
        "digits": dataclasses.replace(_DIGITS, steps=4, refresh_every=2, seeds=(1,), most=90)
    },
    "cpu": {"digits": _DIGITS, "adult": _ADULT, "mnist": _MNIST},
    "paper": {"digits": _DIGITS, "adult": _ADULT, "mnist": _MNIST},
}


def numbers(lab: Lab) -> dict[str, Any]:
    """Accuracy of every training by seed; the largest realised ε over what was promised."""
    return {name: _measured(lab, name, s) for name, s in SETTINGS[lab.preset].items()}


def _measured(lab: Lab, name: str, setting: Setting) -> dict[str, Any]:
    data = _data(lab, name)
    if setting.most is not None:
        data = fewer(data, setting.most)
    own = np.array(setting.budgets)[np.arange(len(data.examples)) % len(setting.budgets)]
    found: dict[str, Any] = {}
    for seed in setting.seeds:
        for title in _titles(setting):
            one = _result(lab, name, setting, title, seed, data, own)
            for key, value in one.items():
                found.setdefault(title, {}).setdefault(key, []).append(value)
    return {
        "n": len(data.examples),
        "steps": setting.steps,
        "delta": setting.delta,
        "trainings": found,
    }


def _titles(setting: Setting) -> list[str]:
    least, *others = setting.budgets
    plain = [f"plain, ε = {least:g} for all", "Scale, all budgets"]
    plain += [f"plain, ε = {b:g}, who allows it" for b in others]
    return plain + (["filter ε = 1, paced", FZ, f"{FZ}, noise × 0.7"] if setting.filters else [])


def _result(
    lab: Lab,
    name: str,
    setting: Setting,
    title: str,
    seed: int,
    data: Data,
    own: np.ndarray[Any, Any],
) -> dict[str, float]:
    """One training; its figures are kept, its folder is not."""
    file = lab.folder / "promises" / f"{name} {title} {seed}.json"
    if file.exists():
        kept: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
        return kept
    began = time.monotonic()
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=file.parent))
    try:
        run = _trained(name, setting, title, seed, data, own, folder / "run")
        assert run.test is not None
        assert run.test.correct is not None
        result = {"accuracy": float(run.test.correct.mean()), **_kept(run)}
        result["seconds"] = round(time.monotonic() - began, 1)
        run.journal.close()
    finally:
        shutil.rmtree(folder)
    file.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def _kept(run: Run) -> dict[str, float]:
    """The promises, found anew from the journal: verified, and what was spent of them at most."""
    if not run.promises:
        return {}
    realised = run.verify().epsilons.values
    last = run.plan.steps - 1
    promised = {promise.budget: promise.epsilon for promise in run.promises}
    most = np.array([promised[budget] for budget in run.examples.budgets])
    out = run.journal.bounds(last, np.arange(run.plan.n)) == 0
    return {"largest_share_of_promise": float((realised / most).max()), "out": float(out.mean())}


def _trained(
    name: str,
    setting: Setting,
    title: str,
    seed: int,
    data: Data,
    own: np.ndarray[Any, Any],
    out: Path,
) -> Run:
    kind, _, asked = title.partition("ε = ")
    who = np.ones(len(own), dtype=bool)
    if title.startswith("Scale"):
        bound, rate = setting.tuned["scale"]
    else:
        epsilon = float(asked.partition(",")[0].split()[0])
        bound, rate = setting.tuned["fz" if title.startswith(FZ) else f"{epsilon:g}"]
        if "allows" in title:
            who = own >= epsilon
    rows = np.flatnonzero(who)
    common: dict[str, Any] = dict(
        n=len(rows), sample_rate=setting.sample_rate, steps=setting.steps, delta=setting.delta
    )
    if title.startswith("Scale"):
        plan = Plan.for_budgets(
            setting.budgets, max_grad_norm=bound, refreshes_per_epoch=0, **common
        )
    elif kind.startswith("plain"):
        plan = Plan.for_epsilon(epsilon, max_grad_norm=bound, refreshes_per_epoch=0, **common)
    else:
        plan = _filter_plan(setting, title, bound, common)
    torch.manual_seed(seed)
    model = _model(name, data)
    examples = Examples(
        ids=np.asarray(data.examples.ids)[rows],
        budgets=own[rows] if title.startswith("Scale") else None,
    )
    train = TensorDataset(*(tensor[torch.from_numpy(rows)] for tensor in _tensors(data.train)))
    return fit(
        model,
        torch.optim.SGD(model.parameters(), lr=rate / bound, momentum=setting.momentum),
        supervised(nn.CrossEntropyLoss(reduction="none")),
        train,
        plan,
        out=out,
        examples=examples,
        test=data.test,
        test_examples=data.test_examples,
        correct_fn=correct_class,
        seed=seed,
        micro_batch=1024,
    )


def _filter_plan(setting: Setting, title: str, bound: float, common: Mapping[str, Any]) -> Plan:
    """Noise with which `bound` lasts for all steps at ε = 1, or 0.7 times that; bounds to twice."""
    how: dict[str, Any] = dict(common, clipping="filtered", refresh_every=setting.refresh_every)
    plan = Plan.for_budgets(
        (1,), max_grad_norm=bound, pace=1.0 if title.startswith(FZ) else 0.0, **how
    )
    noise = plan.noise_multiplier / 2 * (0.7 if "0.7" in title else 1.0)
    return dataclasses.replace(plan, max_grad_norm=2 * bound, noise_multiplier=noise)


def _data(lab: Lab, name: str) -> Data:
    if name == "digits":
        return digits()
    if lab.data is None:
        raise ValueError(f"{name} needs --data, the folder that holds it")
    if name == "adult":
        return adult(lab.data / "adult")
    data = mnist(lab.data)
    few = 20_000
    return dataclasses.replace(
        data,
        train=_halved(data.train, few),
        test=_halved(data.test, None),
        examples=Examples(ids=data.examples.ids[:few]),
    )


def _halved(pictures: Any, count: int | None) -> TensorDataset:
    """The first `count` pictures, 14×14 each, as vectors."""
    x, y = _tensors(pictures)
    small = nn.functional.avg_pool2d(x[:count].reshape(-1, 1, 28, 28), 2).flatten(1)
    return TensorDataset(small, y[:count])


def _tensors(data: Any) -> tuple[torch.Tensor, ...]:
    found: tuple[torch.Tensor, ...] = data.tensors
    return found


def _model(name: str, data: Data) -> nn.Module:
    inputs, classes = _tensors(data.train)[0].shape[1], len(data.classes)
    if name != "mnist":
        return nn.Linear(inputs, classes)
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, classes))


def picture(lab: Lab, found: dict[str, Any], file: Path) -> None:
    figure = Figure(figsize=(3.8 * len(found), 2.8), layout="constrained")
    for axes, (name, one) in zip(
        np.atleast_1d(figure.subplots(1, len(found))), found.items(), strict=True
    ):
        titles = list(one["trainings"])
        values = [100 * np.array(one["trainings"][title]["accuracy"]) for title in titles]
        errors = [v.std(ddof=1) if len(v) > 1 else 0.0 for v in values]
        axes.errorbar([v.mean() for v in values], range(len(titles)), xerr=errors, fmt="o")
        axes.set_yticks(range(len(titles)), titles, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("test accuracy, %")
        axes.set_title(TITLES[name], fontsize=9)
    figure.savefig(file)


def rows(found: dict[str, Any], facts: dict[str, Any]) -> list[Row]:
    result = []
    for name, one in found.items():
        seeds = len(next(iter(one["trainings"].values()))["accuracy"])
        size = (
            f"{TITLES[name]}, n = {one['n']:,}, {one['steps']} steps, δ = {one['delta']:g}, "
            f"{seeds} seed{'s' if seeds > 1 else ''}"
        )
        said = [
            f"{title} {spread(each['accuracy'], 2, 100)}"
            for title, each in one["trainings"].items()
        ]
        result.append(
            Row("Beyond", f"{TITLES[name]}: test accuracy in %, with budgets of one’s own", "–",
                "; ".join(said), size, None)
        )  # fmt: skip
    return result
