"""Run folders trained by nobody: hard examples have large norms, high losses and more mistakes."""

import numpy as np

from epsilons import Examples, Plan, Run
from epsilons.randomness import Randomness

CLASSES = ("ant", "bee", "cat")


def make_run(
    path,
    n=400,
    steps=40,
    follow=0,
    clipping="max",
    levels=32,
    tested=300,
    moving=1.0,
    phases=(),
    taken=None,
    columns=None,
    owners=None,
    **plan,
):
    """A run with columns `class` (three, of growing difficulty) and `sex`.

    Norms fall in the course of the run, the more the larger `moving` is.
    """
    rng = np.random.default_rng(3)
    noise = 0.0 if clipping == "none" else 2.0
    settings = {"refresh_every": 10, "max_grad_norm": 1.0, "batch_size": n / 10} | plan
    run_plan = Plan(n=n, steps=steps, noise_multiplier=noise, delta=1e-5, clipping=clipping,
                    levels=levels, phases=phases, **settings)  # fmt: skip
    label, sex, hard = _people(rng, n)
    people = _examples("train", label, sex)
    examples = Examples(people.ids, owners, columns or people.groups)
    run = Run.create(path, run_plan, examples, randomness=Randomness.of_fit(None))
    chosen = np.sort(rng.choice(n, follow, replace=False))
    for first in range(0, steps if taken is None else taken, 10):
        run.journal.record(first, _norms(hard, first, steps, moving))
        run.journal.charge(first, first + 9)
        if follow:
            norms = [_norms(hard[chosen], first + k, steps, moving) for k in range(10)]
            run.journal.record_some("followed", first, [chosen] * 10, norms)
    test_label, test_sex, test_hard = _people(rng, tested)
    train = _examples("train", label, sex, hard, rng)
    test = _examples("test", test_label, test_sex, 1.1 * test_hard, rng)
    run.record_outcomes(train.losses, train.correct, test)
    return run


def _people(rng, n):
    code = rng.integers(0, 3, n)
    return np.array(CLASSES)[code], rng.choice(["F", "M"], n), rng.lognormal(-1.5 + 0.6 * code, 0.5)


def _norms(hard, step, steps, moving):
    return 2 * hard * np.exp(-moving * step / steps * (1.5 - np.minimum(hard, 1)))


def _examples(name, label, sex, hard=None, rng=None):
    outcome = {}
    if hard is not None:
        noise = rng.lognormal(0, 0.3, len(hard))
        outcome = {"losses": hard**2 * noise, "correct": hard**2 * noise < 1.2}
    return Examples(
        ids=[f"{name}-{k}" for k in range(len(label))],
        groups={"class": label, "sex": sex},
        **outcome,
    )
