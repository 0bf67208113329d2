"""A small run that processes can be killed in the middle of."""

import hashlib
import os
import signal
from unittest import mock

import numpy as np
import torch
import torch._dynamo  # the first optimizer would import it, in every process
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Plan
from epsilons.training import assembly, correct_class, fit, loop, supervised
from epsilons.training.checkpoint import release_digest

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


def data(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 4, generator=generator) + 2 * nn.functional.one_hot(y, 4)
    return TensorDataset(x, y)


def plan(**changes):
    constants = dict(
        n=60, batch_size=20, steps=12, noise_multiplier=1.0, max_grad_norm=0.7, delta=1e-3
    )
    return Plan(**{**constants, "refresh_every": 4, **changes})


def small_model(seed=0, dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def trained(out, the_plan, seed=5, dropout=0.0, train=None, scheduled=False, **options):
    """The run and its weights as one vector."""
    model = small_model(dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if scheduled:
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 50, gamma=0.8)
    train = data() if train is None else train
    run = fit(model, optimizer, LOSS, train, the_plan, out=out, seed=seed, **options)
    return run, weights(model)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


LONG = dict(
    steps=150, batch_size=20, refreshes_per_epoch=0.2, refresh_every=None,
    phases=((50, {"noise_multiplier": 1.5}), (90, {"max_grad_norm": 0.5, "batch_size": 30})),
)  # fmt: skip


def long_run(out, clipping="max", checkpoint_seconds=0.05, seed=5):
    """Several seconds of training with everything that must survive a crash."""
    with mock.patch.object(loop, "CHECKPOINT_SECONDS", checkpoint_seconds):
        return trained(
            out, plan(**LONG, clipping=clipping), dropout=0.3, scheduled=True, follow=3,
            resume=True, test=data(30, seed=1), correct_fn=correct_class, seed=seed,
        )  # fmt: skip


def child(out, clipping):
    """`long_run` in a process of its own."""
    torch.set_num_threads(1)
    long_run(out, clipping)


def secret_child(out, seconds):
    """A secret `long_run` that is killed so many seconds after its first release (0: never).

    Each release is a line of a log: step, key, position, what came out.
    """
    torch.set_num_threads(1)
    log = os.open(f"{out}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    class Logged(loop.Loop):
        def _witness(self, step, released):
            stream = self.state.streams.noise
            key = hashlib.sha256(stream._key).hexdigest()
            super()._witness(step, released)
            digest = release_digest(released).hex()
            os.write(log, f"{step} {key} {stream.position} {digest}\n".encode())
            if signal.getitimer(signal.ITIMER_REAL)[0] == 0.0:
                signal.setitimer(signal.ITIMER_REAL, seconds)

    assembly.Loop = Logged
    long_run(out, seed=None)


KINDS = (
    "open",
    "identity",
    "refresh",
    "charge",
    "restart",
    "sampled",
    "followed",
    "random",
    "clip_bound",
)


def entries(run):
    """Everything the journal holds, as plain values."""
    chain = run.journal._chain
    return [
        (entry, chain.indices(entry.number), chain.norms(entry.number))
        for entry in chain.entries(*KINDS)
    ]


def outcome(run):
    """What a run leaves behind, for comparison."""
    model = torch.load(run.model_file, weights_only=True)
    return {
        "weights": {name: tensor.numpy().tobytes() for name, tensor in model.items()},
        "journal": entries(run),
        "losses": run.examples.losses.tobytes(),
        "test": np.asarray(run.test.correct).tobytes(),
    }
