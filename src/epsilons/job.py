"""Jobs: where data, models and training meet.

`train(settings, out)` carries out one settings file, `resume(run)` goes on with what it left,
`audit(run)` tries to contradict what it claims.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from epsilons import data as readers
from epsilons.accounting.composition import NOTHING, Releases
from epsilons.accounting.plan import Plan
from epsilons.audit import Audit
from epsilons.audit import audit as audit_plan
from epsilons.data import Data, digits, fewer
from epsilons.examples import Examples
from epsilons.files import needing_room, private_file, private_folder, public_file
from epsilons.gradients import gradient_norms
from epsilons.models import network
from epsilons.randomness import Randomness
from epsilons.release import Budget, median_cost, release_median_norm
from epsilons.release.budget import discard, reserved
from epsilons.runs import Run, discard_unbegun, expect_free, expect_planned
from epsilons.settings import Settings
from epsilons.training import correct_class, fit, supervised
from epsilons.training.distributed import job_name, joined, restarted
from epsilons.training.environment import usable_device
from epsilons.training.inspection import inspect_start
from epsilons.training.norm_passes import PASS_BATCH
from epsilons.training.owners import Unit, unit_of
from epsilons.training.run_folder import begin_run
from epsilons.training.shards import given_shards

DEMO_EPSILON = 4.0
DEMO_DELTA = 1e-4
DEMO_SEED = 7

_READERS: dict[str, Callable[..., Data]] = {
    "mnist": readers.mnist,
    "cifar10": readers.cifar10,
    "adult": readers.adult,
    "utkface": readers.utkface,
    "images": readers.image_folder,
    "csv": readers.csv,
    "npz": readers.npz,
}
_PATHS = ("path", "test_file")
_PYTHON = "python:"
_LOSSES = {
    "cross_entropy": nn.CrossEntropyLoss(reduction="none"),
    "hinge": nn.MultiMarginLoss(reduction="none"),
}


def train(settings: Settings, out: str | os.PathLike[str]) -> Run:
    """Train as the settings say and leave a run folder at `out`.

    Beside what `fit` leaves: `public/settings.json` (settings and versions, without the paths)
    and `private/data.json` (paths, checksums of the files, number of files skipped). With
    `max_grad_norm = "median"` the clip bound is a private median of the norms at initialisation,
    charged to the run's budget, and part of the worst case: `epsilon` is met by both together. It
    is charged before it is drawn; the same call after a crash takes the bound that was paid for.
    """
    out, ranks = Path(out), joined()
    if ranks.first(lambda: _begun_by_this_job(out)):
        return resume(out)
    if settings.device is not None:
        usable_device(settings.device)
    base = Path.cwd()
    data = load(settings, base)
    model = _network(settings, data, base)
    ranks.from_first(list(model.state_dict().values()))
    with needing_room(out, "train again, in a new folder if this one holds a run"):
        plan = ranks.first(
            lambda: (
                _plan_with_median(settings, model, data, out)
                if settings.max_grad_norm == "median"
                else settings.plan(_count(settings, data), reserve=_reserve(settings))
            )
        )
        unit = _unit(settings, plan, data)
        run = begin_run(
            out,
            plan,
            model,
            unit.loss_fn,
            unit.train,
            examples=unit.examples,
            seed=settings.seed,
            randomness=Randomness.of_fit(settings.seed),
            micro_batch=unit.micro_batch,
            collate_fn=unit.collate_fn,
            shards=given_shards(settings.shards, ranks.count, plan),
            ranks=ranks,
        )
        ranks.first(lambda: _store(run, settings, data, base))
    if ranks.main:
        run.journal.close()
    return _carried_out(out, plan, settings, data, model)


def resume(path: str | os.PathLike[str]) -> Run:
    """Go on with a run that was stopped: with a seed, the same result as if it had not been."""
    path, ranks = Path(path), joined()
    plan, settings, stored = ranks.first(lambda: _resumable(path))
    data, base = _as_begun(path, settings, stored)
    return _carried_out(path, plan, settings, data, _network(settings, data, base))


def _begun_by_this_job(out: Path) -> bool:
    """Whether torchrun started the processes again, and they had begun; ValueError for others."""
    if not (out / "private" / "journal.sqlite").exists():
        discard_unbegun(out)
        expect_free(out)
        return False
    stored = out / "private" / "data.json"
    if restarted() and stored.exists() and json.loads(stored.read_bytes()).get("job") == job_name():
        return True
    raise ValueError(
        f"{out} holds a run already; `epsilons resume {out}` goes on with it if it was stopped"
    )


def _resumable(path: Path) -> tuple[Plan, Settings, dict[str, Any]]:
    """Plan, settings and private facts of a run that was stopped; ValueError if there is none."""
    if (path / "private").is_dir() and not (path / "private" / "journal.sqlite").exists():
        raise ValueError(
            f"{path} was stopped before its first step; `epsilons train` with the same settings "
            "begins it, and pays for a clip bound only once"
        )
    run = Run.open(path)
    if run.finished:
        raise ValueError(f"{path} is finished; there is nothing to resume")
    run.journal.close()
    return run.plan, *_stored(run)


def audit(
    path: str | os.PathLike[str],
    seconds: float = 60,
    *,
    canaries: int = 10_000,
    progress: Callable[[float, str], None] | None = None,
) -> Audit:
    """Try to contradict what a run claims, by fresh runs of its settings and its own journal.

    The folder is only read. Of a seeded run that is finished and took no longer than `seconds`, it
    is also tried whether it comes out the same again: then the fixed models are its own.
    """
    run = Run.checked(path)
    if not (run.path / "public" / "settings.json").exists():
        raise ValueError(
            f"{run.path} has no settings: it was not made by `epsilons train`. Where it was "
            "trained, epsilons.audit.audit(build, loss_fn, train, plan) does the same"
        )
    settings, stored = _stored(run)
    data, base = _as_begun(run.path, settings, stored)
    fixed = settings.model_copy(update={"seed": settings.seed or 0})

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = _network(fixed, data, base)
        if settings.device is not None:
            model.to(settings.device)
        return model, _optimizer(settings, model)

    found = audit_plan(
        build, _loss(settings), data.train, run.plan, seconds, canaries=canaries, run=run,
        progress=progress,
    )  # fmt: skip
    skipped = [*found.skipped]
    if (settings.shards or 1) > 1:
        skipped.append(f"the run's {settings.shards} shards: fresh runs have one")
    if (again := _again(run, settings, data, base, seconds)) is not None:
        skipped.append(again)
    return dataclasses.replace(found, skipped=tuple(skipped))


def _again(run: Run, settings: Settings, data: Data, base: Path, seconds: float) -> str | None:
    """Why the models of the fresh runs are not the run's own; None if they are."""
    if settings.seed is None:
        return "the run's own models: its keys are secret and gone, bounds are of fresh runs"
    timings = run.private / "timings.json"
    took = sum(json.loads(timings.read_text()).values()) if timings.exists() else math.inf
    if not run.finished or took > seconds:
        return "the run's own models: to train it again takes longer than was given"
    with tempfile.TemporaryDirectory(prefix="epsilons-audit-") as folder:
        model = _network(settings, data, base)
        again = _carried_out(Path(folder) / "again", run.plan, settings, data, model, resume=False)
        if _same_training(run, again):
            return None
    return "the run's own models: trained again it came out differently (versions or machine)"


