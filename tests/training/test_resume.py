"""kill -9 at any moment: the run goes on as if nothing had been."""

import json
import multiprocessing
import os
import pickle
import random
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import trained
from torch import nn

from epsilons import Run
from epsilons.files import alone_in
from epsilons.training import Interrupted, checkpoint

KILLS = int(os.environ.get("EPSILONS_KILLS", "20"))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The outcome of a run that nothing disturbed, by clipping, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.monotonic()
    outcomes = {
        clipping: trained.outcome(trained.long_run(folder / clipping, clipping)[0])
        for clipping in ("max", "individual")
    }
    torch.set_num_threads(threads)
    return outcomes, (time.monotonic() - began) / 2


@pytest.fixture(scope="module")
def processes():
    """Processes that start fast: what they import is there, and nothing has run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trained"])
    return context


def test_killed_at_random_moments_it_ends_as_if_never_interrupted(
    tmp_path, uninterrupted, processes
):
    expected, seconds = uninterrupted
    clock = random.Random(20)
    killed, runs = 0, 0
    while killed < KILLS:
        clipping = ("max", "individual")[runs % 2]
        out = tmp_path / f"run-{runs}"
        while True:
            process = processes.Process(target=trained.child, args=(out, clipping))
            process.start()
            process.join(clock.uniform(0, seconds / 2) if killed < KILLS else None)
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                killed += 1
            else:
                assert process.exitcode == 0
                break
        assert trained.outcome(Run.open(out)) == expected[clipping]
        assert Run.open(out).journal.verify().sealed
        runs += 1
    assert runs >= 1


def stopped(out, step, **options):
    """A run that Ctrl-C stopped before `step`."""

    def press(now):
        if now.number == step - 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=f"stopped before step {step}"):
        trained.trained(out, trained.plan(**options), on_step=press)


def test_ctrl_c_stops_at_the_next_step_and_resumes_to_the_same_end(tmp_path):
    stopped(tmp_path / "run", 7)
    run, weights = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    whole, expected = trained.trained(tmp_path / "whole", trained.plan())
    assert torch.equal(weights, expected)
    assert trained.entries(run) == trained.entries(whole)


def test_ctrl_c_by_a_program_of_its_own_is_exit_code_130(tmp_path):
    code = (
        "import os, signal, sys, trained\n"
        "from epsilons.cli import main_of\n"
        "def press(step):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "main_of(lambda: trained.trained(sys.argv[1], trained.plan(), on_step=press))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        capture_output=True, text=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert shown.returncode == 130
    assert "can be resumed" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(the_plan=trained.plan(noise_multiplier=2.0)), "plan noise_multiplier was 1.0 and is"),
        (dict(train=trained.data(seed=3)), "data set was"),
        (dict(the_plan=trained.plan(clipping="individual")), "plan clipping was"),
    ],
)
def test_a_run_of_something_else_is_refused_with_the_difference(tmp_path, change, sentence):
    stopped(tmp_path / "run", 7)
    before = (tmp_path / "run" / "private" / "journal.sqlite").read_bytes()
    with pytest.raises(ValueError, match=sentence):
        trained.trained(tmp_path / "run", **{"the_plan": trained.plan(), **change}, resume=True)
    assert (tmp_path / "run" / "private" / "journal.sqlite").read_bytes() == before


def test_another_model_is_refused_with_the_difference(tmp_path, monkeypatch):
    stopped(tmp_path / "run", 7)
    monkeypatch.setattr(trained, "small_model", lambda dropout: nn.Linear(4, 3))
    with pytest.raises(ValueError, match="model was Sequential and is Linear"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_a_run_that_another_process_trains_is_not_resumed(tmp_path):
    stopped(tmp_path / "run", 7)
    with (
        alone_in(tmp_path / "run" / "private"),
        pytest.raises(ValueError, match="in use by another process"),
    ):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)
    run, _ = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert run.finished


def test_a_finished_run_is_not_resumed(tmp_path):
    trained.trained(tmp_path / "run", trained.plan())
    with pytest.raises(ValueError, match="is finished"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_in_another_environment_replayed_steps_take_fresh_noise_and_count_again(tmp_path):
    stopped(tmp_path / "run", 6)
    there = checkpoint.read_checkpoint(tmp_path / "run" / "private" / "checkpoint.pt")
    there["environment"]["torch"] = "another version"
    torch.save(there, tmp_path / "run" / "private" / "checkpoint.pt")
    run, weights = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    _, expected = trained.trained(tmp_path / "whole", trained.plan())
    assert not torch.equal(weights, expected)
    # steps 4 to 7 were reserved when the run was stopped before step 6: 6 and 7 are paid twice
    _, steps = next(run.journal.histories(sampled=False))
    np.testing.assert_array_equal(steps, [4, 4, 2, 4])
    whole = Run.open(tmp_path / "whole")
    assert (run.epsilons().values > whole.epsilons().values * 1.01).any()


def test_a_replayed_step_with_another_result_takes_fresh_noise_and_counts_again(tmp_path):
    stopped(tmp_path / "run", 6)
    releases = tmp_path / "run" / "private" / "releases.bin"
    # as if step 6 had been released with another result before the crash
    releases.write_bytes(releases.read_bytes() + bytes(32))
    run, weights = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    _, expected = trained.trained(tmp_path / "whole", trained.plan())
    assert not torch.equal(weights, expected)
    _, steps = next(run.journal.histories(sampled=False))
    np.testing.assert_array_equal(steps, [4, 4, 2, 4])


@pytest.mark.parametrize("lost", [["checkpoint.pt"], ["checkpoint.pt", "releases.bin"]])
@pytest.mark.parametrize("seed", [5, None])
def test_without_its_keys_a_run_charges_everything_again(tmp_path, lost, seed):
    stopped(tmp_path / "run", 6)
    for name in lost:
        (tmp_path / "run" / "private" / name).unlink()
    run, _ = trained.trained(tmp_path / "run", trained.plan(), seed=seed, resume=True)
    assert (run.journal.charged(), run.journal.repeated) == ((20,), 8)
    assert Run.checked(run.path)
    stated = json.loads((run.path / "public" / "plan.json").read_text())
    assert stated["repeated_steps"] == 8
    assert stated["worst_case"]["tight"] == run.journal.worst_case()
    assert run.journal.worst_case() == trained.plan(steps=20).worst_case()


def test_without_its_digests_a_replay_is_not_trusted(tmp_path):
    stopped(tmp_path / "run", 6)
    os.truncate(tmp_path / "run" / "private" / "releases.bin", 10)
    run, _ = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert run.journal.repeated == 2


def test_a_crash_on_the_way_back_leaves_no_old_keys_with_the_journal(tmp_path, monkeypatch):
    stopped(tmp_path / "run", 6)
    file = tmp_path / "run" / "private" / "checkpoint.pt"
    there = checkpoint.read_checkpoint(file)
    key = there["noise"]["key"].clone()
    there["environment"]["torch"] = "another version"
    torch.save(there, file)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Releases, "forget_from", lambda releases, step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert Run.open(tmp_path / "run").journal.restarts == 1
    assert not torch.equal(checkpoint.read_checkpoint(file)["noise"]["key"], key)
    run, _ = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert Run.checked(run.path).journal.repeated == 2


def test_a_limit_holds_for_steps_charged_again(tmp_path):
    limit = trained.plan().worst_case(steps=10) + 1e-6
    stopped(tmp_path / "run", 6)
    (tmp_path / "run" / "private" / "checkpoint.pt").unlink()
    run, _ = trained.trained(tmp_path / "run", trained.plan(), max_epsilon=limit, resume=True)
    # 8 were paid for before, so that 2 are left
    assert (run.journal.steps_charged, run.journal.charged()) == (2, (10,))
    assert run.epsilons().worst_case <= limit


def test_a_changed_journal_is_not_resumed(tmp_path):
    stopped(tmp_path / "run", 6)
    with sqlite3.connect(tmp_path / "run" / "private" / "journal.sqlite") as journal:
        journal.execute("UPDATE entry SET norms = zeroblob(480) WHERE kind = 'refresh'")
    journal.close()
    with pytest.raises(ValueError, match="was changed"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_steps_are_charged_before_their_weights_can_be_seen(tmp_path):
    seen = []

    def look(step):
        seen.append(step.run.journal.steps_charged - step.number)

    trained.trained(tmp_path / "run", trained.plan(), on_step=look)
    assert min(seen) >= 1


def test_malicious_checkpoint_is_refused_unexecuted(tmp_path):
    class Malicious:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "executed",))

    stopped(tmp_path / "run", 6)
    file = tmp_path / "run" / "private" / "checkpoint.pt"
    torch.save({"identity": Malicious()}, file)
    with pytest.raises(ValueError, match="is not a checkpoint"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)
    file.write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match="is not a checkpoint"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match="is not a checkpoint"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_with_a_changed_byte_is_refused(tmp_path):
    """torch read on, and the run went on with other noise or ended in an error about an index."""
    stopped(tmp_path / "run", 6)
    file = tmp_path / "run" / "private" / "checkpoint.pt"
    key = checkpoint.read_checkpoint(file)["noise"]["key"].numpy().tobytes()
    changed = file.read_bytes().replace(key, bytes([key[0] ^ 1]) + key[1:])
    file.write_bytes(changed)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a checkpoint.*damaged"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_keys_are_readable_by_the_owner_alone_and_gone_when_the_run_ends(tmp_path):
    stopped(tmp_path / "run", 6)
    file = tmp_path / "run" / "private" / "checkpoint.pt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert checkpoint.read_checkpoint(file)["noise"]["key"].numel() == 32
    trained.trained(tmp_path / "run", trained.plan(), resume=True)
    left = sorted(entry.name for entry in (tmp_path / "run" / "private").iterdir())
    assert left == ["journal.sqlite", "model.pt", "timings.json"]


def test_state_of_a_callback_is_part_of_the_checkpoint(tmp_path):
    class Sum:
        def __init__(self):
            self.total = 0

        def __call__(self, step):
            self.total += step.number
            if step.number == self.stop:
                os.kill(os.getpid(), signal.SIGINT)

        def state_dict(self):
            return {"total": self.total}

        def load_state_dict(self, state):
            self.total = state["total"]

    first, second = Sum(), Sum()
    first.stop, second.stop = 5, None
    with pytest.raises(Interrupted):
        trained.trained(tmp_path / "run", trained.plan(), on_step=first)
    trained.trained(tmp_path / "run", trained.plan(), on_step=second, resume=True)
    assert second.total == sum(range(12))


def test_an_unbegun_folder_is_begun_anew(tmp_path):
    (tmp_path / "run" / "private").mkdir(parents=True)
    (tmp_path / "run" / "public").mkdir()
    (tmp_path / "run" / "public" / "plan.json").write_text("{}")
    (tmp_path / "run" / "private" / ".journal.sqlite.draft").touch()
    run, _ = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert run.finished
