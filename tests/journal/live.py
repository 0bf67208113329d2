"""A fast training to read beside, in a process of its own: `python live.py OUT STEPS`."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Examples, Plan
from epsilons.training import correct_class, fit, supervised

N = 60


def train(out, steps):
    """Most entries per second: a refresh every few steps, sampled norms, charges between."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(N, 4, generator=generator), torch.arange(N) % 3)
    plan = Plan(n=N, batch_size=20, steps=steps, noise_multiplier=2.0, max_grad_norm=1.0,
                delta=1e-3, refresh_every=5, levels=8)  # fmt: skip
    model = nn.Linear(4, 3)
    people = Examples(
        ids=[f"e{k}" for k in range(N)],
        owners=[f"o{k}" for k in range(N)],
        groups={"town": ["x", "y"] * (N // 2)},
    )
    fit(
        model, torch.optim.SGD(model.parameters(), lr=0.5),
        supervised(nn.CrossEntropyLoss(reduction="none")), data, plan, out=out, examples=people,
        test=data, correct_fn=correct_class,
    )  # fmt: skip


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]))