def _same_training(run: Run, again: Run) -> bool:
    one, other = (torch.load(each.model_file, weights_only=True) for each in (run, again))
    weights = all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)
    steps = run.journal.refreshes_now()
    return weights and all(
        np.array_equal(run.journal.norms(t), again.journal.norms(t), equal_nan=True) for t in steps
    )


def load(settings: Settings, base: Path) -> Data:
    """The data set that the settings name; paths and Python modules are looked up from `base`."""
    name, options = settings.data, settings.data_options()
    if settings.budget is not None and name == "csv":  # a choice of privacy is no input
        for key in ("groups", "ignore"):
            options[key] = (*options.get(key, ()), settings.budget)
    for key in _PATHS:
        if (given := getattr(settings, key)) is not None:
            options[key] = base / _expanded(given)
    where = options.pop("path", None)
    if name.startswith(_PYTHON):
        found = _called(name, base, *([] if where is None else [where]), **options)
        if not isinstance(found, Data):
            raise ValueError(f"{name} returned {type(found).__name__}; expected epsilons.data.Data")
    elif name == "digits":
        if where is not None:
            raise ValueError("data = 'digits' is embedded; leave path out")
        found = digits(**_suitable(name, digits, options))
    elif name in _READERS:
        if where is None:
            raise ValueError(f"data = {name!r} needs path, the file or folder that holds it")
        found = _READERS[name](where, **_suitable(name, _READERS[name], options))
    else:
        raise ValueError(
            f"data = {name!r} is not known; expected digits, {', '.join(_READERS)} "
            "or python:module:function"
        )
    if settings.take is not None:
        found = fewer(found, settings.take, options.get("seed", 0))
    return found if settings.budgets is None else _with_budgets(found, settings)


