"""Several processes train one model, by torchrun: the same bits, and no fault undercounts."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
import together
import torch
import trained

from epsilons import Run
from epsilons.cli import main
from epsilons.runs import CHECKPOINT

KILLS = int(os.environ.get("EPSILONS_KILLS", "3"))
HERE = Path(__file__).parent


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def surroundings(**more):
    """One thread each: what a run's bits depend on."""
    path = os.pathsep.join([str(HERE), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def launch(ranks, command, *options):
    """A command under torchrun, begun; it has a session of its own."""
    agent = ["torch.distributed.run", "--nproc-per-node", str(ranks), *options]
    agent += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    return subprocess.Popen(
        [sys.executable, "-m", *agent, *map(str, command)],
        env=surroundings(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def processes(ranks, command):
    """The same without an agent that ends the others when one is lost."""
    job = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    return [
        subprocess.Popen(
            [sys.executable, *map(str, command)], stderr=subprocess.PIPE, text=True,
            env=surroundings(RANK=str(rank), LOCAL_RANK=str(rank), **job),
        )
        for rank in range(ranks)
    ]  # fmt: skip


def together_by(ranks, function, folder, *arguments):
    """What a function of `together` says on each rank; None where it said nothing."""
    folder.mkdir(exist_ok=True)
    for rank in range(8):
        (folder / f"said-{rank}.json").unlink(missing_ok=True)
    command = [HERE / "together.py", function, folder, *arguments]
    if ranks == 1:
        work = subprocess.run([sys.executable, *map(str, command)], env=surroundings(), check=False)
    else:
        work = launch(ranks, command)
        print(*work.communicate(timeout=300), sep="\n")  # shown if a test fails
    return [said(folder, rank) for rank in range(ranks)]


def said(folder, rank):
    file = folder / f"said-{rank}.json"
    return json.loads(file.read_text()) if file.exists() else None


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The outcome of every case in one process with six shards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = together.all_cases(tmp_path_factory.mktemp("alone"), 6)
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes said of all cases, and of what one does to the other."""
    folder = tmp_path_factory.mktemp("two")
    return together_by(2, "cases_and_scenarios", folder, 6)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return together_by(3, "all_cases", tmp_path_factory.mktemp("three"), 6)


@pytest.mark.parametrize("case", together.CASES)
def test_any_number_of_processes_gives_the_same_bits(alone, two, three, case):
    """Draws, noise, norms, weights, journal and ε's, with the same six shards."""
    for found in (two, three):
        assert found[0][case] == alone[case]
        assert {each[case]["own weights"] for each in found} == {alone[case]["own weights"]}


def test_leaving_the_loop_on_one_rank_ends_it_on_all_at_the_same_step(two, alone_with_two_shards):
    for found in two:
        shown, again, ends = found["left_by_one"]
        assert shown == list(range(12))
        assert again == 40 - 11  # the step at which it was left is shown again
        assert ends == alone_with_two_shards


def test_finish_on_one_rank_ends_the_run_on_all(two):
    (last, finished, ends), other = (found["finished_by_one"] for found in two)
    assert [last, finished, ends] == other
    assert (last, finished) == (9, True)


def test_a_signal_to_one_rank_stops_all_at_the_same_step(two):
    for found in two:
        assert found["stopped_by_a_signal"] == [list(range(8)), 15, "stopped before step 8"]


def test_an_error_on_one_rank_is_raised_by_all_and_named(two):
    first, second = (found["failing_on_one"] for found in two)
    assert first[0] == "ValueError: rank 1: this label is not known"
    assert second[0] == "ValueError: this label is not known"
    assert first[1] == second[1] == 40


def test_a_record_that_is_not_finite_is_named_on_rank_0(two):
    assert [found["not_finite_on_one"] for found in two] == [[40, [50], True]] * 2


def test_memory_that_runs_out_on_one_rank_makes_all_passes_smaller(two):
    first, second = (found["without_memory_on_one"] for found in two)
    assert first == ["nothing", [], True]
    assert second[0] == "nothing"
    assert int(second[1][-1]) <= 4


def test_memory_that_never_suffices_on_one_rank_ends_all(two):
    first, second = (found["without_any_memory_on_one"] for found in two)
    assert first[0] == "OutOfMemoryError: rank 1: no room for 1 GiB"
    assert second[0] == "OutOfMemoryError: no room for 1 GiB"
    assert not first[2]


def test_shards_and_batches_without_examples_add_nothing(two):
    first, second = (found["with_empty_shards"] for found in two)
    assert first == second
    assert first[0] == 40


def test_a_full_disk_of_rank_0_ends_all(two):
    first, second = (found["full_disk_of_the_first"] for found in two)
    assert "Make room" in first[0]
    assert second[0].startswith("OSError: rank 0: ")
    assert first[1] == second[1] == 40


def test_signs_of_life_come_from_all_ranks_however_unequal_their_work(two):
    (number, ends, beats, working), other = (found["with_signs_of_life"] for found in two)
    assert number == other[0] == 40
    assert ends == other[1]
    assert beats == other[2]  # each is a message of both
    assert 0 < working < other[3]


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"])
def test_several_processes_without_torchrun_are_refused(tmp_path, monkeypatch, name, capsys):
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        ValueError, match=r"several processes without RANK.* Start them by torchrun"
    ):
        together.begun(tmp_path / "run")
    (tmp_path / "run.toml").write_text(SETTINGS)
    arguments = ["epsilons", "train", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Start them by torchrun" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


REFUSED = {
    "data": "rank 1 trains something else than rank 0, .*: data set was",
    "folder": "out was .*different 0' and is .*different 1'",
    "plan": "plan noise_multiplier was 1.0 and is 2.0",
    "seed": "seed was 0 and is 1",
    "few shards": "shards=1, and there are 2 processes",
    "no noise": "clipping='none' has no noise",
    "owners apart": "2 shards would cut the records of an owner apart",
    "wrapped": "DistributedDataParallel wraps the model. Pass the model itself",
    "attached": "attach is for one process, and this job has several.*draw the same local coins",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_share_no_run_is_refused_by_all_ranks(two, name):
    for found in two:
        sentences, folders = found["different_calls"]
        assert re.search(REFUSED[name], sentences[name])
        assert folders in ([], ["different"])


@pytest.fixture(scope="module")
def alone_with_two_shards(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training, model = together.begun(tmp_path_factory.mktemp("whole") / "run", shards=2, follow=5)
    together.to_the_end(training)
    torch.set_num_threads(threads)
    return together.digest(trained.weights(model).numpy())


@pytest.mark.parametrize(
    ("sign", "timeout", "bound"), [(signal.SIGKILL, 60, 30), (signal.SIGSTOP, 4, 34)]
)
def test_a_lost_rank_ends_the_others_in_time_with_a_sentence_that_names_it(
    tmp_path, sign, timeout, bound
):
    """Without an agent on the machine, which would end them itself."""
    started = processes(2, [HERE / "together.py", "endless", tmp_path, timeout])
    try:
        pids = [tmp_path / f"pid-{rank}" for rank in range(2)]
        while not (tmp_path / "seen-0").exists():
            assert started[0].poll() is None
            time.sleep(0.05)
        began = time.time()
        os.kill(int(pids[1].read_text()), sign)
        started[0].wait()
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stderr.close()
    error, steps, ended = said(tmp_path, 0)
    assert error.startswith("RankLost: rank 1 ended, hangs or can't be reached")
    assert ended - began < bound
    run = Run.open(tmp_path / "endless")
    assert run.journal.steps_charged >= steps  # and of those that were shown none is missing


def killed_at_random(folder, secret, kills, clock):
    """A long run with rank after rank killed, by 1, 2 and 3 processes in turn, to its end."""
    for kill in range(kills):
        ranks = (2, 3)[kill % 2]
        who, when = clock.randrange(ranks), clock.randrange(0, 1500)
        together_by(ranks, "long_run", folder, int(secret), who, when)
        private = folder / "run" / "private"
        if (private / "model.pt").exists() and not (private / CHECKPOINT).exists():
            break  # it had ended before anyone was killed
    else:
        assert together_by(1, "long_run", folder, int(secret))[0] is not None
    return Run.checked(folder / "run")


def test_ranks_killed_at_random_moments_leave_a_run_that_ends_with_the_same_bits(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (tmp_path / "whole").mkdir()
    together.long_run(tmp_path / "whole", secret=False)
    torch.set_num_threads(threads)
    expected = trained.outcome(Run.open(tmp_path / "whole" / "run"))
    clock, left = random.Random(22), KILLS
    while left > 0:
        folder = tmp_path / f"killed-{left}"
        run = killed_at_random(folder, False, min(3, left), clock)
        assert trained.outcome(run) == expected
        assert run.journal.repeated == 0
        left -= 3


@pytest.mark.slow
def test_a_secret_run_whose_ranks_are_killed_charges_all_and_draws_no_noise_twice(tmp_path):
    clock, left = random.Random(23), max(3, KILLS // 4)
    while left > 0:
        folder = tmp_path / f"killed-{left}"
        run = killed_at_random(folder, True, min(3, left), clock)
        by_noise, by_step = defaultdict(set), defaultdict(set)
        for log in folder.glob("releases-*.log"):
            for line in log.read_text().splitlines():
                step, key, position, released = line.split()
                by_noise[key, position].add(released)
                by_step[int(step)].add(released)
        assert all(len(released) == 1 for released in by_noise.values())
        charged = sum(run.journal.charged())
        assert sorted(by_step) == list(range(80))
        assert charged >= sum(map(len, by_step.values()))
        left -= 3


SETTINGS = """
data = "digits"
take = 300
lr = 0.5
noise_multiplier = 1.0
delta = 1e-3
max_grad_norm = 3.0
batch_size = 64
steps = 40
refresh_every = 10
seed = 7
"""


def test_the_command_line_goes_on_when_torchrun_starts_its_processes_again(tmp_path):
    """Rank 1 is killed once, after the first releases; the settings file is carried out anyway."""
    (tmp_path / "run.toml").write_text(SETTINGS)
    command = [HERE / "together.py", "command_line_killed_once", tmp_path]
    work = launch(2, command, "--max-restarts", "1")
    out, talk = work.communicate(timeout=300)
    assert work.returncode == 0, talk
    assert (tmp_path / "killed").exists()
    run = Run.checked(tmp_path / "run")
    assert run.finished
    assert (run.journal.charged(), run.journal.repeated) == ((40,), 0)
    said = [line for line in out.splitlines() if line.startswith("worst case")]
    assert len(said) == 1  # rank 0 alone has printed
    again = launch(2, ["-m", "epsilons", "train", tmp_path / "run.toml", "--out", run.path])
    _, talk = again.communicate(timeout=300)
    assert talk.count(f"error: {run.path} holds a run already") == 1
    assert set(re.findall(r"exitcode +: (\d+)", talk)) == {"2"}  # the agent may end the other


@pytest.mark.slow
def test_more_processes_than_shards_become_the_shards_of_a_run(tmp_path):
    """What was charged ahead, up to the refresh at 16, is charged again: the bits are others."""
    for secret in (0, 1):
        folder = tmp_path / str(secret)
        ((_, charged, repeated),) = together_by(1, "more_processes", folder, secret)
        assert (charged, repeated) == (16, 0)
        found = together_by(3, "more_processes", folder, secret)
        assert len({ends for ends, _, _ in found}) == 1
        assert found[0][1:] == [44, 4]
