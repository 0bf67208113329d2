"""kill -9 at any moment: the run goes on as if nothing had been."""

import errno
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import trained
from torch import nn

from epsilons import Run
from epsilons.cli import main_of
from epsilons.files import alone_in
from epsilons.journal import Journal
from epsilons.training import Interrupted, checkpoint, loop

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


@pytest.mark.slow
def test_killed_at_random_moments_a_secret_run_charges_all_and_draws_no_noise_twice(
    tmp_path, processes
):
    clock = random.Random(21)
    killed, runs, keys, kills = 0, 0, set(), max(1, KILLS // 4 - 4)
    while killed < kills:
        out = tmp_path / f"run-{runs}"
        finished = False
        while not finished:
            seconds = clock.uniform(0, 0.3) if killed < kills else 0.0
            process = processes.Process(target=trained.secret_child, args=(out, seconds))
            process.start()
            process.join()
            assert process.exitcode in (0, -signal.SIGALRM)
            finished = process.exitcode == 0
            killed += not finished
        lines = [line.split() for line in (tmp_path / f"run-{runs}.log").read_text().splitlines()]
        by_noise, by_step = defaultdict(set), defaultdict(set)
        for step, key, position, released in lines:
            by_noise[key, position].add(released)
            by_step[int(step)].add(released)
            keys.add(key)
        assert all(len(released) == 1 for released in by_noise.values())
        assert all(len(released) == 1 for released in by_step.values())  # and its replays
        assert sorted(by_step) == list(range(150))
        run = Run.checked(out)
        assert (sum(run.journal.charged()), run.journal.repeated) == (150, 0)
        assert not keys_in(out)
        runs += 1
    assert len(keys) > runs  # one for every call of fit that went beyond its replay


def stopped(out, step, **options):
    """A run that Ctrl-C stopped before `step`."""

    def press(now):
        if now.number == step - 1:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match=f"stopped before step {step}"):
        trained.trained(out, trained.plan(), on_step=press, **options)


class Crash(Exception):
    pass


def crashed(out, step, *, seed=None, every=False, **options):
    """A run that ended after releasing step `step` - 1, with its first or with all checkpoints.

    As if by kill -9: nothing is saved on the way out.
    """

    def fail(now):
        if now.number == step - 1:
            raise Crash

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", -1.0 if every else 1e9)
        patch.setattr(loop.Loop, "leave", lambda self, before: None)
        with pytest.raises(Crash):
            trained.trained(out, trained.plan(), seed=seed, on_step=fail, **options)


def keys_in(out):
    """The content of the key files of a run, by name."""
    return {file.name: file.read_bytes() for file in (out / "private").glob("key-*")}


@pytest.fixture
def another_version(monkeypatch):
    """A context in which the library's surroundings have changed."""

    @contextmanager
    def changed():
        with monkeypatch.context() as patch:
            patch.setattr(torch, "__version__", "another version")
            yield

    return changed


@pytest.fixture
def releases(monkeypatch):
    """What the steps of each folder released, as vectors: {(folder, step): [released, …]}."""
    found = defaultdict(list)

    class Noted(checkpoint.Releases):
        def __init__(self, path, environment):
            super().__init__(path, environment)
            self.folder = path.parent.parent.name

        def witness(self, step, released):
            digest = super().witness(step, released)
            vector = torch.cat([t.flatten() for t in released.values()]).double()
            found[self.folder, step].append(vector)
            return digest

    monkeypatch.setattr(loop, "Releases", Noted)
    return found


LOSS = trained.LOSS


def scaled_loss(model, batch):
    return 0.01 * LOSS(model, batch)


