"""Several processes train one model, by torchrun: the same bits, and no fault undercounts."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import together
import torch

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
        work.communicate(timeout=300)
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
