"""Jobs: where data, models and training meet."""

from __future__ import annotations

import os

import torch
from torch import nn

from epsilons.accounting.plan import Plan
from epsilons.data import digits
from epsilons.runs import Run
from epsilons.training import correct_class, fit, supervised

DEMO_EPSILON = 4.0
DEMO_DELTA = 1e-4
DEMO_SEED = 7


def demo(out: str | os.PathLike[str]) -> Run:
    """Train a small network on the digits privately, with ε for every example.

    Sampling and noise are seeded, so that everyone sees the same figures.
    """
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
    )
