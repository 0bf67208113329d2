"""Random losses and data are recorded, and mixed examples refused: before training and later."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset, Subset
from trained import LOSS, data, plan, small_model, trained

from epsilons import Run
from epsilons.gradients import UnsupportedLayer, check_model
from epsilons.journal.norm_records import norms_of_some
from epsilons.journal.run_entries import opening
from epsilons.training import batches, fit, inspection, own_part
from epsilons.training.inspection import inspect_refresh, inspect_start


class Augmented(Dataset):
    """The data with noise on every picture, drawn anew at each access, after the first `since`.

    `only`: the one example that is augmented.
    """

    def __init__(self, since=0, only=None):
        self.data, self.since, self.only, self.accesses = data(), since, only, 0

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        self.accesses += 1
        x, y = self.data[i]
        drawn = self.accesses > self.since and self.only in (None, i)
        return (x + 0.5 * torch.randn(4) if drawn else x), y


@pytest.fixture
def steps(monkeypatch):
    """Who was drawn at each step, and the norms of their gradients in it."""
    seen = []
    draw, step = batches.poisson_draw, own_part.clipped_sum

    def drawn(*arguments, **part):
        seen.append([draw(*arguments, **part).numpy()])
        return torch.from_numpy(seen[-1][0])

    def stepped(*arguments, **options):
        taken = step(*arguments, **options)
        seen[-1].append(taken.norms.numpy())
        return taken

    monkeypatch.setattr(batches, "poisson_draw", drawn)
    monkeypatch.setattr(own_part, "clipped_sum", stepped)
    return seen


def exceeded(run, steps):
    """Contributions above what was charged for them, of how many."""
    bound = run.plan.max_grad_norm
    charged = np.array([run.journal.norms(t) for t in range(len(steps))])
    for entry in run.journal._chain.entries("sampled"):
        at, who, norms = norms_of_some(run.journal._chain, entry)
        charged[at, who] = norms
    over = [
        np.minimum(norms, bound) > np.minimum(charged[t, who], bound) * (1 + 1e-6)
        for t, (who, norms) in enumerate(steps)
    ]
    return int(np.concatenate(over).sum()), sum(map(len, over))


def test_augmentation_makes_an_estimate_and_the_steps_own_norms_are_recorded(tmp_path, steps):
    """K = 1 said `exact`, and one contribution in three exceeded what was charged for it."""
    run, _ = trained(tmp_path / "run", plan(refresh_every=1, max_grad_norm=2.0), train=Augmented())
    assert opening(run.journal).facts["random_data"]
    assert (run.journal.random, run.epsilons().kind) == (("data",), "estimate")
    over, of = exceeded(run, steps)
    assert (over, of > 200) == (0, True)


def test_data_that_draw_nothing_stay_exact(tmp_path, steps):
    run, _ = trained(tmp_path / "run", plan(refresh_every=1, max_grad_norm=2.0))
    assert (run.journal.random, run.epsilons().kind) == ((), "exact")
    assert exceeded(run, steps)[0] == 0
    same = Subset(data(), range(60))
    again, _ = trained(tmp_path / "again", plan(refresh_every=1, max_grad_norm=2.0), train=same)
    assert again.journal.random == ()


def test_augmentation_that_begins_later_is_on_record_from_the_next_refresh_on(tmp_path):
    run, _ = trained(tmp_path / "run", plan(), train=Augmented(since=460))
    assert not opening(run.journal).facts["random_data"]
    (found,) = run.journal._chain.entries("random")
    assert found.facts == {"what": "data", "step": 4}
    assert run.verify().epsilons.kind == "estimate"


def test_augmentation_missed_by_inspections_is_found_by_the_norms_of_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(inspection, "FETCHED", 4)
    train = Augmented(only=1)
    run, _ = trained(
        tmp_path / "run", plan(refresh_every=1, steps=6, batch_size=60, max_grad_norm=9.0),
        train=train,
    )  # fmt: skip
    assert not inspect_refresh(small_model(), LOSS, train, 0).random_data
    assert (run.journal.random, run.epsilons().kind) == (("norms",), "estimate")


def test_an_inspection_leaves_the_generators_as_they_were():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    found = inspect_start(small_model(dropout=0.5), LOSS, Augmented())
    assert (found.random_loss, found.random_data) == (True, True)
    assert torch.equal(torch.rand(2), expected)


def by_class_counts(model, batch):
    x, y = batch
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses / torch.bincount(y, minlength=3)[y]


def by_class_shares(model, batch):
    """Weights that stay as they are when everyone is there twice."""
    return by_class_counts(model, batch) * len(batch[1])


def towards_namesakes(model, batch):
    """A pull towards others of the same label, which is 0 for an example that is there twice."""
    x, y = batch
    h = model(x)
    apart = (h[:, None] - h[None]).square().sum(2)
    same = (y[:, None] == y[None]).float() - torch.eye(len(y))
    return F.cross_entropy(h, y, reduction="none") + (apart * same).sum(1) / same.sum(1).clamp(1)


def in_the_gradient_alone(model, batch):
    """Losses as they should be, whose gradients are also those of others of the same label."""
    x, y = batch
    h = model(x)
    same = (y[:, None] == y[None]).float() - torch.eye(len(y))
    pull = same @ h.sum(1)
    return F.cross_entropy(h, y, reduction="none") + pull - pull.detach()


@pytest.mark.parametrize("loss_fn", [by_class_counts, by_class_shares, towards_namesakes])
@pytest.mark.parametrize("count", [3, 9])
def test_a_loss_that_mixes_by_label_is_refused_though_the_first_labels_differ(loss_fn, count):
    """Divided by class counts, one example moved the sum by 1.67 C."""
    x, y = data().tensors
    assert y[:3].tolist() == [0, 1, 2]
    with pytest.raises(UnsupportedLayer, match="how often a class is in the batch"):
        check_model(small_model(), loss_fn, (x[:count], y[:count]))
    with pytest.raises(UnsupportedLayer, match="how often a class is in the batch"):
        check_model(small_model(dropout=0.5), loss_fn, (x[:count], y[:count]))


def test_gradients_that_mix_by_label_are_refused_though_the_first_labels_differ():
    x, y = data().tensors
    with pytest.raises(UnsupportedLayer):
        check_model(small_model(), in_the_gradient_alone, (x[:3], y[:3]))


def test_dropout_and_other_draws_raise_no_alarm_at_any_refresh():
    train = data()

    def noisy(model, batch):
        return LOSS(model, batch) + 0.1 * torch.rand(len(batch[1]))

    for step in range(8):
        found = [
            inspect_refresh(small_model(step, dropout=0.5), LOSS, train, step, most=most)
            for most in (1, 4, 256)
        ]
        found.append(inspect_refresh(small_model(step), noisy, train, step))
        assert [one[:2] for one in found] == [(True, False)] * 4


def test_at_a_refresh_differences_of_small_losses_are_taken_for_rounding():
    """Of a trained network all losses may be near 0, and rounding a large part of them."""

    def nearly_zero(model, batch):
        return 1e-6 * (LOSS(model, batch) + len(batch[1]))

    assert inspect_refresh(small_model(), nearly_zero, data(), 0)[:2] == (False, False)
    with pytest.raises(UnsupportedLayer, match="by themselves"):
        check_model(small_model(), nearly_zero, data()[:16])


def test_a_loss_that_mixes_later_stops_the_run_and_its_figures_are_refused(tmp_path):
    model, calls = small_model(), []

    def later(model, batch):
        calls.append(len(batch[1]))
        return (LOSS if len(calls) < 120 else by_class_counts)(model, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedLayer, match="by themselves"):
        fit(model, optimizer, later, data(), plan(refresh_every=1, steps=30), out=tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert 0 < run.journal.steps_charged < 30
    with pytest.raises(ValueError, match="no figure of this run holds"):
        run.epsilons()
    with pytest.raises(ValueError, match="no figure of this run holds"):
        run.verify()