@pytest.mark.parametrize(("crash", "loss"), [(True, LOSS), (False, scaled_loss)])
def test_copies_of_a_run_replay_what_was_released_and_then_draw_fresh_noise(
    tmp_path, releases, crash, loss, monkeypatch
):
    """Copies reused noise: with the same loss released sums differed by 0.0, with another by 0.24.

    Of independent noise the difference is 0.405 ± 0.035 in each of the steps.
    """
    out, last = tmp_path / "run", 6
    crashed(out, last) if crash else stopped(out, last, seed=None)
    for name in ("one", "two"):
        shutil.copytree(out, tmp_path / name)
    run, _ = trained.trained(tmp_path / "one", trained.plan(), seed=None, resume=True)
    monkeypatch.setattr(trained, "LOSS", loss)
    with nullcontext() if loss is LOSS else pytest.warns(match="loss_fn was"):
        again, _ = trained.trained(tmp_path / "two", trained.plan(), seed=None, resume=True)
    replayed = range(last) if crash else ()
    for step in replayed:
        (first,), (one,), (two,) = (releases[name, step] for name in ("run", "one", "two"))
        assert torch.equal(first, one)
        assert torch.equal(first, two)
    plan, size = trained.plan(), len(releases["one", last][0])
    expected = plan.noise_std / plan.batch_size * math.sqrt(2 * size)
    for step in range(last, 12):
        (one,), (two,) = releases["one", step], releases["two", step]
        # the sums differ too; a right program fails once in 40,000 runs of this test
        assert (one - two).norm() > 0.6 * expected
    for each in (run, again):
        assert each.journal.check()[1]  # sealed
        # what was charged ahead and not released is charged once
        assert (each.journal.charged(), each.journal.repeated) == ((12,), 0)


def test_a_key_is_on_disk_only_while_steps_may_be_replayed_with_it(tmp_path):
    """Every earlier checkpoint's inode held the key. Now one file does, and it is overwritten."""
    crashed(tmp_path / "run", 6, every=True)
    ((name, key),) = keys_in(tmp_path / "run").items()
    file = tmp_path / "run" / "private" / name
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    others = [f for f in tmp_path.rglob("*") if f.is_file() and f != file]
    assert not any(key in f.read_bytes() for f in others)
    with file.open("rb") as inode:
        crashed(tmp_path / "run", 8, resume=True)
        assert inode.read() == bytes(32)
    (fresh,) = keys_in(tmp_path / "run").values()
    assert fresh != key
    stopped(tmp_path / "run", 10, seed=None, resume=True)
    assert not keys_in(tmp_path / "run")
    trained.trained(tmp_path / "run", trained.plan(), seed=None, resume=True)
    left = sorted(entry.name for entry in (tmp_path / "run" / "private").iterdir())
    assert left == ["journal.sqlite", "model.pt", "timings.json"]


def test_stopped_while_replaying_it_keeps_the_key(tmp_path, releases):
    crashed(tmp_path / "run", 6)
    before = keys_in(tmp_path / "run")
    stopped(tmp_path / "run", 3, seed=None, resume=True)
    assert keys_in(tmp_path / "run") == before
    run, _ = trained.trained(tmp_path / "run", trained.plan(), seed=None, resume=True)
    assert all(torch.equal(*releases["run", step]) for step in range(6))
    assert run.journal.repeated == 0


def test_without_its_key_a_run_charges_again_what_was_released(tmp_path, releases):
    crashed(tmp_path / "run", 6)
    checkpoint_only = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for name in keys_in(checkpoint_only):
        (checkpoint_only / "private" / name).unlink()
    run, _ = trained.trained(checkpoint_only, trained.plan(), seed=None, resume=True)
    assert (run.journal.charged(), run.journal.repeated) == ((20,), 8)
    assert not any(torch.equal(releases["run", t][0], releases["copy", t][0]) for t in range(6))


def test_a_replay_with_another_loss_is_discarded_and_charged_again(tmp_path, releases, monkeypatch):
    crashed(tmp_path / "run", 6)
    monkeypatch.setattr(trained, "LOSS", scaled_loss)
    with pytest.warns(match="loss_fn was .* and is .*scaled_loss"):
        run, _ = trained.trained(tmp_path / "run", trained.plan(), seed=None, resume=True)
    assert run.journal.repeated == 8
    one, two = releases["run", 0]
    assert (one - two).norm() > 0.2


@pytest.mark.parametrize(("seed", "other"), [(None, 7), (5, None), (5, 7)])
def test_a_run_keeps_its_seed_or_its_secret(tmp_path, seed, other):
    stopped(tmp_path / "run", 6, seed=seed)
    with pytest.raises(ValueError, match=f"seed={other}, and .* begun with seed={seed}"):
        trained.trained(tmp_path / "run", trained.plan(), seed=other, resume=True)