def _with_budgets(data: Data, settings: Settings) -> Data:
    """The data with the budget of each training example, by its label in the column `budget`.

    No label and no example is named: who has which budget is private.
    """
    assert settings.budgets is not None
    column = settings.budget
    if column is None:
        return data
    if data.examples.budgets is not None:
        raise ValueError(f"data = {settings.data!r} has budgets of its own; leave budget out")
    labels = data.examples.groups.get(column)
    if labels is None:
        raise ValueError(
            f"budget = {column!r} is no column of the records; expected one of "
            f"{', '.join(data.examples.groups) or 'none: this data set has no columns of groups'}"
        )
    offered = ", ".join(settings.budgets)
    by_label = {label: float(epsilon) for label, epsilon in settings.budgets.items()}
    found = [by_label.get(str(label).strip()) for label in labels.tolist()]
    if None in found:
        raise ValueError(
            f"a record has no label of budgets ({offered}) in the column {column!r}; who has made "
            "no choice is left out, or given the smallest"
        )
    kept = column in (settings.groups or ()) or settings.data != "csv"

    def without(examples: Examples) -> dict[str, Any]:
        return {k: v for k, v in examples.groups.items() if kept or k != column}

    test = data.test_examples
    return dataclasses.replace(
        data,
        examples=dataclasses.replace(
            data.examples, groups=without(data.examples), budgets=np.array(found)
        ),
        test_examples=test and dataclasses.replace(test, groups=without(test)),
    )


def _reserve(settings: Settings) -> Releases:
    """What is set aside for publications; nothing if none is asked for."""
    if settings.reserve_epsilon is None:
        return NOTHING
    return reserved(settings.reserve_epsilon, settings.reserve_delta)


