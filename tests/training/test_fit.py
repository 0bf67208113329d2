import json
import stat

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset
from trained import LOSS, data, plan, small_model, trained

from epsilons import Examples, Run
from epsilons.accounting.histories import clipping_thresholds
from epsilons.accounting.sums import NORM_ERROR, grid, rounding_charge
from epsilons.gradients import clipped_gradients, gradient_norms
from epsilons.journal.run_entries import recorded_now
from epsilons.training import correct_class, fit, own_part
from epsilons.training.identity import record_digests
from epsilons.training.step import clipped_sum


def test_run_leaves_the_plans_refreshes_and_charges(tmp_path):
    run, _ = trained(tmp_path / "run", plan())
    assert run.journal.refreshes == (0, 4, 8)
    assert run.journal.steps_charged == 12
    assert run.epsilons().values.shape == (60,)
    assert run.epsilons().kind == "estimate"


def test_first_recorded_norms_are_those_of_the_untrained_model(tmp_path):
    run, _ = trained(tmp_path / "run", plan())
    norms = gradient_norms(small_model(), LOSS, data(), batch_size=7)
    np.testing.assert_allclose(run.journal.norms(0), norms * (1 + NORM_ERROR), rtol=1e-5)
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
    np.testing.assert_allclose(run.epsilons().values, small.worst_case(), rtol=1e-9)


def test_examples_get_their_losses_and_correctness(tmp_path):
    test = data(30, seed=9)
    names = Examples(ids=[f"t{i}" for i in range(30)], groups={"class": np.arange(30) % 3})
    run, _ = trained(
        tmp_path / "run", plan(), test=test, test_examples=names, correct_fn=correct_class
    )
    again = Run.open(tmp_path / "run")
    model = small_model()
    model.load_state_dict(torch.load(run.model_file, weights_only=True))
    with torch.no_grad():
        losses = LOSS(model, data().tensors)
        right = correct_class(model, test.tensors)
    np.testing.assert_allclose(again.examples.losses, losses.numpy(), rtol=1e-6)
    np.testing.assert_array_equal(again.test.correct, right.numpy())
    assert list(again.test.groups) == ["class"]
    np.testing.assert_array_equal(again.examples.digests, record_digests(data()))


def test_callback_and_schedule_run_after_every_step(tmp_path):
    model = small_model()
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
    assert (run.epsilons(method="rdp").values > 0).all()


def test_no_steps_is_a_run_that_costs_nothing(tmp_path):
    run, weights = trained(tmp_path / "run", plan(steps=0))
    assert (run.epsilons().values == 0).all()
    assert torch.equal(
        weights, torch.cat([p.detach().flatten() for p in small_model().parameters()])
    )


def test_private_half_is_closed_to_others(tmp_path):
    run, _ = trained(tmp_path / "run", plan(), test=data(30), correct_fn=correct_class)
    private = run.path / "private"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    for file in private.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    public = sorted(file.name for file in (run.path / "public").iterdir())
    assert public == ["anchor.json", "checksums.json", "plan.json", "publications.json"]


def test_the_public_ledger_is_there_before_the_first_step(tmp_path):
    seen = []

    def look(step):
        file = step.run.path / "public" / "publications.json"
        seen.append(json.loads(file.read_text(encoding="utf-8")))

    trained(tmp_path / "run", plan(), on_step=look)
    assert seen[0]["publications"] == []
    assert seen[0]["total"]["epsilon"] == seen[0]["training"]["epsilon"] == plan().worst_case()


