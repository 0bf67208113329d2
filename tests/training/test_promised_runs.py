"""Runs with budgets: what is trained, resumed and verified, and who is out without a trace."""

import dataclasses

import numpy as np
import pytest
import torch
import trained
from torch.utils.data import TensorDataset

from epsilons import Examples, Plan, Run
from epsilons.integrations.accounted import Accounted
from epsilons.training import Interrupted, PrivateTraining, private_step
from epsilons.training.step import without_out

N = 60
OWN = np.array([2.0, 8.0])[np.arange(N) % 2]
EXAMPLES = Examples(ids=np.arange(N), budgets=OWN)


def plan(**changes):
    return trained.plan(**{"budgets": (2.0, 8.0), "noise_multiplier": 1.2, **changes})


def run_of(out, the_plan, examples=EXAMPLES, **options):
    return trained.trained(out, the_plan, examples=examples, **options)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clipping": "individual", "levels": 16},
        {"clipping": "filtered", "levels": 16},
        {"clipping": "filtered", "pace": 1.0, "noise_multiplier": 0.6},
    ],
)
def test_a_run_keeps_its_promises(tmp_path, changes):
    run, _ = run_of(tmp_path / "run", plan(**changes))
    found = run.verify().epsilons
    most = np.array([promise.epsilon for promise in run.promises])[np.arange(N) % 2]
    assert (found.cautious <= most * (1 + 1e-9)).all()
    assert max(most) == run.plan.worst_case() == found.worst_case
    np.testing.assert_array_equal(run.examples.budgets, OWN)
    if changes.get("noise_multiplier"):  # Feldman & Zrnic: some are out in the end
        assert (run.journal.bounds(11, np.arange(N)) == 0).any()


@pytest.mark.parametrize("clipping", ["max", "filtered"])
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path, clipping):
    the_plan = plan(clipping=clipping, pace=1.0 if clipping == "filtered" else 0.0)

    def press(now):
        if now.number == 6:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run_of(tmp_path / "run", the_plan, on_step=press)
    run, weights = run_of(tmp_path / "run", the_plan, resume=True)
    _, expected = run_of(tmp_path / "whole", the_plan)
    assert torch.equal(weights, expected)
    run.verify()


@pytest.mark.parametrize("phases", [(), ((9, {"noise_multiplier": 2.0}),)])
def test_steps_charged_again_take_the_place_of_the_last_ones(tmp_path, phases):
    the_plan = plan(phases=phases)

    def press(now):
        if now.number == 5:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run_of(tmp_path / "run", the_plan, on_step=press)
    (tmp_path / "run" / "private" / "checkpoint.pt").unlink()
    seen = []
    run, _ = run_of(
        tmp_path / "run", the_plan, resume=True, on_step=lambda now: seen.append(now.number)
    )
    # steps 0 to 7 were charged before; that many fewer are left of the first phase
    planned = [phase.end - phase.first for phase in the_plan.all_phases]
    assert list(run.journal.charged()) == planned
    assert run.journal.repeated == 8
    assert seen == ([0, 1, 2, 3] if not phases else [0, 9, 10, 11])
    assert run.finished
    assert run.verify().epsilons.worst_case == pytest.approx(the_plan.worst_case(), rel=1e-12)
    assert Run.checked(run.path)


def test_a_filter_pays_for_repeated_steps_from_the_same_allowance(tmp_path):
    the_plan = plan(clipping="filtered", pace=1.0)

    def press(now):
        if now.number == 5:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run_of(tmp_path / "run", the_plan, on_step=press)
    (tmp_path / "run" / "private" / "checkpoint.pt").unlink()
    run, _ = run_of(tmp_path / "run", the_plan, resume=True)
    assert run.journal.charged() == (20,)
    most = np.array([promise.epsilon for promise in run.promises])[np.arange(N) % 2]
    assert (run.verify().epsilons.values <= most * (1 + 1e-9)).all()


def test_who_is_out_adds_exactly_nothing(tmp_path):
    """Their records could be anything: not a bit of the weights is another."""
    own = np.where(np.arange(N) < 8, 0.2, 8.0)
    the_plan = plan(
        budgets=(0.2, 8.0), clipping="filtered", pace=1.0, levels=1, noise_multiplier=1.5
    )
    x, y = trained.data().tensors
    other = x.clone()
    other[:8] = 100.0
    found = []
    for k, features in enumerate((x, other)):
        run, weights = run_of(
            tmp_path / f"run{k}", the_plan, Examples(ids=np.arange(N), budgets=own),
            train=TensorDataset(features, y),
        )  # fmt: skip
        assert (run.journal.bounds(0, np.arange(8)) == 0).all()
        assert (run.journal.bounds(0, np.arange(8, N)) > 0).all()
        found.append(weights)
    assert torch.equal(*found)


def test_with_everyone_out_there_is_noise_all_the_same(tmp_path):
    the_plan = plan(budgets=(0.2,), clipping="filtered", pace=1.0, levels=1)
    run, weights = run_of(tmp_path / "run", the_plan, None)
    assert (run.journal.bounds(0, np.arange(N)) == 0).all()
    before = trained.weights(trained.small_model())
    assert not torch.equal(weights, before)
    assert (run.epsilons().values == 0).all()


