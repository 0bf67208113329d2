import stat

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from epsilons import Examples, Plan, Run
from epsilons.training import correct_class, fit, gradient_norms, supervised

LOSS = supervised(nn.CrossEntropyLoss(reduction="none"))


def data(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.randn(n, 4, generator=generator) + 2 * nn.functional.one_hot(y, 4)
    return TensorDataset(x, y)


def plan(**changes):
    constants = dict(
        n=60, batch_size=20, steps=12, noise_multiplier=1.0, max_grad_norm=0.7, delta=1e-3
    )
    return Plan(**{**constants, "refresh_every": 4, **changes})


def model_of(seed=0, dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def trained(out, the_plan, seed=5, dropout=0.0, **options):
    model = model_of(dropout=dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run = fit(model, optimizer, LOSS, data(), the_plan, out=out, seed=seed, **options)
    return run, torch.cat([p.detach().flatten() for p in model.parameters()])


def test_run_leaves_the_plans_refreshes_and_charges(tmp_path):
    run, _ = trained(tmp_path / "run", plan())
    assert run.journal.refreshes == (0, 4, 8)
    assert run.journal.steps_charged == 12
    assert run.epsilons().values.shape == (60,)
    assert run.epsilons().kind == "estimate"


def test_first_recorded_norms_are_those_of_the_untrained_model(tmp_path):
    run, _ = trained(tmp_path / "run", plan())
    norms = gradient_norms(model_of(), LOSS, data(), batch_size=7)
    np.testing.assert_allclose(run.journal.norms(0), norms, rtol=1e-4)
    assert (run.journal.norms(0) >= norms).all()


@pytest.mark.parametrize("clipping", ["max", "individual"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_same_seed_gives_the_same_run_twice(tmp_path, clipping, dropout):
    first, weights = trained(tmp_path / "a", plan(clipping=clipping), dropout=dropout)
    second, again = trained(tmp_path / "b", plan(clipping=clipping), dropout=dropout)
    assert torch.equal(weights, again)
    np.testing.assert_array_equal(first.epsilons().values, second.epsilons().values)
    assert not torch.equal(weights, trained(tmp_path / "c", plan(), seed=6)[1])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_accounting_changes_no_weight(tmp_path, dropout):
    _, without = trained(tmp_path / "a", plan(refresh_every=None), dropout=dropout)
    _, rarely = trained(tmp_path / "b", plan(), dropout=dropout)
    _, always = trained(tmp_path / "c", plan(refresh_every=1), dropout=dropout)
    assert torch.equal(without, rarely)
    assert torch.equal(without, always)


def test_training_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    trained(tmp_path / "run", plan(), dropout=0.5)
    assert torch.equal(torch.rand(3), expected)


def test_runs_without_a_seed_differ(tmp_path):
    _, first = trained(tmp_path / "a", plan(), seed=None)
    _, second = trained(tmp_path / "b", plan(), seed=None)
    assert not torch.equal(first, second)


def test_individual_clipping_is_exact_and_costs_no_more_than_the_worst_case(tmp_path):
    run, _ = trained(tmp_path / "run", plan(clipping="individual"))
    found = run.epsilons()
    assert found.kind == "exact"
    assert (found.values <= found.worst_case * (1 + 1e-12)).all()


def test_a_tiny_clip_bound_puts_everyone_at_the_worst_case(tmp_path):
    small = plan(max_grad_norm=1e-6)
    run, _ = trained(tmp_path / "run", small)
    np.testing.assert_allclose(run.epsilons().values, small.worst_case("rdp"), rtol=1e-9)


def test_examples_get_their_losses_and_correctness(tmp_path):
    test = data(30, seed=9)
    names = Examples(ids=[f"t{i}" for i in range(30)], groups={"class": np.arange(30) % 3})
    run, _ = trained(
        tmp_path / "run", plan(), test=test, test_examples=names, correct_fn=correct_class
    )
    again = Run.open(tmp_path / "run")
    model = model_of()
    model.load_state_dict(torch.load(run.model_file, weights_only=True))
    with torch.no_grad():
        losses = LOSS(model, data().tensors)
        right = correct_class(model, test.tensors)
    np.testing.assert_allclose(again.examples.losses, losses.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(again.test.correct, right.numpy())
    assert list(again.test.groups) == ["class"]


def test_callback_and_schedule_run_after_every_step(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen = []
    fit(
        model, optimizer, LOSS, data(), plan(), out=tmp_path / "run", seed=1, scheduler=schedule,
        on_step=lambda step: seen.append((step.number, step.optimizer.param_groups[0]["lr"])),
    )  # fmt: skip
    assert seen == [(t, 1 / (2 + t)) for t in range(12)]


def test_empty_batches_are_charged_like_any_other(tmp_path):
    rare = plan(batch_size=None, sample_rate=1e-9, refresh_every=6)
    run, _ = trained(tmp_path / "run", rare)
    assert run.journal.steps_charged == 12
    assert (run.epsilons().values > 0).all()


def test_no_steps_is_a_run_that_costs_nothing(tmp_path):
    run, weights = trained(tmp_path / "run", plan(steps=0))
    assert (run.epsilons().values == 0).all()
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in model_of().parameters()]))


def test_private_half_is_closed_to_others(tmp_path):
    run, _ = trained(tmp_path / "run", plan(), test=data(30), correct_fn=correct_class)
    private = run.path / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    for file in private.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    public = sorted(file.name for file in (run.path / "public").iterdir())
    assert public == ["anchor.json", "plan.json"]


def test_a_folder_in_use_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        trained(tmp_path, plan())
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_data_of_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the plan says n=61"):
        trained(tmp_path / "run", plan(n=61))
