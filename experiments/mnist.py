"""MNIST in full: the tanh CNN of Papernot et al. 2020 at worst-case ε = 2.93, both clippings.

    python experiments/mnist.py DATA OUT [--clipping max|individual] [--follow 1000] [--epochs 40]

Expected: test accuracy ≥ 97.5 % (published: 98.1 %) in under 20 minutes on two cores. With
`--follow`, random examples have their norms recorded at every step, and the ε's estimated from
refreshes are compared with the exact ones.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from epsilons import Plan, Run
from epsilons.data import mnist
from epsilons.models import tanh_cnn
from epsilons.training import correct_class, fit, supervised

EPSILON, DELTA = 2.93, 1e-5
BATCH, RATE, MOMENTUM, BOUND = 2048, 2.0, 0.9, 0.1
MICRO_BATCH = 512  # fastest on two cores
SEED = 1


def trained(data: str, out: Path, clipping: str, epochs: int, per_epoch: float, follow: int) -> Run:
    source = mnist(data)
    plan = Plan.for_epsilon(
        EPSILON, delta=DELTA, n=len(source.examples), batch_size=BATCH, epochs=epochs,
        max_grad_norm=BOUND, refreshes_per_epoch=per_epoch, clipping=clipping,
    )  # fmt: skip
    torch.manual_seed(SEED)
    model = tanh_cnn().to(memory_format=torch.channels_last)
    return fit(
        model, torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM),
        supervised(nn.CrossEntropyLoss(reduction="none")), source.train, plan, out=out,
        examples=source.examples, test=source.test, test_examples=source.test_examples,
        correct_fn=correct_class, seed=SEED, follow=follow, evaluate_every=plan.steps // epochs,
        micro_batch=MICRO_BATCH, resume=True,
    )  # fmt: skip


def agreement(run: Run) -> dict[str, float]:
    """Estimated against exact ε of the followed examples, by the norm nearest in time."""
    chosen, _ = run.journal.followed()
    exact = run.journal.followed_epsilons().values
    result = {}
    for name, sampled in (("refreshes alone", False), ("with sampled norms", True)):
        estimate = run.journal.epsilons(sampled=sampled).values[chosen]
        result[f"pearson, {name}"] = float(np.corrcoef(estimate, exact)[0, 1])
        result[f"mean error, {name}"] = float(np.abs(estimate - exact).mean())
    return result


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("data", help="folder with MNIST/raw")
    ask.add_argument("out", type=Path, help="run folder")
    ask.add_argument("--clipping", default="max", choices=["max", "individual"])
    ask.add_argument("--epochs", type=int, default=40)
    ask.add_argument("--refreshes-per-epoch", type=float, default=1.0)
    ask.add_argument("--follow", type=int, default=0)
    given = ask.parse_args()
    began = time.monotonic()
    run = trained(
        given.data, given.out, given.clipping, given.epochs, given.refreshes_per_epoch, given.follow
    )
    minutes = (time.monotonic() - began) / 60
    spent = json.loads((run.path / "private" / "timings.json").read_text())
    assert run.test is not None
    assert run.test.correct is not None
    facts = {
        "clipping": given.clipping,
        "test accuracy": float(run.test.correct.mean()),
        "worst case": run.journal.worst_case(),
        "noise multiplier": run.plan.noise_multiplier,
        "minutes": minutes,
        "share of time on accounting": spent["refresh"] / (spent["refresh"] + spent["step"]),
        "kind": run.epsilons().kind,
        **(agreement(run) if given.follow else {}),
    }
    print(json.dumps(facts, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
