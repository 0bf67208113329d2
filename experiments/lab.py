"""Lab: where runs are trained, found again and shared. OUT/PRESET/runs/NAME-SEED, and its facts."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epsilons import Epsilons, Run
from epsilons.data import Data
from epsilons.gradients import gradient_norms
from epsilons.release import Budget, ClipBound, Cost, release_median_norm
from epsilons.training import correct_class, fit
from experiments import language
from experiments.presets import OPTIONAL, PRESETS
from experiments.recipes import METHOD, Recipe
from experiments.sources import loss_for, missing, model_for, source

MEDIAN = dict(epsilon=0.1, delta=1e-5)
# Small data sets can't release a median at ε = 0.1: its noise would drown them.
SMALL, SMALL_MEDIAN = 20_000, dict(epsilon=0.9, delta=1e-5)


@dataclass(frozen=True)
class Lab:
    """A preset, the folder of the data sets, and the folder of everything that comes out."""

    preset: str
    data: Path | None
    out: Path

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        return PRESETS[self.preset]

    @property
    def folder(self) -> Path:
        return self.out / self.preset

    def lacking(self, names: tuple[str, ...]) -> tuple[str, bool] | None:
        """What is missing for these trainings, and whether the preset does without it."""
        for name in names:
            data = self.recipes[name].data
            why = missing(data, self.data)
            if why:
                return why, not OPTIONAL[self.preset].isdisjoint(data.split("-"))
        return None

    def run(self, name: str, seed: int) -> Run:
        """The finished run; trained, or gone on with, if it is not."""
        recipe, path = self.recipes[name], self._path(name, seed)
        if _agrees(path, recipe, seed) and path.is_dir():
            run = Run.open(path)
            if run.finished:
                return run
            run.journal.close()
        return _trained(recipe, seed, path, self)

    def runs(self, name: str) -> list[Run]:
        return [self.run(name, seed) for seed in self.recipes[name].seeds]

    def facts(self, name: str) -> dict[str, Any]:
        """Settings of a training, and what was found in each of its runs."""
        recipe = self.recipes[name]
        found = [json.loads(_facts_file(self._path(name, s)).read_text()) for s in recipe.seeds]
        return {**recipe.settings(), "found": [entry["found"] for entry in found]}

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """The weights that a training ended with, of its first seed."""
        run = self.run(name, self.recipes[name].seeds[0])
        found: dict[str, torch.Tensor] = torch.load(run.model_file, weights_only=True)
        return found

    def source(self, name: str) -> Data:
        return source(self.recipes[name], self.data, self.out / "cache")

    def forget(self, name: str) -> None:
        """Remove the runs of a training."""
        for seed in self.recipes[name].seeds:
            path = self._path(name, seed)
            shutil.rmtree(path, ignore_errors=True)
            _facts_file(path).unlink(missing_ok=True)

    def _path(self, name: str, seed: int) -> Path:
        """A recipe that has two names is trained once, under the first of them."""
        first = next(n for n, recipe in self.recipes.items() if recipe == self.recipes[name])
        return self.folder / "runs" / f"{first}-{seed}"


@lru_cache(maxsize=64)
def _epsilons_at(path: Path, method: str) -> Epsilons:
    journal = Run.open(path).journal
    return journal.epsilons(method=method, sampled=False, hold="previous")  # type: ignore[arg-type]


def epsilons_of(run: Run, method: str = METHOD) -> Epsilons:
    """The ε's as the paper's Algorithm 2 has them: from refreshes alone, Mironov's conversion."""
    return _epsilons_at(run.path, method)


def _trained(recipe: Recipe, seed: int, path: Path, lab: Lab) -> Run:
    data = source(recipe, lab.data, lab.out / "cache")
    model, loss_fn = model_for(recipe, data, seed), loss_for(recipe)
    n = len(data.examples)
    file = _facts_file(path)
    if not file.exists():
        began = time.monotonic()
        bound, facts = recipe.bound, {"n": n}
        if bound is None:
            norms = gradient_norms(model, loss_fn, data.train, batch_size=recipe.micro_batch or 256)
            median = release_median_norm(norms, **(SMALL_MEDIAN if n < SMALL else MEDIAN))
            bound = recipe.factor * median.value
            facts["median"] = {
                "true": float(np.median(norms)),
                "private": asdict(median),
                "norm_pass_seconds": time.monotonic() - began,
            }
        facts["bound"] = bound
        _write(file, {"recipe": recipe.settings(), "seed": seed, "found": facts})
    known = json.loads(file.read_text())
    plan = recipe.plan(n, known["found"]["bound"])
    if not path.exists():
        Run.create(path, plan, data.examples, seed=seed).journal.close()
        if "median" in known["found"]:
            with Budget.of_run(path) as budget:
                _clip_bound(known["found"]["median"]["private"]).charge(budget)
    began, used = time.monotonic(), time.process_time()
    if recipe.network in language.NETWORKS:
        rate = recipe.rate
        run = language.trained(model, data, plan, recipe, path, seed)
    else:
        rate = recipe.rate / (1.0 if recipe.epsilon is None else known["found"]["bound"])
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=recipe.momentum)
        run = fit(
            model, optimizer, loss_fn, data.train, plan, out=path, examples=data.examples,
            test=data.test, test_examples=data.test_examples, correct_fn=correct_class, seed=seed,
            micro_batch=recipe.micro_batch, follow=recipe.follow, resume=True,
        )  # fmt: skip
    spent = json.loads((run.path / "private" / "timings.json").read_text())
    known["found"] |= {
        "steps": plan.steps,
        "noise_multiplier": plan.noise_multiplier,
        "worst_case": plan.worst_case(METHOD) if recipe.epsilon else None,
        "worst_case_tight": plan.worst_case() if recipe.epsilon else None,
        "learning_rate": rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "accuracy": _accuracy(run),
        "seconds": time.monotonic() - began,
        "core_seconds": time.process_time() - used,
        "refresh_seconds": spent["refresh"],
        "threads": torch.get_num_threads(),
    }
    _write(file, known)
    return run


def _accuracy(run: Run) -> float | None:
    return None if run.test is None or run.test.correct is None else float(run.test.correct.mean())


def _clip_bound(fields: dict[str, Any]) -> ClipBound:
    return ClipBound(**{**fields, "cost": Cost(**fields["cost"])})


def _facts_file(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _agrees(path: Path, recipe: Recipe, seed: int) -> bool:
    """Whether the run at `path` is of this recipe; a run of another one is an error."""
    file = _facts_file(path)
    if not file.exists():
        return False
    stored = json.loads(file.read_text())
    wanted = json.loads(json.dumps(recipe.settings()))
    other = [k for k in wanted if k != "seeds" and stored["recipe"].get(k) != wanted[k]]
    if other or stored["seed"] != seed:
        key = (other or ["seed"])[0]
        raise ValueError(
            f"{path} was trained with {key}={stored['recipe'].get(key)!r}, and the preset says "
            f"{wanted.get(key)!r}; give another --out, or --again"
        )
    return True


def machine() -> dict[str, Any]:
    """What the numbers were made with."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _write(file: Path, content: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{os.getpid()}.draft")
    draft.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.rename(file)
