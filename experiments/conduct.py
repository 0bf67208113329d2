"""Carry out experiments: train what they share, then each one's numbers, then its picture."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context

from experiments.catalogue import EXPERIMENTS
from experiments.lab import Lab, machine
from experiments.recipes import Recipe

STYLE = {"font.size": 8.5, "svg.hashsalt": "epsilons", "savefig.dpi": 110}


def conduct(
    lab: Lab,
    names: Sequence[str],
    results: Path,
    pictures: Path,
    *,
    again: bool = False,
    workers: int = 1,
    named: bool = False,
) -> None:
    """Each experiment whose JSON is not there yet; what lacks optional data is skipped.

    `named`: the experiments were named one by one, so that what lacks data is an error.
    """
    due = [name for name in names if again or not (results / f"{name}.json").exists()]
    _say(
        f"{len(due)} of {len(names)} experiments to do, preset {lab.preset}; "
        f"numbers in {results}, pictures in {pictures}, runs in {lab.folder}"
    )
    possible = []
    for name in due:
        lack = lab.lacking(EXPERIMENTS[name].RUNS)
        if lack is None:
            possible.append(name)
        elif lack[1] and not named:
            _say(f"{name}: skipped, {lack[0]}")
        else:
            raise ValueError(f"{name}: {lack[0]}")
    needed = list(dict.fromkeys(run for name in possible for run in EXPERIMENTS[name].RUNS))
    if again:
        for run in needed:
            lab.forget(run)
    with _Trainings(lab, needed, workers) as trainings:
        for name in possible:
            trainings.wait_for(EXPERIMENTS[name].RUNS)
            _measure(lab, name, results, pictures)


class _Trainings:
    """Trainings by other processes, in the order given; with one worker, here and on demand."""

    def __init__(self, lab: Lab, needed: Sequence[str], workers: int) -> None:
        self.lab = lab
        self.waiting: dict[tuple[Recipe, int], Future[None]] = {}
        self.pool: ProcessPoolExecutor | None = None
        if workers > 1:
            threads = max(1, (os.cpu_count() or 1) // workers)
            self.pool = ProcessPoolExecutor(
                workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)
            )
            for name in needed:
                for seed in lab.recipes[name].seeds:
                    self._submit(name, seed)

    def _submit(self, name: str, seed: int) -> None:
        """Have a run trained, unless it is under way by another of its names."""
        assert self.pool is not None
        key = self.lab.recipes[name], seed
        if key not in self.waiting:
            self.waiting[key] = self.pool.submit(_train, self.lab, name, seed)

    def wait_for(self, names: Sequence[str]) -> None:
        for name in names:
            for seed in self.lab.recipes[name].seeds:
                if self.pool is None:
                    _train(self.lab, name, seed)
                else:
                    self.waiting[self.lab.recipes[name], seed].result()

    def __enter__(self) -> _Trainings:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)


def _train(lab: Lab, name: str, seed: int) -> None:
    began = time.monotonic()
    run = lab.run(name, seed)
    run.journal.close()
    if time.monotonic() - began > 1:  # it was not there already
        _say(f"  {name}, seed {seed}: {time.monotonic() - began:.0f} s")


def _measure(lab: Lab, name: str, results: Path, pictures: Path) -> None:
    began = time.monotonic()
    experiment = EXPERIMENTS[name]
    found = experiment.numbers(lab)
    result = {
        "experiment": name,
        "preset": lab.preset,
        "commit": _commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine(),
        "runs": {run: lab.facts(run) for run in experiment.RUNS},
        "numbers": found,
    }
    _write(results / f"{name}.json", result)
    pictures.mkdir(parents=True, exist_ok=True)
    picture = pictures / f"{name}.png"
    with rc_context(STYLE):
        experiment.picture(lab, found, picture)
    _say(f"{name}: {time.monotonic() - began:.0f} s, {results / f'{name}.json'}, {picture}")


def _write(file: Path, result: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draft.rename(file)


def _commit() -> str | None:
    """The commit of this checkout, if it is one."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return found.stdout.strip() or None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
