"""Owners as the examples of a run: drawn, clipped and charged with all their records."""

import json
from unittest import mock

import numpy as np
import pytest
import torch
from test_sum_attacks_on_runs import Recorder, distance_moved
from torch.utils.data import TensorDataset
from trained import LOSS, data, entries, outcome, plan, small_model, trained

from epsilons import Examples, Journal, Plan, individual_epsilons
from epsilons.gradients import gradient_norms
from epsilons.gradients.groups import group_loss, grouped
from epsilons.noise import SeededNoise
from epsilons.training import PoissonLoader, PrivateTraining, correct_class, own_part, private_step
from epsilons.training.identity import difference, identity, record_digests
from epsilons.training.owners import unit_of
from epsilons.training.step import clipped_sum, taken_step

MOST = 4
# 60 records of 25 owners, in no order: c has one, b two, a three, and so on
NAMES = [f"owner-{k}" for k in np.random.default_rng(3).permutation(np.arange(60) * 25 // 60)]
PEOPLE = Examples(ids=np.arange(60), owners=NAMES, groups={"label": np.arange(60) % 3})
OF_OWNER = [np.flatnonzero(np.array(NAMES) == name) for name in dict.fromkeys(NAMES)]


def per_person(**changes):
    constants = dict(n=25, batch_size=8, unit="owner", max_records_per_owner=MOST, levels=32)
    return plan(**{**constants, **changes})


def own_norms(model):
    """Each owner's norm, from the sum of the losses of their records: by autograd."""
    found = []
    x, y = data().tensors
    for rows in OF_OWNER:
        loss = LOSS(model, (x[rows], y[rows])).sum()
        gradient = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([g.flatten() for g in gradient]).norm().item())
    return np.array(found)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    where = tmp_path_factory.mktemp("owners") / "run"
    return trained(
        where, per_person(refresh_every=1), examples=PEOPLE, test=data(30, seed=1),
        correct_fn=correct_class,
    )[0]  # fmt: skip


def test_the_journal_has_the_norms_of_owners(run):
    assert run.journal.ids.tolist() == list(dict.fromkeys(NAMES))
    expected = own_norms(small_model())
    assert np.allclose(run.journal.norms(0), expected * (1 + 1e-4), rtol=1e-5)
    assert (run.journal.norms(0) >= expected).all()


def test_every_owner_has_one_epsilon_by_the_same_accountant(run):
    norms = np.stack([run.journal.norms(step) for step in range(12)])
    by_hand = individual_epsilons(
        norms, np.ones(12, dtype=int), noise_std=0.7, sample_rate=8 / 25, max_grad_norm=0.7,
        delta=1e-3, levels=32,
    )  # fmt: skip
    found = run.epsilons()
    assert np.allclose(found.values, by_hand.values, rtol=1e-6)
    assert found.kind == "exact"
    assert found.worst_case == run.plan.worst_case()
    same = Plan(n=25, batch_size=8, steps=12, noise_multiplier=1.0, max_grad_norm=0.7, delta=1e-3)
    assert run.plan.worst_case() == same.worst_case()
    assert run.journal.sums_covered


def test_records_of_an_owner_are_always_drawn_together(tmp_path):
    drawn = []

    def noted(model, optimizer, loss_fn, batch, *rest, **options):
        (x, _), present = batch
        drawn.append({tuple(row.tolist()) for row in x[present]})
        return clipped_sum(model, optimizer, loss_fn, batch, *rest, **options)

    with mock.patch.object(own_part, "clipped_sum", noted):
        trained(tmp_path / "run", per_person(), examples=PEOPLE)
    rows = [tuple(row.tolist()) for row in data().tensors[0]]
    assert len(drawn) == 12
    for batch in drawn:
        whole = [all(rows[k] in batch for k in its) for its in OF_OWNER]
        none = [not any(rows[k] in batch for k in its) for its in OF_OWNER]
        assert all(a or b for a, b in zip(whole, none, strict=True))
        assert 0 < sum(whole) < 25


def test_one_record_each_is_the_same_run_as_per_record(tmp_path):
    alone = Examples(ids=np.arange(60), owners=[f"p{k}" for k in range(60)])
    one_each = dict(unit="owner", max_records_per_owner=1)
    per_record, its = trained(tmp_path / "record", plan(levels=16), examples=alone)
    person, theirs = trained(tmp_path / "person", plan(levels=16, **one_each), examples=alone)
    assert torch.equal(its, theirs)
    assert np.array_equal(per_record.epsilons().values, person.epsilons().values)
    assert np.array_equal(per_record.examples.losses, person.examples.losses)
    # all but the opening, which has the plan, and who the examples are
    assert entries(per_record)[2:] == entries(person)[2:]


def steep(generator, owners, most=MOST):
    """Records whose gradients are far beyond the bound, and of the same direction for a person."""
    x = 50 * torch.randn(owners, 1, 4, generator=generator).expand(owners, most, 4)
    y = torch.randint(3, (owners, most), generator=generator)
    present = torch.arange(most) < torch.randint(1, most + 1, (owners, 1), generator=generator)
    return (x[present], y[present]), present


@pytest.mark.parametrize("seed", range(5))
def test_a_person_moves_what_a_step_releases_by_no_more_than_the_bound(seed):
    generator = torch.Generator().manual_seed(seed)
    (x, y), present = steep(generator, 12)
    the_plan = per_person(n=200, batch_size=12)
    phase, model = the_plan.phase(0), small_model(seed)

    def released(first):
        recorder, count = Recorder(), int(present[:first].sum())
        batch = grouped((x[count:], y[count:]), present[first:])
        taken_step(
            model, torch.optim.SGD(model.parameters(), lr=0.0), group_loss(LOSS), batch, phase,
            noise=recorder, bounds=phase.max_grad_norm,
        )  # fmt: skip
        return recorder.sums

    moved = distance_moved(released(0), released(1))
    assert 0.99 * 0.7 < moved <= 0.7  # where single records were clipped, it would be several times


def test_individual_clipping_and_phases_go_by_owner(tmp_path):
    phases = ((5, {"noise_multiplier": 1.5}), (9, {"max_grad_norm": 0.4, "batch_size": 10}))
    the_plan = per_person(clipping="individual", phases=phases, refresh_every=3)
    run, _ = trained(tmp_path / "run", the_plan, examples=PEOPLE, follow=2)
    assert run.epsilons(method="rdp").kind == "exact"
    assert len(run.journal.bounds(11, np.arange(25))) == 25
    assert run.journal.followed()[1].shape == (12, 2)


def test_a_run_of_owners_resumes_to_the_same_bits(tmp_path):
    class Stop(Exception):
        pass

    options = dict(examples=PEOPLE, test=data(30, seed=1), correct_fn=correct_class)
    whole, its = trained(tmp_path / "whole", per_person(), **options)

    def stop(step):
        if step.number == 6:
            raise Stop

    with pytest.raises(Stop):
        trained(tmp_path / "run", per_person(), on_step=stop, **options)
    run, theirs = trained(tmp_path / "run", per_person(), resume=True, num_workers=1, **options)
    assert torch.equal(its, theirs)
    assert outcome(run) == outcome(whole)


def test_other_owners_of_the_same_records_are_another_run(tmp_path):
    def begun(people):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        return PrivateTraining(
            model, optimizer, LOSS, data(), per_person(), out=tmp_path / "run", examples=people
        )

    begun(PEOPLE).run.journal.close()
    swapped = list(NAMES)
    a, b = OF_OWNER[0][-1], OF_OWNER[1][-1]
    swapped[a], swapped[b] = swapped[b], swapped[a]
    with pytest.raises(ValueError, match="data set was"):
        begun(Examples(ids=np.arange(60), owners=swapped))


def test_outcomes_groups_and_digests_are_those_of_owners(run):
    model = small_model()
    model.load_state_dict(torch.load(run.model_file, weights_only=True))
    model.eval()
    losses = LOSS(model, data().tensors).detach().numpy()
    right = correct_class(model, data().tensors).numpy()
    labels = np.arange(60) % 3
    for k, rows in enumerate(OF_OWNER):
        assert run.examples.losses[k] == pytest.approx(losses[rows].mean(), rel=1e-5)
        assert run.examples.correct[k] == (right[rows].mean() >= 0.5)
        of_one = len(set(labels[rows])) == 1
        assert run.examples.groups["label"][k] == (str(labels[rows[0]]) if of_one else "several")
    assert len(set(run.examples.digests.tolist())) == 25
    assert run.examples.owners is None
    assert len(run.test.losses) == 30


def test_the_digest_of_an_owner_does_not_depend_on_the_order_of_the_records():
    order = np.random.default_rng(0).permutation(60)
    shuffled = TensorDataset(*(t[order] for t in data().tensors))
    people = Examples(ids=order, owners=np.array(NAMES)[order])
    one, other = (
        unit_of(per_person(), train, LOSS, its)
        for train, its in ((data(), PEOPLE), (shuffled, people))
    )
    found = dict(zip(one.examples.ids, record_digests(one.train), strict=True))
    assert found == dict(zip(other.examples.ids, record_digests(other.train), strict=True))


def test_passes_have_no_more_records_than_micro_batch(tmp_path):
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch[1]))
        return LOSS(model, batch)

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    people = dict(out=tmp_path / "run", examples=PEOPLE, seed=1, micro_batch=32)
    training = PrivateTraining(model, optimizer, loss_fn, data(), per_person(), **people)
    seen.clear()
    for _ in training:
        pass
    assert max(seen) <= 32 + MOST  # the checks at refreshes have one owner twice
    assert unit_of(per_person(), data(), LOSS, PEOPLE, micro_batch=3).micro_batch == 1