def test_who_is_out_is_left_out_of_the_batch():
    indices, batch, bounds = without_out(
        torch.tensor([4, 7, 9]), (torch.arange(3.0), torch.ones(3)), torch.tensor([0.5, 0.0, 1.0])
    )
    assert indices.tolist() == [4, 9]
    assert batch[0].tolist() == [0.0, 2.0]
    assert bounds.tolist() == [0.5, 1.0]
    nobody = without_out(torch.tensor([4]), (torch.ones(1),), torch.zeros(1))
    assert nobody[1] is None


def test_a_step_refuses_who_is_out_and_says_the_way():
    model = trained.small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = trained.data().tensors
    from epsilons.noise import SeededNoise

    with pytest.raises(ValueError, match="Leave it out of the batch"):
        private_step(
            model, optimizer, trained.LOSS, (x[:2], y[:2]), trained.plan().phase(0),
            noise=SeededNoise(0), bounds=torch.tensor([0.5, 0.0]),
        )  # fmt: skip


@pytest.mark.parametrize("change", ["budget", "plan"])
def test_budgets_can_t_be_chosen_anew_after_the_first_step(tmp_path, change):
    def press(now):
        if now.number == 5:
            raise KeyboardInterrupt

    with pytest.raises((Interrupted, KeyboardInterrupt)):
        run_of(tmp_path / "run", plan(), on_step=press)
    if change == "plan":
        with pytest.raises(ValueError, match="plan budgets was"):
            run_of(tmp_path / "run", plan(budgets=(2.0, 8.0, 9.0)), resume=True)
    else:
        other = OWN.copy()
        other[3] = 2.0
        with pytest.raises(ValueError, match="examples have other budgets now") as refused:
            run_of(tmp_path / "run", plan(), Examples(ids=np.arange(N), budgets=other), resume=True)
        assert "was" not in str(refused.value).split("else: ")[1]


def test_without_labels_training_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="who has which is not said"):
        run_of(tmp_path / "run", plan(), None)
    assert not (tmp_path / "run" / "private" / "journal.sqlite").exists()


def test_another_library_s_loop_is_refused(tmp_path):
    model = trained.small_model()
    with pytest.raises(ValueError, match="keeps no promise of its own"):
        Accounted(
            model, torch.optim.SGD(model.parameters(), lr=0.1), trained.LOSS, trained.data(),
            plan(), out=tmp_path / "run", taken=0,
        )  # fmt: skip


def test_a_loop_of_steps_shows_no_one_s_budget(tmp_path, capsys):
    model = trained.small_model()
    training = PrivateTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.1), trained.LOSS, trained.data(),
        plan(steps=2, clipping="filtered"), out=tmp_path / "run", examples=EXAMPLES, seed=1,
    )  # fmt: skip
    shown = [f"{training!r} {step!r}" for step in training]
    assert len(shown) == 2
    said = "".join(shown) + "".join(capsys.readouterr())
    assert "budget" not in said
    assert "out of" not in said


def test_runs_from_before_there_were_budgets_are_the_same_runs(tmp_path):
    from epsilons.training.identity import identity

    model = trained.small_model()
    me = identity(
        trained.plan(), model, torch.optim.SGD(model.parameters(), lr=0.1), trained.data(),
        Examples.numbered(N),
    )  # fmt: skip
    assert not {"plan budgets", "plan pace", "budgets of examples"} & me.keys()
    assert isinstance(Plan.from_dict(dataclasses.asdict(trained.plan())), Plan)


@pytest.mark.parametrize("clipping", ["max", "filtered"])
def test_a_person_with_all_their_records_has_one_budget(tmp_path, clipping):
    """`unit="owner"`: whoever is out is out with all their records."""
    owners = np.arange(N) // 3
    own = np.where(owners % 4 == 0, 0.2, 8.0)
    the_plan = plan(
        n=20, batch_size=8, unit="owner", max_records_per_owner=3, budgets=(0.2, 8.0),
        clipping=clipping, levels=1 if clipping == "filtered" else 256, noise_multiplier=1.5,
        pace=1.0 if clipping == "filtered" else 0.0,
    )  # fmt: skip
    names = Examples(ids=np.arange(N), owners=owners, budgets=own)
    run, weights = run_of(tmp_path / "run", the_plan, names)
    np.testing.assert_array_equal(run.examples.budgets, own[::3])
    bounds = run.journal.bounds(3, np.arange(20))
    assert (bounds[::4] < bounds[1]).all()
    most = np.array([p.epsilon for p in run.promises])[(run.examples.budgets > 1).astype(int)]
    assert (run.verify().epsilons.cautious <= most * (1 + 1e-9)).all()
    if clipping == "filtered":
        assert (bounds[::4] == 0).all()
        x, y = trained.data().tensors
        other = x.clone()
        other[owners % 4 == 0] = 100.0
        _, same = run_of(tmp_path / "other", the_plan, names, train=TensorDataset(other, y))
        assert torch.equal(weights, same)
