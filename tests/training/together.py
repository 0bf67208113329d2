"""A small run for several processes, started by torchrun; says in a JSON file what came of it."""

import errno
import hashlib
import json
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import numpy as np
import opacus
import torch
import torch._dynamo  # the first optimizer would import it, in every process
import torch.distributed as dist
from torch import nn
from trained import LOSS, data, entries, plan, small_model, weights

from epsilons import Examples, Run
from epsilons.cli import main
from epsilons.integrations.opacus import attach
from epsilons.journal import Journal
from epsilons.training import (
    Interrupted,
    PrivateTraining,
    assembly,
    checkpoint,
    correct_class,
    distributed,
    fit,
    loop,
)  # fmt: skip

CASES = {
    "max": dict(),
    "individual": dict(clipping="individual"),
    "every step": dict(refresh_every=1),
    "phases": dict(phases=((5, {"noise_multiplier": 1.5}), (8, {"batch_size": 30}))),
    "adam": dict(),
    "followed": dict(),
    "adaptive": dict(
        clipping="individual", max_grad_norm="adaptive",
        adaptive=dict(
            initial_clipbound=0.7, unclipped_num_std=2.0, clipbound_learning_rate=0.5,
            update_every=3,
        ),
    ),
}  # fmt: skip


def trained_together(out, case, shards, seed=5):
    """The weights after a whole run of one case."""
    model = small_model(dropout=0.3)
    adam = case == "adam"
    kind = torch.optim.Adam if adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05 if adam else 0.5)
    fit(
        model, optimizer, LOSS, data(), plan(**CASES[case]), out=out, seed=seed, shards=shards,
        test=data(30, seed=1), follow=9 if case == "followed" else 0,
    )  # fmt: skip
    return weights(model)


def outcome(out, found):
    """What a run came to, as digests."""
    run = Run.open(out)
    return {
        "weights": digest(found.numpy()),
        "norms": digest(run.journal.norms(0)),
        "epsilons": digest(run.epsilons().values),
        "journal": hashlib.sha256(b"".join(map(plain, entries(run)))).hexdigest(),
        "losses": digest(run.examples.losses),
    }


def plain(entry):
    """An entry of the journal, in bytes that are the same for the same facts."""
    facts, indices, norms = entry
    arrays = (b"" if a is None else np.asarray(a).tobytes() for a in (indices, norms))
    return b"".join([repr(facts).encode(), *arrays])


def digest(values):
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def all_cases(folder, shards):
    found = {}
    for case in CASES:
        out = folder / case
        ends = trained_together(out, case, shards)
        if MAIN:
            found[case] = outcome(out, ends)
        found.setdefault(case, {})["own weights"] = digest(ends.numpy())
    return found


RANK = int(os.environ.get("RANK", "0"))
MAIN = RANK == 0
COUNT = int(os.environ.get("WORLD_SIZE", "1"))
LONG = dict(steps=40, refresh_every=8)


