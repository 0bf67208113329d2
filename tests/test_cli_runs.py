"""train, resume, status, verify and export, as typed."""

import os
import pty
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from epsilons import Run, job
from epsilons.accounting.printed import epsilon_text
from epsilons.cli import app, main
from epsilons.runs import publish_plan
from epsilons.settings import Settings

CONFIG = """
data = "digits"
model = "logistic"
lr = 2.0
noise_multiplier = 2.0
delta = 1e-4
max_grad_norm = 1.0
batch_size = 256
steps = 12
refresh_every = 4
seed = 3
"""


PLAN = ["plan", "--n", "1000", "--batch-size", "100", "--epsilon", "2"]


class Shown(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def typed(folder, monkeypatch, capsys):
    """The command line in this process, in the folder."""

    def run(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setenv("MKL_CBWR", "AUTO")  # as `main` does, until the end of the test
        monkeypatch.setattr(sys, "argv", ["epsilons", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Shown(ended.value.code or 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config and a finished run of it."""
    place = tmp_path_factory.mktemp("runs")
    (place / "run.toml").write_text(CONFIG)
    run = job.train(Settings.read(place / "run.toml", ["steps=8"]), place / "done")
    run.journal.close()
    return place


def test_train_shows_accuracy_worst_case_and_kind(typed):
    shown = typed("train", "run.toml", "--out", "fresh").stdout
    assert re.search(r"test accuracy +\d+\.\d% of 360", shown)
    assert "estimate for each of 1437 examples" in shown
    assert_private_figures_stand_below_the_line(shown)


def assert_private_figures_stand_below_the_line(shown):
    """The exact accuracy of held-out examples once stood above the line that says "private"."""
    public, private = re.split(r"^private .*$", shown, maxsplit=1, flags=re.MULTILINE)
    assert not re.search("accuracy|loss|at (the )?worst case|quantile", public)
    assert re.search("at (the )?worst case", private)


def test_status_says_steps_kind_worst_case_and_chain(folder, typed):
    shown = typed("status", "done").stdout
    worst = Run.open(folder / "done").epsilons().worst_case
    assert "8 of 8 charged" in shown
    assert "(finished)" in shown
    assert f"ε = {epsilon_text(worst)}" in shown
    assert re.search(r"at worst case +\d+\.\d%", shown)
    assert re.search(r"chain +OK, \d+ entries, sealed", shown)
    assert_private_figures_stand_below_the_line(shown)


def test_a_run_from_settings_is_tested_for_what_its_sums_rest_on(folder, typed):
    assert Run.open(folder / "done").journal.sums_covered
    assert "arithmetic" not in typed("status", "done").stdout


def test_verify_holds_and_then_finds_a_change(folder, typed):
    assert typed("verify", "done").stdout.startswith("OK:")
    subprocess.run(["cp", "-r", folder / "done", folder / "changed"], check=True)
    with sqlite3.connect(folder / "changed/private/journal.sqlite") as journal:
        journal.execute("UPDATE entry SET facts = replace(facts, 'false', 'true')")
    journal.close()
    shown = typed("verify", "changed")
    assert shown.returncode == 2
    assert "is not the file that was sealed" in shown.stderr


@pytest.mark.parametrize(
    "arguments",
    [["owner", "5"], ["export", "--to", "x.csv"], ["report"], ["report", "--public"], ["publish"],
     ["groups"], ["compare", "done"], ["status"], ["verify"]],
)  # fmt: skip
@pytest.mark.parametrize("what", ["norms", "plan"])
def test_a_changed_run_hands_out_no_figures(folder, typed, what, arguments):
    run = folder / "forged"
    subprocess.run(["rm", "-rf", run], check=True)
    subprocess.run(["cp", "-r", folder / "done", run], check=True)
    if what == "norms":
        with sqlite3.connect(run / "private/journal.sqlite") as journal:
            journal.execute("UPDATE entry SET norms = zeroblob(11496) WHERE kind = 'refresh'")
        journal.close()
    else:
        plan = run / "public/plan.json"
        plan.write_text(
            plan.read_text().replace('noise_multiplier": 2.0', 'noise_multiplier": 9.0')
        )
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    shown = typed(arguments[0], "forged", *arguments[1:])
    assert (shown.returncode, shown.stdout) == (2, "")
    assert ("plan.json differs" if what == "plan" else "was sealed") in shown.stderr
    assert len(shown.stderr.strip().splitlines()) == 1
    assert before == {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}


def test_status_counts_what_was_charged_again(folder, typed):
    done = Run.open(folder / "done")
    back = Run.create(folder / "back", done.plan, done.examples)
    back.journal.charge(0, 3)
    back.journal.restart(2)
    publish_plan(back)
    back.journal.charge(2, 3)
    shown = typed("status", "back").stdout
    assert "randomness      noise and coins from where the training loop took them" in shown
    assert "randomness      noise and coins from a seed" in typed("status", "done").stdout
    so_far, end = (back.journal.worst_case(until=t) for t in (None, 8))
    assert "4 of 8 charged, and 2 more that were repeated" in shown
    assert "clip bound      C is small: " in shown
    so_far, at_end = epsilon_text(so_far), epsilon_text(end)
    assert f"ε = {so_far} at δ = 0.0001 so far; at the end {at_end}" in shown
    assert end > done.plan.worst_case()


def test_export_writes_a_private_table(folder, typed):
    shown = typed("export", "done", "--to", "eps.parquet")
    assert shown.returncode == 0
    table = pq.read_table(folder / "eps.parquet")
    run = Run.open(folder / "done")
    assert table["id"].to_pylist() == run.examples.ids.tolist()
    np.testing.assert_array_equal(table["epsilon"].to_numpy(), run.epsilons().values)
    assert (folder / "eps.parquet").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "run.toml", "ephocs=3", "--out", "x"], "did you mean 'epochs'?"),
        (["train", "none.toml", "--out", "x"], "none.toml is not there"),
        (["train", "run.toml", "--out", "done"], "holds a run already"),
        (["train", "run.toml"], "--out"),
        (["resume", "done"], "is finished"),
        (["status", "."], "is not a run folder"),
        (["export", "done", "--to", "no/such/place.parquet"], "such/place.parquet"),
        (["export", "done", "--to", "eps.txt"], "expected one of .csv, .parquet, .json"),
        (["train", "run.toml", "--out", "run.toml"], "run.toml is a file; give a new folder"),
        (["train", "run.toml", "device=foo", "--out", "x"], "device='foo' can't be used here"),
        (["train", "run.toml", "device=cuda:99", "--out", "x"], "device='cuda:99' can't be used"),
        ([*PLAN, "--epochs", "0", "--delta", "1e-5"], "--epochs 0 is not one step"),
        ([*PLAN, "--epochs", "0.05", "--delta", "1e-5"], "expected at least 0.1"),
    ],
)
def test_wrong_use_is_one_sentence(typed, arguments, sentence):
    shown = typed(*arguments)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    assert not Path("x").exists()


@pytest.mark.parametrize(
    ("half", "verbs"),
    [
        ("public/plan.json", (["report"], ["report", "--public"])),
    ],
)
def test_half_a_file_is_named(folder, typed, half, verbs, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder / "done", damaged)
    content = (damaged / half).read_bytes()
    (damaged / half).write_bytes(content[: len(content) // 2])
    for verb, *more in verbs:
        options = ["--to", tmp_path / "eps.parquet"] if verb == "export" else []
        shown = typed(verb, str(damaged), *more, *map(str, options))
        assert shown.returncode == 2
        assert f"{damaged / half} is damaged" in shown.stderr


def test_a_delta_that_is_no_promise_is_said(folder, typed):
    plan = [*PLAN, "--epochs", "3", "--delta"]
    assert "is not below 1/n = 0.001" in typed(*plan, "0.001").stderr
    assert "1/n" not in typed(*plan, "0.0009").stderr
    shown = typed("train", "run.toml", "delta=0.5", "steps=2", "--out", "loose")
    assert "0.5 is not below 1/n" in shown.stderr
    np.save(folder / "norms.npy", np.ones((1, 50)))
    account = ["account", "norms.npy", "--steps", "1", "--sample-rate", "0.1", "--noise-std", "1"]
    assert "1/n = 0.02" in typed(*account, "--max-grad-norm", "1", "--delta", "0.02").stderr


def test_exact_figures_are_marked_private(typed):
    assert re.search(r"private +.*curator", typed("train", "run.toml", "--out", "marked").stdout)


def test_next_to_no_noise_is_no_promise(folder, typed):
    np.save(folder / "norms.npy", np.ones((1, 50)))
    shown = typed(
        "account", "norms.npy", "--steps", "1", "--sample-rate", "0.1", "--noise-std", "1e-200",
        "--max-grad-norm", "1", "--delta", "1e-5",
    )  # fmt: skip
    assert shown.returncode == 0
    assert "worst case      ε = no bound" in shown.stdout
    assert "private" in shown.stdout


def test_help_says_who_may_read_the_output():
    verbs = {verb.callback.__name__: verb.callback.__doc__ for verb in app.registered_commands}
    for name in ("train", "resume", "status", "verify", "export"):
        assert "for the curator" in verbs[name]


def test_ctrl_c_in_a_terminal_and_resume_end_as_if_undisturbed(folder, typed):
    """A terminal sends SIGINT for the byte 3; the bar shows when training has begun."""
    long = ["run.toml", "steps=150", "refresh_every=50"]
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "epsilons", "train", *long, "--out", "stopped"],
        cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        # with other threads the replay would not be trusted, and be charged again
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    begun = time.monotonic()
    while b"/150" not in shown and time.monotonic() - begun < 120:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    try:
        while part := os.read(terminal, 1024):
            shown += part
    except OSError:
        pass  # the terminal is closed when the process has ended
    os.close(terminal)
    assert process.wait(60) == 130
    assert b"can be resumed" in shown
    stopped = Run.open(folder / "stopped")
    assert 0 < stopped.journal.steps_charged <= 150
    stopped.journal.close()
    status = typed("status", "stopped").stdout
    assert "epsilons resume goes on" in status

    assert typed("resume", "stopped").returncode == 0
    assert typed("train", *long, "--out", "whole").returncode == 0
    one, other = (Run.open(folder / name) for name in ("stopped", "whole"))
    np.testing.assert_array_equal(one.epsilons().values, other.epsilons().values)
    np.testing.assert_array_equal(one.examples.losses, other.examples.losses)


def pressed(*arguments, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("long", "arguments", "sentence"),
    [
        ("job.load", ["train", "run.toml", "--out", "none"], "no step was taken"),
        ("job._store", ["train", "run.toml", "--out", "begun"], "no step was taken"),
        ("training.loop.Loop.restore", ["train", "run.toml", "--out", "began"],
         "stopped: epsilons resume began"),
        ("training.loop.Loop.advance", ["train", "run.toml", "--out", "took"],
         "stopped: epsilons resume took"),
        ("runs.Run.epsilons", ["train", "run.toml", "--out", "all"],
         "the run is finished, see epsilons status all"),
        ("job.load", ["resume", "took"], "stopped: epsilons resume took"),
        ("training.loop.Loop.advance", ["demo", "--out", "shown"],
         "stopped: epsilons demo --out shown"),
        ("report.write_report", ["report", "done"], "same `epsilons report` starts it again"),
        ("runs.Run.open", ["attack", "done"], "same `epsilons attack` starts"),
        ("runs.Run.open", ["publish", "done"], "same `epsilons publish` starts it again"),
        ("journal.Journal.verify", ["status", "done"], "same `epsilons status` starts it again"),
        ("journal.Journal.verify", ["verify", "done"], "same `epsilons verify` starts it again"),
        ("runs.Run.epsilons", ["export", "done", "--to", "x.csv"], "same `epsilons export` starts"),
    ],
)  # fmt: skip
def test_ctrl_c_is_one_sentence_and_exit_code_130(typed, monkeypatch, long, arguments, sentence):
    import epsilons.report  # noqa: F401  # verbs import it when they are called

    with monkeypatch.context() as patch:
        patch.setattr(f"epsilons.{long}", pressed)
        shown = typed(*arguments)
    assert shown.returncode == 130
    assert sentence in shown.stderr
    assert len(shown.stderr.strip().splitlines()) <= 2  # the seed of the run has a line of its own
    assert "Abort" not in shown.stderr + shown.stdout


def test_the_configs_of_the_docs_are_valid():
    files = sorted((Path(__file__).parent.parent / "docs" / "configs").glob("*.toml"))
    assert files
    for file in files:
        Settings.read(file)
