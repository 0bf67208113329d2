"""Each preset's trainings can be planned, and the paper's are the paper's."""

import pytest

from experiments.catalogue import EXPERIMENTS
from experiments.presets import PRESETS

FACES = 15_000  # about as many as the paper's


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_plan_can_be_built(preset):
    for recipe in PRESETS[preset].values():
        plan = recipe.plan(recipe.n or FACES, recipe.bound or 1.0)
        assert plan.steps > 0
        if recipe.epsilon is not None:
            assert 0.98 * recipe.epsilon <= plan.worst_case("rdp-classic") <= recipe.epsilon


def test_every_experiment_finds_its_trainings_in_every_preset():
    for experiment in EXPERIMENTS.values():
        for recipes in PRESETS.values():
            assert set(experiment.RUNS) <= set(recipes)


def test_the_paper_preset_has_the_settings_of_section_4():
    recipes = PRESETS["paper"]
    cifar10, mnist, faces = (recipes[name] for name in ("cifar10", "mnist", "utkface-gender"))
    assert (cifar10.network, cifar10.n, cifar10.batch, cifar10.epochs, cifar10.epsilon) == (
        "wrn16_4", 50_000, 4096, 300, 7.8
    )  # fmt: skip
    assert (mnist.network, mnist.n, mnist.batch, mnist.epochs, mnist.epsilon) == (
        "resnet20", 60_000, 1024, 100, 2.4
    )  # fmt: skip
    assert (faces.network, faces.batch, faces.epochs, faces.epsilon) == ("resnet20", 1024, 100, 4.5)
    assert cifar10.bound == 1.0
    assert mnist.bound is None
    assert mnist.factor == 1.0
    for recipe in (cifar10, mnist, faces):
        assert (recipe.refreshes_per_epoch, recipe.schedule) == (3, "uniform")
        assert (recipe.rounding, recipe.levels, recipe.follow) == ("nearest", 100, 1000)
    assert recipes["cifar10-common"].seeds == (1, 2, 3, 4)