def seeds_of_losses(out, stop, seed):
    """What torch's generator was seeded with when losses of steps and refreshes were computed."""
    found = set()

    def watched(model, batch):
        found.add(torch.initial_seed())
        return LOSS(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "LOSS", watched)
        if stop:
            stopped(out, stop, seed=seed)
        trained.trained(out, trained.plan(), resume=bool(stop), seed=seed)
    return found - {torch.initial_seed()}  # of the final losses


def test_what_losses_draw_is_secret_in_secret_runs_and_reproducible_in_seeded_ones(tmp_path):
    """The refreshes of every run had the number of their step for a seed."""
    one, two = (seeds_of_losses(tmp_path / f"secret-{i}", 6, None) for i in range(2))
    assert len(one - two) == len(two - one) == 12 + 3
    assert max(one & two) < 1000  # of checks
    one, two = (seeds_of_losses(tmp_path / f"seeded-{stop}", stop, 5) for stop in (6, None))
    assert one == two
    assert len({seed for seed in one if seed >= 1000}) == 12 + 3


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


def test_sigterm_stops_at_the_next_step_with_one_sentence_and_exit_code_143(tmp_path, capsys):
    def terminate(step):
        if step.number == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        main_of(lambda: trained.trained(tmp_path / "run", trained.plan(), on_step=terminate))
    assert ended.value.code == 128 + signal.SIGTERM
    said = capsys.readouterr().err.splitlines()
    assert said == [f"stopped before step 6; {tmp_path / 'run'} can be resumed"]
    run, weights = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    _, expected = trained.trained(tmp_path / "whole", trained.plan())
    assert torch.equal(weights, expected)
    assert run.journal.repeated == 0


def fill_up_checkpoints(step, patch):
    (step.run.private / ".checkpoint.pt.draft").symlink_to("/dev/full")


def fill_up_journal(step, patch):
    step.run.journal._chain._connection.execute("PRAGMA max_page_count = 1")