def test_a_list_of_records_is_as_good_as_tensors():
    listed = [(x, int(y)) for x, y in data()]
    found = []
    for train in (data(), listed):
        unit = unit_of(per_person(), train, LOSS, PEOPLE)
        norms = gradient_norms(
            small_model(), unit.loss_fn, unit.train, batch_size=8, collate_fn=unit.collate_fn
        )
        found.append(norms)
    assert np.array_equal(*found)


def refused(match, the_plan=None, people=PEOPLE, train=None):
    with pytest.raises(ValueError, match=match) as error:
        unit_of(the_plan or per_person(), train or data(), LOSS, people)
    return str(error.value)


def test_what_is_wrong_with_owners_is_said_at_the_door():
    refused("whose each record is", people=None)
    refused("whose each record is", people=Examples(ids=np.arange(60)))
    refused("have 25 owners; the plan says n=60", per_person(n=60))
    refused("60 records, and 30 are named", people=Examples(np.arange(30), owners=NAMES[:30]))
    said = refused("max_records_per_owner=2", per_person(max_records_per_owner=2))
    assert "owner-" not in said
    assert "3" not in said
    with pytest.raises(ValueError, match="the most records that anyone may have"):
        plan(unit="owner")
    with pytest.raises(ValueError, match="unit='person'; expected 'record' or 'owner'"):
        plan(unit="person")


