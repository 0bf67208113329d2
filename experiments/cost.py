"""What norm passes cost beside private steps, both timed now, one after the other."""

from __future__ import annotations

import dataclasses
import time

import torch

from epsilons.gradients import gradient_norms
from epsilons.noise import SeededNoise
from epsilons.training import PoissonLoader, private_step
from experiments.lab import Lab
from experiments.sources import loss_for, model_for

STEPS = 5


def seconds(lab: Lab, name: str) -> dict[str, float]:
    """Seconds of a pass that computes the norms of all examples, and of all steps of the run."""
    recipe, data, plan = lab.recipes[name], lab.source(name), lab.runs(name)[0].plan
    model, loss_fn = model_for(recipe, data, seed=0), loss_for(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator, noise = torch.Generator().manual_seed(0), SeededNoise(0)
    some = dataclasses.replace(plan, steps=STEPS + 1, epochs=None, refreshes_per_epoch=0)
    ends = []
    for _, batch in PoissonLoader(data.train, some, generator=generator):
        private_step(model, optimizer, loss_fn, batch, some, noise=noise,
                     micro_batch=recipe.micro_batch)  # fmt: skip
        ends.append(time.monotonic())
    gradient_norms(model, loss_fn, data.train, batch_size=recipe.micro_batch or 256)
    norm_pass = time.monotonic() - ends[-1]
    return {"pass": norm_pass, "steps": (ends[-1] - ends[0]) / STEPS * plan.steps}