def demo(out: str | os.PathLike[str]) -> Run:
    """Train a small network on the digits privately, with ε for every example.

    Sampling and noise are seeded, so that everyone sees the same figures. One that was stopped at
    `out` is gone on with.
    """
    discard_unbegun(out)
    data = digits()
    plan = Plan.for_epsilon(
        DEMO_EPSILON,
        delta=DEMO_DELTA,
        n=len(data.examples),
        batch_size=512,
        epochs=40,
        max_grad_norm=1.0,
        refreshes_per_epoch=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(DEMO_SEED)
        model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return fit(
        model,
        torch.optim.SGD(model.parameters(), lr=4.0),
        supervised(nn.CrossEntropyLoss(reduction="none")),
        data.train,
        plan,
        out=out,
        examples=data.examples,
        test=data.test,
        test_examples=data.test_examples,
        correct_fn=correct_class,
        seed=DEMO_SEED,
        resume=(Path(out) / "private" / "journal.sqlite").exists(),
    )


def _carried_out(
    out: Path, plan: Plan, settings: Settings, data: Data, model: nn.Module, *, resume: bool = True
) -> Run:
    optimizer = _optimizer(settings, model)
    scheduler = None
    if settings.lr_schedule == "cosine":
        steps = max(1, plan.steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
        )
    return fit(
        model,
        optimizer,
        _loss(settings),
        data.train,
        plan,
        out=out,
        examples=data.examples,
        test=data.test,
        test_examples=data.test_examples,
        correct_fn=correct_class,
        scheduler=scheduler,
        seed=settings.seed,
        device=settings.device,
        micro_batch=settings.micro_batch,
        follow=settings.follow,
        evaluate_every=settings.evaluate_every,
        max_epsilon=settings.max_epsilon,
        compile=settings.compile,
        shards=settings.shards,
        resume=resume,
    )


def _network(settings: Settings, data: Data, base: Path) -> nn.Module:
    """The model for the data, initialised by the seed if there is one."""
    shape, classes = tuple(data.train[0][0].shape), len(data.classes)
    with torch.random.fork_rng():
        if settings.seed is None:
            torch.seed()
        else:
            torch.manual_seed(settings.seed)
        if not settings.model.startswith(_PYTHON):
            if not classes:
                raise ValueError(f"{settings.data} names no classes; expected Data(…, classes=…)")
            return network(settings.model, shape, classes, hidden=settings.hidden)
        found = _called(settings.model, base, shape, classes)
    if not isinstance(found, nn.Module):
        raise ValueError(f"{settings.model} returned {type(found).__name__}; expected a Module")
    return found


def _plan_with_median(settings: Settings, model: nn.Module, data: Data, out: Path) -> Plan:
    """The plan with a private median of the norms at initialisation as its clip bound.

    It is charged to the budget of the run to be.
    """
    cost = median_cost(settings.median_epsilon, settings.median_delta).releases
    # refused before anything is paid for
    plan = settings.plan(_count(settings, data), 1.0, cost, _reserve(settings))
    unit = _unit(settings, plan, data)
    inspect_start(model, unit.loss_fn, unit.train, collate_fn=unit.collate_fn)
    norms = gradient_norms(
        model,
        unit.loss_fn,
        unit.train,
        batch_size=max(1, PASS_BATCH // plan.records_at_once),
        collate_fn=unit.collate_fn,
    )
    private_folder(out / "private")
    with Budget.of_run(out) as budget:
        try:
            median = release_median_norm(
                norms, epsilon=settings.median_epsilon, delta=settings.median_delta, budget=budget
            )
        except ValueError:
            if not budget.entries():
                discard(budget)
                discard_unbegun(out)
            raise
    return dataclasses.replace(plan, max_grad_norm=median.value)


def _optimizer(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.optimizer == "sgd":
        momentum = 0.0 if settings.momentum is None else settings.momentum
        return torch.optim.SGD(model.parameters(), momentum=momentum, **options)
    if settings.momentum is not None:
        raise ValueError(f"momentum goes with optimizer = 'sgd', not {settings.optimizer!r}")
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(model.parameters(), **options)


def _count(settings: Settings, data: Data) -> int:
    """How many examples the run has: records, or owners of records."""
    if settings.unit == "record" or data.examples.owners is None:
        return len(data.examples)
    return len(np.unique(data.examples.owners))


def _unit(settings: Settings, plan: Plan, data: Data) -> Unit:
    """Data set and loss by what the plan counts; ValueError unless they are what it speaks of."""
    unit = unit_of(
        plan, data.train, _loss(settings), data.examples, micro_batch=settings.micro_batch
    )
    expect_planned(plan, unit.examples or data.examples)
    return unit


def _loss(settings: Settings) -> Callable[[nn.Module, Any], torch.Tensor]:
    return supervised(_LOSSES[settings.loss])


def _suitable(
    name: str, reader: Callable[..., Data], options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The options, if the reader takes all of them and nothing it needs is missing."""
    takes = inspect.signature(reader).parameters
    for key in options:
        if key not in takes:
            shown = "data_seed" if key == "seed" else key
            raise ValueError(f"{shown} does not go with data = {name!r}")
    for key, parameter in takes.items():
        named = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if named and parameter.default is inspect.Parameter.empty and key not in options:
            raise ValueError(f"data = {name!r} needs {key}")
    return options


def _expanded(path: str) -> str:
    """The path with ~ and variables of the environment put in."""
    found = os.path.expandvars(os.path.expanduser(path))
    if "$" in found:
        raise ValueError(f"{path}: the environment has no variable of that name; set it first")
    return found


def _called(name: str, base: Path, *arguments: Any, **options: Any) -> Any:
    """What `python:module:function` gives."""
    module, colon, function = name.removeprefix(_PYTHON).partition(":")
    if not colon or not module or not function:
        raise ValueError(f"{name!r} is not of the form python:module:function")
    with _found_from(base):
        try:
            call = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{name}: {error}; modules are looked up from {base}") from error
        return call(*arguments, **options)


@contextmanager
def _found_from(base: Path) -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(base))
    try:
        yield
    finally:
        sys.path[:] = before


def _store(run: Run, settings: Settings, data: Data, base: Path) -> None:
    kept = settings.model_dump(mode="json")
    paths = {key: kept.pop(key) for key in _PATHS}
    with private_file(run.path / "private" / "data.json") as file:
        facts = {
            "base": str(base), "paths": paths, "skipped": data.skipped, "job": job_name()
        }  # fmt: skip
        file.write(_json({**facts, "checksums": dict(data.checksums)}))
    with public_file(run.path / "public" / "settings.json") as file:
        packages = ("epsilons", "torch", "numpy", "scipy", "numba")
        versions = {"python": platform.python_version(), **{p: version(p) for p in packages}}
        file.write(_json({"settings": kept, "versions": versions, "machine": platform.machine()}))


def _as_begun(path: Path, settings: Settings, stored: Mapping[str, Any]) -> tuple[Data, Path]:
    """The data of a run, as they were when it began, and where paths are looked up."""
    base = Path(stored["base"])
    data = load(settings, base)
    for name, checksum in stored["checksums"].items():
        if data.checksums.get(name) != checksum:
            raise ValueError(f"{name} has changed since {path} began; a run keeps its data")
    return data, base


def _stored(run: Run) -> tuple[Settings, dict[str, Any]]:
    try:
        public = json.loads((run.path / "public" / "settings.json").read_text(encoding="utf-8"))
        stored = json.loads((run.path / "private" / "data.json").read_text(encoding="utf-8"))
        settings = Settings.of({**public["settings"], **stored["paths"]})
    except FileNotFoundError:
        raise ValueError(
            f"{run.path} has no settings: it was not made by `epsilons train`, or was stopped "
            "before its first step; train it anew in another folder"
        ) from None
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{run.path} has damaged settings: {error}") from error
    return settings, stored


def _json(facts: Mapping[str, Any]) -> bytes:
    return json.dumps(facts, indent=2, ensure_ascii=False).encode() + b"\n"
