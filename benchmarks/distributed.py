"""Two processes with one thread each beside one process with two, on the same cores.

They take turns: in a round rank 0 works alone with two threads while rank 1 waits, then both work
with one thread each on half of the examples. A figure is the median over rounds of the ratio of the
times (below 1: two processes are faster); strong scaling is what two processes make of one thread's
time, halved at best. The share of the all-reduce is of the step of two processes.

    python benchmarks/distributed.py [--models resnet20,wrn16-4] [--rounds 10] [--batch 64]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from epsilons import Plan
from epsilons.gradients import gradient_norms
from epsilons.models import resnet20, wide_resnet
from epsilons.noise.grid import GridNoise
from epsilons.noise.keystream import Keystream
from epsilons.training import supervised
from epsilons.training.distributed import ALONE, Ranks, joined
from epsilons.training.noisy_sum import NoisySum, Report
from epsilons.training.shards import Shards, shard_edges
from epsilons.training.step import apply, clipped_sum

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet20": resnet20,
    "wrn16-4": wide_resnet,
}
loss_fn = supervised(nn.CrossEntropyLoss(reduction="none"))


class Work:
    """The step and the norm pass of one process over its part of a batch."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, ranks: Ranks) -> None:
        self.ranks, self.model = ranks, model
        self.shards = Shards(shard_edges(len(x), ranks.count), ranks.rank, ranks.count)
        first, last = (int(self.shards.edges[r]) for r in (ranks.rank, ranks.rank + 1))
        self.batch = [x[first:last], y[first:last]]
        self.plan = Plan(
            n=100 * len(x), batch_size=len(x), epochs=1, noise_multiplier=1.0, max_grad_norm=1.0,
            delta=1e-6,
        ).phase(0)  # fmt: skip
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.noise = GridNoise(Keystream.seeded(1, b"noise"))
        self.adding = 0.0  # seconds in the last all-reduce, noise included

    def step(self) -> None:
        total = NoisySum(dict(self.model.named_parameters()), self.plan, self.shards)
        found = clipped_sum(
            self.model, self.optimizer, loss_fn, self.batch, self.plan, bounds=1.0,
            micro_batch=len(self.batch[0]), shards=self.shards.count,
        )  # fmt: skip
        total.add(self.ranks.rank, found)
        self.ranks.all_words(0)  # so that waiting for the other is not counted as adding
        began = time.perf_counter()
        total.over(self.ranks, self.noise, Report(), torch.device("cpu"))
        self.adding = time.perf_counter() - began
        apply(self.model, self.optimizer, total.released())

    def norms(self) -> None:
        gradient_norms(
            self.model, loss_fn, tuple(self.batch), batch_size=len(self.batch[0]), compile=False
        )
        self.ranks.all_words(0)


def seconds(work: Callable[[], None], threads: int) -> float:
    torch.set_num_threads(threads)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare(name: str, batch: int, rounds: int) -> None:
    ranks = joined()
    torch.manual_seed(0)
    model, x, y = MODELS[name](), torch.randn(batch, 3, 32, 32), torch.arange(batch) % 10
    whole, half = Work(model, x, y, ALONE), Work(model, x, y, ranks)
    for what in ("step", "norms"):
        ratios, one_thread, shares = [], [], []
        for turn in range(rounds + 1):
            alone = single = 0.0
            if ranks.main:
                alone = seconds(getattr(whole, what), 2)
                single = seconds(getattr(whole, what), 1)
            ranks.all_words(0)  # the other has waited here
            both = seconds(getattr(half, what), 1)
            if turn and ranks.main:  # the first round warms up
                ratios.append(both / alone)
                one_thread.append(single / both / 2)
                shares.append(half.adding / both)
        if ranks.main:
            share = f", all-reduce {statistics.median(shares):.1%}" if what == "step" else ""
            print(
                f"{name:9} {what:6} 2 × 1 ÷ 1 × 2: {statistics.median(ratios):.2f} (least "
                f"{min(ratios):.2f}), strong scaling {statistics.median(one_thread):.0%} (best "
                f"{max(one_thread):.0%}){share}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="resnet20,wrn16-4")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    given = parser.parse_args()
    if "RANK" in os.environ:
        for each in given.models.split(","):
            compare(each, given.batch, given.rounds)
    else:
        agent = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run([sys.executable, "-m", *agent, *sys.argv], check=False)
        sys.exit(ended.returncode)
