"""An Opacus loop, with three lines more for an ε per training example.

    python examples/opacus_loop.py

The lines are marked "added".
"""

import argparse

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from epsilons.integrations.opacus import attach  # added

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", default="runs/opacus_loop")
args = parser.parse_args()

digits = load_digits()
x = torch.tensor(digits.data / 16, dtype=torch.float32)
train = TensorDataset(x, torch.tensor(digits.target))
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=4.0)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")


engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(train, batch_size=512),
    noise_multiplier=3.0,
    max_grad_norm=1.0,
)
attached = attach(model, optimizer, loader, loss_fn=loss_fn, delta=1e-4, out=args.out)  # added
for _ in range(args.epochs):
    for batch in loader:
        optimizer.zero_grad()
        loss_fn(model, batch).mean().backward()
        optimizer.step()
attached.close()  # added
print(f"Opacus       ε = {engine.get_epsilon(1e-4)} at δ = 0.0001")

# What the three lines give:
eps = attached.epsilons()
print(f"worst case   ε = {eps.worst_case} at δ = {eps.delta}: what is guaranteed to everyone")
print(f"private      half of the {len(eps)} examples have ε ≤ {eps.quantile(0.5)} ({eps.kind})")
print(f"run folder   {args.out}; look at it with: epsilons status {args.out}")
