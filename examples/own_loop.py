"""Your own PyTorch loop: every step is private, and every training example has its ε.

    python examples/own_loop.py

Stop it with Ctrl-C, and the same command goes on.
"""

import argparse

import torch
from torch import nn

from epsilons import Plan
from epsilons.data import digits
from epsilons.training import PrivateTraining

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=20)
parser.add_argument("--out", default="runs/own_loop")
args = parser.parse_args()

data = digits()  # yours: any data set with len(…) and […]
torch.manual_seed(0)  # the first weights; batches and noise are drawn secretly, elsewhere
model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=4.0)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="none")  # one loss per example


plan = Plan.for_epsilon(
    4.0,
    delta=1e-4,
    n=len(data.train),
    batch_size=512,
    epochs=args.epochs,
    max_grad_norm=1.0,
    refreshes_per_epoch=1,
)
training = PrivateTraining(model, optimizer, loss_fn, data.train, plan, out=args.out)
for step in training:
    if step.number % 10 == 0:
        print(f"step {step.number} of {plan.steps}: ε ≤ {step.worst_case} so far")

eps = training.epsilons()
x, y = data.test[:]
accuracy = (model(x).argmax(1) == y).double().mean()
print(f"worst case   ε = {eps.worst_case} at δ = {eps.delta}: what is guaranteed to everyone")
print(f"private      half of the {len(eps)} examples have ε ≤ {eps.quantile(0.5)} ({eps.kind})")
print(f"private      accuracy on held-out examples: {accuracy:.1%}")
print(f"run folder   {args.out}; look at it with: epsilons status {args.out}")
