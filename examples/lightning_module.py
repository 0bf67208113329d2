"""A Lightning module: every step is private, and every training example has its ε.

    python examples/lightning_module.py

Stop it with Ctrl-C, and the same command goes on.
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import nn

from epsilons import Plan
from epsilons.data import digits
from epsilons.integrations.lightning import PrivateLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--out", default="runs/lightning_module")
args = parser.parse_args()


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False  # the private step has the optimizer's in it
        self.net = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, private_step, batch_idx):
        self.log("worst_case", private_step(self).worst_case, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=4.0)


def loss_fn(module, batch):
    x, y = batch
    return nn.functional.cross_entropy(module(x), y, reduction="none")  # one loss per example


data = digits()  # yours: any data set with len(…) and […]
torch.manual_seed(0)  # the first weights; batches and noise are drawn secretly, elsewhere
module = Digits()
plan = Plan.for_epsilon(
    4.0,
    delta=1e-4,
    n=len(data.train),
    sample_rate=0.25,  # four steps an epoch
    epochs=args.epochs,
    max_grad_norm=1.0,
    refreshes_per_epoch=1,
)
loader = PrivateLoader(loss_fn, data.train, plan, out=args.out)
trainer = pl.Trainer(
    max_epochs=args.epochs,
    accelerator="auto",
    devices=1,
    logger=False,
    enable_checkpointing=False,  # the run folder has the weights, and what it takes to go on
)
trainer.fit(module, loader)

eps = loader.epsilons()
x, y = data.test[:]
accuracy = (module.cpu()(x).argmax(1) == y).double().mean()
print(f"worst case   ε = {eps.worst_case} at δ = {eps.delta}: what is guaranteed to everyone")
print(f"private      half of the {len(eps)} examples have ε ≤ {eps.quantile(0.5)} ({eps.kind})")
print(f"private      accuracy on held-out examples: {accuracy:.1%}")
print(f"run folder   {args.out}; look at it with: epsilons status {args.out}")
