"""A small run folder, trained by nobody."""

import numpy as np

from epsilons import Examples, Plan, Run
from epsilons.randomness import Randomness


def make_run(path, n=3000, steps=100, clip=1.0, taken=100, most=None, **columns):
    """A run of n examples with lognormal norms below the clip bound."""
    plan = Plan(
        n=n,
        batch_size=n / 20,
        steps=steps,
        noise_multiplier=2.0,
        max_grad_norm=clip,
        delta=1e-5,
        refresh_every=50,
        levels=32,
        max_records_per_owner=most,
    )
    examples = Examples(ids=[f"id-{k:05d}" for k in range(n)], **columns)
    run = Run.create(path, plan, examples, randomness=Randomness.of_fit(None))
    train(run, taken)
    return run


def train(run, steps):
    """Charge the run's next steps, as many as are whole multiples of 50."""
    rng = np.random.default_rng(5)
    start, clip = run.journal.steps_charged, run.plan.max_grad_norm
    for first in range(start, start + steps, 50):
        run.journal.record(first, clip * np.minimum(rng.lognormal(-1.2, 0.5, run.plan.n), 0.97))
        run.journal.charge(first, first + 49)
