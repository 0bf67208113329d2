"""A run is read while another process trains it: no reader fails or raises a false alarm."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from epsilons import Run
from epsilons.analysis import group_summary
from epsilons.cli import main
from epsilons.release import owner_statement, verify_ledger

STEPS = int(os.environ.get("EPSILONS_LIVE_STEPS", "500"))


def begun(out):
    """A training of STEPS steps in a process of its own, whose journal is there."""
    process = subprocess.Popen(
        [sys.executable, Path(__file__).parent / "live.py", out, str(STEPS)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (out / "private" / "journal.sqlite").exists():
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.001)
    return process


def status(out, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["epsilons", "status", str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    assert not ended.value.code, shown.err


def read(out):
    """Everything a reader asks for; all of it is of one moment."""
    run = Run.checked(out)
    steps = run.journal.steps_charged
    statement = owner_statement(run, "o6")
    found = run.epsilons()
    assert statement.steps == steps == sum(run.journal.charged()) == run.journal.steps_charged
    assert statement.records[0].training_epsilon == pytest.approx(found.cautious[6], rel=1e-6)
    assert sum(next(run.journal.histories(sampled=False))[1]) == steps
    assert len(run.journal.refreshes) - steps // 5 in (0, 1)  # one is recorded before its charge
    assert len(group_summary(found, run.examples, run.test, "town").rows) == 2
    verify_ledger(run)
    return run.verify()


def test_readers_beside_a_fast_training_never_fail_and_never_alarm(tmp_path, monkeypatch, capsys):
    """Once 9 of 9 failed: IndexError, 47 entries for 84 rows, "No figure can be trusted"."""
    out = tmp_path / "run"
    process = begun(out)
    seen = []
    while process.poll() is None:
        status(out, monkeypatch, capsys)
        seen.append(read(out))
    assert process.returncode == 0, process.stderr.read().decode()
    process.stderr.close()
    seen.append(read(out))
    steps = np.array([found.steps for found in seen])
    assert (np.diff(steps) >= 0).all()
    assert len(np.unique(steps)) > 5
    assert (seen[-1].steps, seen[-1].sealed) == (STEPS, True)