def test_dividing_epsilon_among_records_is_refused_where_records_are_drawn():
    with pytest.raises(ValueError, match=r"ε = 1 cost 1\.068 together, fifths 1\.160"):
        PoissonLoader(data(), per_person())
    model = small_model()
    with pytest.raises(ValueError, match="clip each record by itself"):
        private_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS, data().tensors, per_person(),
            noise=SeededNoise(1),
        )  # fmt: skip
    one_each = plan(unit="owner", max_records_per_owner=1)
    assert len(PoissonLoader(data(), one_each)) == 12


def test_the_plan_of_a_journal_says_whom_it_is_about(tmp_path):
    with Journal.create(tmp_path / "journal.sqlite", per_person()) as journal:
        assert (journal.plan.per, journal.plan.unit) == ("person", "owner")
    fields = json.loads(json.dumps(per_person().to_dict()))
    assert Plan.from_dict(fields) == per_person()
    del fields["unit"]  # a plan from before there was a choice
    assert Plan.from_dict(fields).per == "record"


def test_a_run_that_an_earlier_version_began_is_gone_on_with():
    """Fields that it didn't know are part of what makes two calls the same run if they are set."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    names = {
        the_plan.unit: identity(the_plan, model, optimizer, data(), PEOPLE)
        for the_plan in (plan(), plan(unit="owner", max_records_per_owner=1))
    }
    assert not {"plan unit", "plan adaptive"} & names["record"].keys()
    assert names["owner"]["plan unit"] == '"owner"'
    assert difference(names["record"], names["owner"], besides="").startswith("plan max_records")