def begun(out, the_plan=None, seed=5, loss_fn=LOSS, **options):
    """A training, and its model."""
    model = small_model(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    given = dict(dict(loss_fn=loss_fn, train=data(), plan=the_plan or plan(**LONG)), **options)
    return PrivateTraining(model, optimizer, out=out, seed=seed, **given), model


def refused(work):
    """The error that some work ends with, in words."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def to_the_end(training):
    """How many steps were shown."""
    return sum(1 for _ in training)


def left_by_one(folder, shards):
    """Rank 1 leaves the loop after step 11, and the same call goes on."""
    training, _ = begun(folder / "left", shards=shards, follow=5)
    shown = []
    for step in training:
        shown.append(step.number)
        if step.number == 11 and not step.main:
            break
    again, model = begun(folder / "left", shards=shards, follow=5)
    number = to_the_end(again)
    return shown, number, digest(weights(model).numpy())


def finished_by_one(folder, shards):
    """Rank 1 ends the run after step 9."""
    training, model = begun(folder / "finished", shards=shards)
    for step in training:
        if step.number == 9 and not step.main:
            training.finish()
    return step.number, Run.open(folder / "finished").finished, digest(weights(model).numpy())


def stopped_by_a_signal(folder, shards):
    """SIGTERM comes to rank 1 in the body of step 7."""
    training, _ = begun(folder / "stopped", shards=shards)
    shown = []
    try:
        for step in training:
            shown.append(step.number)
            if step.number == 7 and not step.main:
                os.kill(os.getpid(), signal.SIGTERM)
    except Interrupted as stopped:
        return shown, stopped.signal, str(stopped).partition(";")[0]


def failing_on_one(folder, shards):
    """The loss of rank 1 raises at step 5; with the right one the run goes on."""
    steps = []

    def loss_fn(model, batch):
        if steps and steps[-1] == 4 and not MAIN:
            raise ValueError("this label is not known")
        return LOSS(model, batch)

    training, _ = begun(folder / "failing", loss_fn=loss_fn, shards=shards)
    error = refused(lambda: steps.extend(step.number for step in each_noted(training, steps)))
    again, _ = begun(folder / "failing", loss_fn=loss_fn, shards=shards)
    steps.clear()
    return error, to_the_end(again)


def each_noted(training, steps):
    for step in training:
        steps.append(step.number)
        yield step


def not_finite_on_one(folder, shards):
    """A record of rank 1's shard has NaN in it."""
    train = data()
    train.tensors[0][50] = torch.nan
    training, model = begun(folder / "nan", train=train, shards=shards)
    number = to_the_end(training)
    found = folder / "nan" / "private" / "non_finite.jsonl"
    ids = sorted({i for line in found.read_text().splitlines() for i in json.loads(line)["ids"]})
    return number, ids, bool(weights(model).isfinite().all())


def without_memory_on_one(folder, shards, enough=4):
    """Rank 1 has no memory for more than a few examples at a time."""

    def loss_fn(model, batch):
        if torch.is_grad_enabled() and len(batch[0]) > enough and not MAIN and started:
            raise torch.OutOfMemoryError("no room for 1 GiB")
        return LOSS(model, batch)

    started = []
    training, _ = begun(folder / f"memory {enough}", loss_fn=loss_fn, shards=shards)
    started.append(True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        error = refused(lambda: to_the_end(training))
    sizes = [str(each.message).rpartition("most ")[2].split()[0] for each in warned]
    return error, sizes, Run.open(training.run.path).finished


def without_any_memory_on_one(folder, shards):
    return without_memory_on_one(folder, shards, enough=0)


def with_empty_shards(folder, shards):
    """More shards than examples, and a batch of one expected example."""
    few = plan(**LONG, batch_size=1)
    training, model = begun(folder / "empty", few, shards=70)
    return to_the_end(training), digest(weights(model).numpy())


def different_calls(folder, shards):
    out = folder / "different"
    calls = {
        "data": lambda: begun(out, train=data(seed=RANK)),
        "folder": lambda: begun(folder / f"different {RANK}"),
        "plan": lambda: begun(out, plan(noise_multiplier=1.0 + RANK)),
        "seed": lambda: begun(out, seed=RANK),
        "few shards": lambda: begun(out, shards=1),
        "no noise": lambda: begun(out, plan(clipping="none", noise_multiplier=0.0)),
        "owners apart": lambda: begun(
            out, examples=Examples(np.arange(60), owners=np.arange(60) % 5), shards=shards
        ),
        "wrapped": wrapped,
        "attached": attached,
    }
    found = {name: refused(call) for name, call in calls.items()}
    return found, [name for name in os.listdir(folder) if name.startswith("different")]


def wrapped():
    model = nn.parallel.DistributedDataParallel(small_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    PrivateTraining(model, optimizer, LOSS, data(), plan(), out="wrapped", seed=5)


def attached():
    engine = opacus.PrivacyEngine()
    model = small_model()
    loader = torch.utils.data.DataLoader(data(), batch_size=20)
    hooks, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), data_loader=loader,
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    attach(hooks, optimizer, loader, loss_fn=LOSS, out="attached", delta=1e-3)


def full_disk_of_the_first(folder, shards):
    """No room is left for rank 0's next charge; then there is."""
    training, _ = begun(folder / "full", shards=shards)
    with mock.patch.object(Journal, "charge", full):
        error = refused(lambda: to_the_end(training))
    again, _ = begun(folder / "full", shards=shards)
    return error, to_the_end(again)


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def with_signs_of_life(folder, shards):
    """Refreshes in which rank 1, with two shards of three, goes through more passes than rank 0."""
    beats = []
    still = distributed.Ranks._still_at_work

    def noted(ranks, here):
        beats.append(here)
        return still(ranks, here)

    with (
        mock.patch.object(distributed, "BEAT_SECONDS", 0.0),
        mock.patch.object(distributed.Ranks, "_still_at_work", noted),
    ):
        training, model = begun(folder / "beats", shards=3, micro_batch=8)
        number = to_the_end(training)
    return number, digest(weights(model).numpy()), len(beats), sum(beats)


SCENARIOS = (
    left_by_one, finished_by_one, stopped_by_a_signal, failing_on_one, not_finite_on_one,
    without_memory_on_one, without_any_memory_on_one, with_empty_shards, different_calls,
    full_disk_of_the_first,
    with_signs_of_life,
)  # fmt: skip


def endless(folder, seconds):
    """A run that only a fault ends; says after how long, and with what sentence."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    training, _ = begun(folder / "endless", plan(steps=10**6), seed=None, shards=3)
    (folder / f"pid-{RANK}").write_text(str(os.getpid()))
    steps = []

    def note(step):
        (folder / f"seen-{RANK}").write_text(str(step.number))

    error = refused(lambda: [note(step) for step in each_noted(training, steps)])
    return error, len(steps), time.time()


def logged(folder):
    """A loop that logs every release: step, key, position, what came out."""
    log = os.open(folder / f"releases-{RANK}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Logged(loop.Loop):
        def _witness(self, step, released):
            stream = self.state.streams.noise
            key = hashlib.sha256(stream._key).hexdigest()
            super()._witness(step, released)
            digest = checkpoint.release_digest(released).hex()
            os.write(log, f"{step} {key} {stream.position} {digest}\n".encode())

    return mock.patch.object(assembly, "Loop", Logged)


LONG_CASE = dict(
    steps=80, refreshes_per_epoch=0.2, refresh_every=None,
    phases=((30, {"noise_multiplier": 1.5}), (50, {"max_grad_norm": 0.5, "batch_size": 30})),
)  # fmt: skip


def more_processes(folder, secret):
    """Goes on with two shards' run of one process by three; by as many as there are else."""
    training, model = begun(folder / "more", seed=None if secret else 5, shards=2)
    for step in training:
        if COUNT < 3 and step.number == 11:
            break
    stand = training.run.journal
    return digest(weights(model).numpy()), sum(stand.charged()), stand.repeated


def long_run(folder, secret, who=-1, milliseconds=0):
    """A run with everything that must survive a crash; rank `who` is killed after that time."""
    model = small_model(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.8)
    if who == RANK:
        threading.Timer(milliseconds / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with (
        mock.patch.object(loop, "CHECKPOINT_SECONDS", 0.05),
        logged(folder) if secret else nullcontext(),
    ):
        fit(
            model, optimizer, LOSS, data(), plan(**LONG_CASE, clipping="max"),
            out=folder / "run", seed=None if secret else 5, scheduler=scheduler, follow=5,
            resume=True, test=data(30, seed=1), correct_fn=correct_class, shards=3,
        )  # fmt: skip
    return digest(weights(model).numpy())


def scenarios(folder, shards):
    return {work.__name__: work(folder, shards) for work in SCENARIOS}


def command_line_killed_once(folder):
    """`epsilons train`, of which rank 1 is killed at its twelfth release if it never was."""
    witness = loop.Loop._witness

    def killed(self, step, released):
        witness(self, step, released)
        if step == 12 and not MAIN and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    loop.Loop._witness = killed
    sys.argv = ["epsilons", "train", str(folder / "run.toml"), "--out", str(folder / "run")]
    main()


def cases_and_scenarios(folder, shards):
    (folder / "scenarios").mkdir(exist_ok=True)
    return {**all_cases(folder, shards), **scenarios(folder / "scenarios", 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, folder, *rest = sys.argv[1:]
    result = globals()[name](Path(folder), *map(int, rest))
    (Path(folder) / f"said-{RANK}.json").write_text(json.dumps(result))
