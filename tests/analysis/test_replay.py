import dataclasses

import numpy as np
import pytest
from made_runs import make_run

from epsilons.analysis.replay import priced_together, random_examples, replayed


def everyone(run, **options):
    return replayed(run.journal, np.arange(run.plan.n), **options)


def test_replaying_everything_prices_what_the_run_prices(followed):
    assert everyone(followed).epsilons().values == pytest.approx(followed.epsilons().values)


def test_chosen_examples_are_those_of_the_run(followed):
    chosen = random_examples(400, 37, seed=1)
    found = replayed(followed.journal, chosen).epsilons().values
    assert found == pytest.approx(followed.epsilons().values[chosen])
    assert len(np.unique(chosen)) == 37


def test_a_run_with_phases_is_replayed_with_its_constants(tmp_path):
    run = make_run(tmp_path / "run", n=30, phases=((20, {"noise_multiplier": 1.0}),))
    assert everyone(run).epsilons().values == pytest.approx(run.epsilons().values)


def test_another_bound_is_another_plan(followed):
    every = everyone(followed)
    explicit = dataclasses.replace(every, bound=2 * every.bound, noise_std=2 * every.noise_std)
    assert every.with_bound(2.0).epsilons().values == pytest.approx(
        explicit.epsilons().values, rel=1e-9
    )


def test_priced_together_is_priced_apart(followed):
    every = everyone(followed)
    short = dataclasses.replace(
        every, norms=every.norms[:2], steps=every.steps[:2], sample_rate=every.sample_rate[:2],
        noise_std=every.noise_std[:2], bound=every.bound[:2],
    )  # fmt: skip
    for found, alone in zip(priced_together([every, short]), [every, short], strict=True):
        assert found.values == pytest.approx(alone.epsilons().values, rel=1e-9)