def test_a_folder_in_use_is_refused_and_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not empty"):
        trained(tmp_path, plan())
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("chosen", "sentence"),
    [
        (lambda model: small_model().parameters(), "none of the model's trainable parameters"),
        (lambda model: model[3].parameters(), r"leaves out 0\.weight, 0\.bias"),
    ],
)
def test_an_optimizer_that_does_not_train_the_model_is_refused(tmp_path, chosen, sentence):
    model = small_model()
    optimizer = torch.optim.SGD(chosen(model), lr=0.5)
    with pytest.raises(ValueError, match=sentence):
        fit(model, optimizer, LOSS, data(), plan(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_gradient_left_on_a_frozen_layer_is_refused(tmp_path):
    """One backward pass, then the layer was frozen: its raw gradient was applied at every step."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    LOSS(model, data().tensors).mean().backward()
    model[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"have a gradient \(0\.weight; 0\.bias\)"):
        fit(model, optimizer, LOSS, data(), plan(), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    optimizer.zero_grad()
    before = model[0].weight.clone()
    fit(model, optimizer, LOSS, data(), plan(), out=tmp_path / "run")
    assert torch.equal(model[0].weight, before)


def test_data_of_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the plan says n=61"):
        trained(tmp_path / "run", plan(n=61))


def test_norms_of_sampled_examples_are_recorded_where_values_are_estimates(tmp_path):
    run, _ = trained(tmp_path / "a", plan())
    assert recorded_now(run.journal, "sampled", 8)
    block, steps = next(run.journal.histories())
    assert block.shape == steps.shape
    np.testing.assert_array_equal(steps.sum(axis=0), 12)
    for name, changes in (("b", {"refresh_every": 1}), ("c", {"clipping": "individual"})):
        exact, _ = trained(tmp_path / name, plan(**changes))
        assert not recorded_now(exact.journal, "sampled", 0)


def test_followed_examples_have_the_exact_values_of_norms_at_every_step(tmp_path):
    run, weights = trained(tmp_path / "a", plan(), follow=10)
    every, same = trained(tmp_path / "b", plan(refresh_every=1))
    assert torch.equal(weights, same)
    chosen, norms = run.journal.followed()
    assert norms.shape == (12, 10)
    np.testing.assert_allclose(
        run.journal.followed_epsilons().values, every.epsilons().values[chosen], rtol=1e-5
    )
    other, _ = trained(tmp_path / "c", plan(), follow=10, seed=6)
    assert set(other.journal.followed()[0]) != set(chosen)


@pytest.mark.parametrize("clipping", ["max", "individual"])
def test_contribution_of_every_example_stays_within_its_charge(tmp_path, clipping, monkeypatch):
    """In float64, one example at a time: ‖clipped, rounded sum‖ ≤ what the journal charges."""

    checked = []

    def alone(model, optimizer, loss_fn, batch, phase, *, bounds, micro_batch, **options):
        x, y = batch
        limits = np.broadcast_to(np.asarray(bounds), len(y)).tolist()
        for row, limit in enumerate(limits):
            sums, _ = clipped_gradients(
                model, loss_fn, [x[row : row + 1], y[row : row + 1]],
                limit - rounding_charge(phase.noise_std, 67),
            )  # fmt: skip
            g = grid(phase.noise_std)
            moved = torch.cat([(s.double() / g).round().flatten() * g for s in sums.values()])
            checked.append(float(moved.norm()) <= limit)
        return clipped_sum(
            model, optimizer, loss_fn, batch, phase, bounds=bounds,
            micro_batch=micro_batch, **options,
        )  # fmt: skip

    monkeypatch.setattr(own_part, "clipped_sum", alone)
    trained(tmp_path / "run", plan(clipping=clipping, max_grad_norm=0.3))
    assert len(checked) > 100
    assert all(checked)


def test_thresholds_are_what_is_charged(tmp_path, monkeypatch):

    given = []

    def watched(*arguments, bounds, **options):
        given.append(bounds)
        return clipped_sum(*arguments, bounds=bounds, **options)

    monkeypatch.setattr(own_part, "clipped_sum", watched)
    run, _ = trained(tmp_path / "run", plan(clipping="individual", levels=16))
    used = np.concatenate([bounds.numpy() for bounds in given])
    levels = 0.7 * np.arange(17) / 16
    assert set(used) <= set(levels[1:])
    first = clipping_thresholds(run.journal.norms(0), 0.7, 16)
    assert set(given[0].numpy()) <= set(first)


@pytest.mark.parametrize("clipping", ["max", "individual"])
def test_phases_change_noise_bound_and_rate_where_they_say(tmp_path, clipping, monkeypatch):

    seen = []

    def watched(model, optimizer, loss_fn, batch, phase, *, bounds, **options):
        seen.append((phase.noise_std, float(np.max(np.asarray(bounds)))))
        return clipped_sum(model, optimizer, loss_fn, batch, phase, bounds=bounds, **options)

    monkeypatch.setattr(own_part, "clipped_sum", watched)
    changing = plan(
        clipping=clipping, refresh_every=5,
        phases=((4, {"noise_multiplier": 2.0}), (8, {"max_grad_norm": 0.1, "batch_size": 40})),
    )  # fmt: skip
    run, _ = trained(tmp_path / "run", changing)
    assert [std for std, _ in seen] == [0.7] * 4 + [1.4] * 4 + [0.2] * 4
    assert all(bound <= 0.1 for _, bound in seen[8:])
    assert run.epsilons().worst_case == pytest.approx(changing.worst_case(), rel=1e-9)
    assert (run.epsilons().values <= run.epsilons().worst_case).all()
    assert run.journal.refreshes == (0, 5, 10)


def test_run_ends_before_the_worst_case_exceeds_a_limit(tmp_path):
    limit = plan().worst_case(steps=7) + 1e-6
    run, _ = trained(tmp_path / "run", plan(), max_epsilon=limit)
    assert run.journal.steps_charged == 7
    assert run.epsilons().worst_case <= limit
    assert run.finished


def test_examples_without_a_finite_gradient_are_charged_in_full_and_named(tmp_path):
    broken = data()
    broken.tensors[0][17] = torch.nan
    names = Examples(ids=[f"p{i}" for i in range(60)])
    run, weights = trained(tmp_path / "run", plan(), train=broken, examples=names)
    assert weights.isfinite().all()
    found = run.epsilons()
    assert found.values[17] == pytest.approx(found.worst_case, rel=1e-12)
    lines = (run.path / "private" / "non_finite.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 0, "ids": ["p17"]}
    assert stat.S_IMODE((run.path / "private" / "non_finite.jsonl").stat().st_mode) == 0o600


@pytest.mark.parametrize("clipping", ["max", "individual"])
@pytest.mark.parametrize(
    "tensors",
    [
        (torch.zeros(60, 4), torch.arange(60) % 3),
        (torch.randn(60, 4), torch.zeros(60, dtype=torch.long)),
        (torch.full((60, 4), torch.nan), torch.arange(60) % 3),
        (torch.randn(2, 4), torch.tensor([0, 1])),
    ],
    ids=["constant images", "one class", "all NaN", "n = 2"],
)
def test_odd_data_is_trained_on_all_the_same(tmp_path, clipping, tensors):
    n = len(tensors[1])
    odd = plan(n=n, batch_size=n / 2, clipping=clipping)
    run, weights = trained(tmp_path / "run", odd, train=TensorDataset(*tensors))
    assert weights.isfinite().all()
    values = run.epsilons().values
    assert ((values >= 0) & (values <= run.epsilons().worst_case)).all()
    run.journal.verify()


def test_micro_batches_change_no_more_than_rounding(tmp_path):
    _, whole = trained(tmp_path / "a", plan())
    _, parts = trained(tmp_path / "b", plan(), micro_batch=3)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-5)


def test_dropout_makes_common_clipping_an_estimate_at_every_step(tmp_path):
    run, _ = trained(tmp_path / "a", plan(refresh_every=1), dropout=0.5)
    assert run.epsilons().kind == "estimate"
    run, _ = trained(tmp_path / "b", plan(refresh_every=1))
    assert run.epsilons().kind == "exact"


def test_seed_marks_the_run(tmp_path):
    assert trained(tmp_path / "a", plan(), seed=5)[0].seed == 5
    assert trained(tmp_path / "b", plan(), seed=None)[0].seed is None


def test_plain_training_is_the_sum_of_gradients_and_not_private(tmp_path):
    model, reference = small_model(), small_model()
    one_step = plan(clipping="none", noise_multiplier=0, steps=1, batch_size=60, refresh_every=1)
    run = fit(
        model, torch.optim.SGD(model.parameters(), lr=1.0), LOSS, data(), one_step,
        out=tmp_path / "run", seed=1,
    )  # fmt: skip
    LOSS(reference, data().tensors).mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q - q.grad)
    found = run.epsilons()
    assert found.kind == "none"
    assert found.worst_case == np.inf
    assert (found.values == np.inf).all()
    assert json.loads((run.path / "public" / "plan.json").read_text())["worst_case"] is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seed": "a"}, "seed='a' must be a whole number"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"device": "foo"}, "device='foo' can't be used here"),
        ({"device": "cuda:99"}, "device='cuda:99' can't be used here"),
    ],
)
def test_wrong_options_are_refused_before_there_is_a_folder(tmp_path, options, sentence):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=sentence):
        fit(model, optimizer, LOSS, data(), plan(), out=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