def fill_up_releases(step, patch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(checkpoint.os, "pwrite", full)


@pytest.mark.parametrize(
    ("fill_up", "seed"),
    [(fill_up_checkpoints, None), (fill_up_journal, 5), (fill_up_releases, None)],
)
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_with_more_room(tmp_path, fill_up, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)

        def full(step):
            if step.number == 3:
                fill_up(step, patch)

        with pytest.raises(OSError, match=r"no room is left.*run\. Make room.*epsilons resume"):
            trained.trained(tmp_path / "run", trained.plan(), seed=seed, on_step=full)
    run, weights = trained.trained(tmp_path / "run", trained.plan(), seed=seed, resume=True)
    assert (run.journal.charged(), run.journal.repeated) == ((12,), 0)
    assert run.journal.check()[1]  # sealed
    if seed is not None:
        whole, expected = trained.trained(tmp_path / "whole", trained.plan())
        assert torch.equal(weights, expected)
        assert trained.entries(run) == trained.entries(whole)


def test_resuming_where_nothing_was_begun_is_said(tmp_path, capsys):
    trained.trained(tmp_path / "run", trained.plan(steps=1), resume=True)
    assert capsys.readouterr().err == f"nothing to resume at {tmp_path / 'run'}: a new run begins\n"


@pytest.mark.parametrize(
    ("change", "sentence", "lost"),
    [
        (dict(the_plan=trained.plan(noise_multiplier=2.0)), "noise_multiplier was 1.0 and is", ""),
        (dict(train=trained.data(seed=3)), "data set was", ""),
        (dict(train=trained.data(seed=3)), "data set was", "checkpoint.pt"),
        (dict(the_plan=trained.plan(clipping="individual")), "clipping was", "checkpoint.pt"),
    ],
)
def test_a_run_of_something_else_is_refused_with_the_difference(tmp_path, change, sentence, lost):
    stopped(tmp_path / "run", 7)
    if lost:
        (tmp_path / "run" / "private" / lost).unlink()
    before = trained.entries(Run.open(tmp_path / "run"))
    with pytest.raises(ValueError, match=sentence):
        trained.trained(tmp_path / "run", **{"the_plan": trained.plan(), **change}, resume=True)
    assert trained.entries(Run.open(tmp_path / "run")) == before


def test_another_model_is_refused_with_the_difference(tmp_path, monkeypatch):
    stopped(tmp_path / "run", 7)
    (tmp_path / "run" / "private" / "checkpoint.pt").unlink()
    monkeypatch.setattr(trained, "small_model", lambda dropout: nn.Linear(4, 3))
    with pytest.raises(ValueError, match="model was Sequential and is Linear"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_a_run_that_is_being_trained_is_not_resumed(tmp_path):
    stopped(tmp_path / "run", 7)
    with (
        alone_in(tmp_path / "run" / "private"),
        pytest.raises(ValueError, match="in use by this process"),
    ):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)
    run, _ = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert run.finished


def test_a_finished_run_is_not_resumed(tmp_path):
    trained.trained(tmp_path / "run", trained.plan())
    with pytest.raises(ValueError, match="is finished"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_in_another_environment_replayed_steps_take_fresh_noise_and_count_again(
    tmp_path, another_version
):
    stopped(tmp_path / "run", 6)
    with another_version():
        run, weights = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    _, expected = trained.trained(tmp_path / "whole", trained.plan())
    assert not torch.equal(weights, expected)
    # steps 4 to 7 were reserved when the run was stopped before step 6: 6 and 7 are paid twice
    _, steps = next(run.journal.histories(sampled=False, hold="previous"))
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
    _, steps = next(run.journal.histories(sampled=False, hold="previous"))
    np.testing.assert_array_equal(steps, [4, 4, 2, 4])


@pytest.mark.parametrize("lost", [["checkpoint.pt"], ["checkpoint.pt", "releases.bin"]])
@pytest.mark.parametrize("seed", [5, None])
def test_without_its_keys_a_run_charges_everything_again(tmp_path, lost, seed):
    stopped(tmp_path / "run", 6, seed=seed)
    for name in lost:
        (tmp_path / "run" / "private" / name).unlink()
    run, _ = trained.trained(tmp_path / "run", trained.plan(), seed=seed, resume=True)
    assert (run.journal.charged(), run.journal.repeated) == ((20,), 8)
    assert Run.checked(run.path)
    stated = json.loads((run.path / "public" / "plan.json").read_text())
    assert stated["repeated_steps"] == 8
    assert stated["worst_case"]["tight"] == run.journal.worst_case()
    assert run.journal.worst_case() == trained.plan(steps=20).worst_case()
    ledger = json.loads((run.path / "public" / "publications.json").read_text())
    assert ledger["total"]["epsilon"] == run.journal.worst_case()


def test_without_its_digests_a_replay_is_not_trusted(tmp_path):
    stopped(tmp_path / "run", 6)
    os.truncate(tmp_path / "run" / "private" / "releases.bin", 10)
    run, _ = trained.trained(tmp_path / "run", trained.plan(), resume=True)
    assert run.journal.repeated == 2


@pytest.mark.parametrize("moment", ["restart", "begin"])
def test_a_crash_on_the_way_back_leaves_no_old_key_and_charges_again(
    tmp_path, monkeypatch, another_version, moment
):
    crashed(tmp_path / "run", 6)
    (old,) = keys_in(tmp_path / "run").values()
    where = Journal if moment == "restart" else checkpoint.Releases
    with another_version(), monkeypatch.context() as patch:
        patch.setattr(where, moment, lambda self, step: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained.trained(tmp_path / "run", trained.plan(), seed=None, resume=True)
    assert old not in keys_in(tmp_path / "run").values()
    with another_version():
        run, _ = trained.trained(tmp_path / "run", trained.plan(), seed=None, resume=True)
    # the checkpoint was of step 0, and steps 0 to 7 were charged
    assert Run.checked(run.path).journal.repeated == 8


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
    weight = checkpoint.read_checkpoint(file)["model"]["0.weight"].numpy().tobytes()
    changed = file.read_bytes().replace(weight, bytes([weight[0] ^ 1]) + weight[1:])
    file.write_bytes(changed)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a checkpoint.*damaged"):
        trained.trained(tmp_path / "run", trained.plan(), resume=True)


def test_a_checkpoint_that_the_journal_has_not_charged_is_refused(tmp_path):
    """Copied while the run was going on, the checkpoint after the journal: it took free steps."""
    stopped(tmp_path / "run", 3)
    early = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    crashed(tmp_path / "run", 12, seed=5, resume=True, every=True)
    shutil.copy(tmp_path / "run" / "private" / "checkpoint.pt", early / "private")
    with pytest.raises(
        ValueError, match="checkpoint of step 11 and a journal with 4 steps charged"
    ):
        trained.trained(early, trained.plan(), resume=True)


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
