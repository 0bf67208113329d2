"""Promises in a journal: what is clipped to what, what is charged, and who finds out what."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons import Examples, Journal, Margin, Plan, Run
from epsilons.accounting.filters import ALL
from epsilons.accounting.histories import clipping_thresholds, level_norms
from epsilons.journal import promised
from epsilons.journal.filtered import Filter, segments

N = 12
BUDGETS = (1.0, 2.0, 4.0)
OWN = np.array(BUDGETS)[np.arange(N) % 3]
EXACT = Margin(relative=0.0, parameters=1)


def scaled(**changes):
    constants = dict(
        n=N, sample_rate=0.2, steps=40, noise_multiplier=1.2, max_grad_norm=2.0, delta=1e-5,
        refresh_every=10, budgets=BUDGETS,
    )  # fmt: skip
    return Plan(**{**constants, **changes})


def filtered(**changes):
    how = {"clipping": "filtered", "noise_multiplier": 1.0, "levels": 32, "order": 16.0}
    return scaled(**{**how, **changes})


def journal_of(path, plan, **options):
    return Journal.create(
        path, plan, margin=EXACT, budgets=OWN if len(plan.budgets) > 1 else None, **options
    )


def norms_at(step, rng=None):
    rng = np.random.default_rng(step) if rng is None else rng
    return rng.uniform(0, 3, N)


def carried_out(journal, until=None, chunk=10):
    """Record and charge from where the journal stands, as a loop does."""
    plan = journal.plan
    until = plan.steps if until is None else until
    while (step := journal.next_step) < until:
        if plan.refresh_due(step) and step not in journal.refreshes_now():
            journal.record(step, norms_at(step))
        end = min(until, step + chunk, promised_end(journal, step))
        end = next((t for t in range(step + 1, end) if plan.refresh_due(t)), end)
        journal.charge(step, end - 1)
    return journal


def promised_end(journal, step):
    from epsilons.journal.run_entries import phase_end

    return phase_end(journal, step)


def shares(plan):
    return np.array([promise.share for promise in plan.promises])[np.arange(N) % 3]


def test_with_scale_everyone_is_clipped_to_their_share(tmp_path):
    plan = scaled()
    journal = carried_out(journal_of(tmp_path / "j", plan))
    bounds = journal.bounds(15, np.arange(N))
    np.testing.assert_array_equal(bounds, 2.0 * shares(plan))
    assert len(set(bounds)) == 3
    with Journal.open(tmp_path / "j") as again:
        np.testing.assert_array_equal(again.bounds(15, [4, 2]), bounds[[4, 2]])
        np.testing.assert_array_equal(again.budgets, OWN)
        assert again.promises == plan.promises
    found = journal.verify().epsilons
    most = np.array([promise.epsilon for promise in plan.promises])[np.arange(N) % 3]
    assert (found.cautious <= most * (1 + 1e-12)).all()
    assert found.worst_case == pytest.approx(plan.worst_case(), rel=1e-12)


def test_with_scale_thresholds_lie_on_levels_of_one_s_own_bound(tmp_path):
    plan = scaled(clipping="individual", levels=16)
    journal = carried_out(journal_of(tmp_path / "j", plan))
    bounds, norms = (
        journal.bounds(25, np.arange(N)),
        norms_at(20) + Margin(relative=0.0, parameters=1).room(plan),
    )
    for k, share in enumerate(shares(plan)):
        own = 2.0 * share
        assert bounds[k] == clipping_thresholds(norms[k], own, 16)
        assert bounds[k] in level_norms(own, 16)
    at_bound = journal.epsilons().values
    most = np.array([promise.epsilon for promise in plan.promises])[np.arange(N) % 3]
    assert (at_bound <= most * (1 + 1e-12)).all()


def test_someone_at_their_bound_in_every_step_realises_what_was_promised(tmp_path):
    """On levels of their own: between levels of the common bound it would be more."""
    plan = scaled(refresh_every=None, refreshes_per_epoch=0)
    journal = carried_out(journal_of(tmp_path / "j", plan))
    most = np.array([promise.epsilon for promise in plan.promises])[np.arange(N) % 3]
    np.testing.assert_allclose(journal.epsilons().values, most, rtol=1e-9)
    journal.verify()


def test_repeated_steps_take_the_place_of_the_last_ones(tmp_path):
    plan = scaled(phases=((20, {"noise_multiplier": 2.0}),))
    journal = carried_out(journal_of(tmp_path / "j", plan), 17)
    journal.restart(12)  # 5 steps of the first phase are taken again
    carried_out(journal, 15)
    assert journal.next_step == 20
    with pytest.raises(ValueError, match="more than was promised"):
        journal.charge(15)
    carried_out(journal, 26)
    journal.restart(18)  # back into the first phase, of which nothing is left
    assert journal.next_step == 20
    carried_out(journal)
    assert journal.charged() == (20, 20)
    assert journal.next_step == 40
    assert journal.steps_charged == 34
    assert journal.repeated == 5 + 8
    assert journal.charged(until=40) == (20, 20)
    assert journal.worst_case() == pytest.approx(plan.worst_case(), rel=1e-12)
    journal.verify()


def test_without_promises_repeated_steps_are_paid_beside(tmp_path):
    plan = Plan(
        n=N, sample_rate=0.2, steps=40, noise_multiplier=1.2, max_grad_norm=2.0, delta=1e-5,
        refresh_every=10,
    )  # fmt: skip
    journal = carried_out(Journal.create(tmp_path / "j", plan, margin=EXACT), 17)
    journal.restart(12)
    carried_out(journal)
    assert (journal.charged(), journal.repeated) == ((45,), 5)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    pace=st.sampled_from([0.0, 0.4, 1.0]),
    crashes=st.lists(st.tuples(st.integers(1, 39), st.integers(0, 38)), max_size=3),
    budgets=st.sampled_from([(1.0,), BUDGETS]),
)
def test_whatever_happens_nobody_spends_more_than_their_allowance(
    tmp_path_factory, seed, pace, crashes, budgets
):
    rng = np.random.default_rng(seed)
    plan = filtered(pace=pace, budgets=budgets, phases=((23, {"max_grad_norm": 1.0}),))
    path = tmp_path_factory.mktemp("filter") / "j"
    with journal_of(path, plan) as journal:
        for stop, back in [*crashes, (40, 0)]:
            while journal.steps_charged < stop:
                step = journal.steps_charged
                if plan.refresh_due(step) and step not in journal.refreshes_now():
                    journal.record(step, rng.choice([0.0, 0.4, 2.0, np.nan, np.inf], N))
                ends = [t for t in (10, 20, 23, 30, 40, stop) if t > step]
                journal.charge(step, min(ends) - 1)
            if back < journal.steps_charged < 40:
                journal.restart(back)
        journal.verify()  # by code of its own
        every = segments(journal._chain, plan)
        filter_ = Filter(journal._chain, journal._opening, np.arange(N))
        filter_.every(every)
        assert (filter_.spent <= ALL).all()
        most = np.array([p.epsilon for p in journal.promises])
        index = np.zeros(N, dtype=int) if len(budgets) == 1 else np.arange(N) % 3
        assert (journal.epsilons().values <= most[index] * (1 + 1e-9)).all()


def test_bounds_of_replayed_steps_are_those_of_then(tmp_path):
    plan = filtered(pace=1.0)
    journal = journal_of(tmp_path / "j", plan)
    then = []
    for step in range(0, 40, 10):
        journal.record(step, norms_at(step))
        journal.charge(step, step + 9)
        then.append(journal.bounds(step + 3, np.arange(N)))
    assert not np.array_equal(then[0], then[-1])
    for k in (3, 0, 2, 1, 1, 3):
        np.testing.assert_array_equal(journal.bounds(10 * k + 5, np.arange(N)), then[k])


def test_who_can_pay_for_nothing_is_out_and_pays_nothing(tmp_path):
    plan = filtered(
        pace=1.0, levels=1, budgets=(0.3, 4.0), steps=20, noise_multiplier=2.5, order=None
    )
    own = np.where(np.arange(N) < 3, 0.3, 4.0)
    journal = Journal.create(tmp_path / "j", plan, margin=EXACT, budgets=own)
    journal.record(0, np.zeros(N))
    journal.charge(0, 9)
    bounds = journal.bounds(3, np.arange(N))
    assert (bounds[:3] == 0).all()
    assert (bounds[3:] == 2.0).all()
    found = journal.epsilons()
    assert (found.values[:3] == 0).all()
    assert (found.values[3:] > 0).all()
    assert found.kind == "exact"


def test_another_s_norms_and_budget_change_no_bound_of_mine(tmp_path):
    plan = filtered(pace=1.0)
    found = []
    for k in range(2):
        own = OWN.copy()
        own[5] = 4.0 if k else 1.0
        journal = Journal.create(tmp_path / f"j{k}", plan, margin=EXACT, budgets=own)
        for step in range(0, 40, 10):
            norms = norms_at(step)
            norms[5] *= 1 + 9 * k
            journal.record(step, norms)
            journal.charge(step, step + 9)
        found.append(np.delete(journal.bounds(35, np.arange(N)), 5))
    np.testing.assert_array_equal(*found)


def test_a_filter_needs_norms_before_its_first_step(tmp_path):
    journal = journal_of(tmp_path / "j", filtered())
    with pytest.raises(ValueError, match="the bounds of a filter are taken from"):
        journal.charge(0)
    with pytest.raises(ValueError, match="depend on the secret sampling"):
        journal.record(0, [1.0], indices=[3])


def test_a_filter_of_unknown_length_goes_on_until_everyone_is_out(tmp_path):
    plan = filtered(steps=None, pace=1.0, order=8.0, budgets=(3.0,), noise_multiplier=2.0, levels=4)
    journal = Journal.create(tmp_path / "j", plan, margin=EXACT)
    step = 0
    while step == 0 or (journal.bounds(step - 1, np.arange(N)) > 0).any():
        journal.record(step, np.full(N, 5.0))
        journal.charge(step, step + 9)
        step += 10
        assert step < 5000
    found = journal.verify().epsilons
    assert (found.values > 2.5).all()
    assert (found.values <= 3.0).all()
    assert found.worst_case == plan.worst_case() <= 3.0


@pytest.mark.parametrize(
    ("budgets", "sentence"),
    [
        (None, "who has which is not said"),
        (np.full(N, 3.0), "an example has a budget that the plan does not offer"),
        (np.full(N, np.nan), "an example has a budget that the plan does not offer"),
        (np.ones(3), "expected 12 numbers"),
        (np.full(N, "low"), "expected 12 numbers"),
    ],
)
def test_an_assignment_without_label_is_refused_and_names_no_one(tmp_path, budgets, sentence):
    with pytest.raises(ValueError, match=sentence):
        Journal.create(tmp_path / "j", scaled(), budgets=budgets)
    assert not (tmp_path / "j").exists()


def test_budgets_for_a_plan_without_them_are_refused(tmp_path):
    plan = dataclasses.replace(scaled(), budgets=())
    with pytest.raises(ValueError, match="the plan offers none"):
        Journal.create(tmp_path / "j", plan, budgets=OWN)


def test_one_owner_has_one_budget():
    owners = np.arange(N) // 2
    with pytest.raises(ValueError, match="can't be divided among records"):
        Examples(ids=np.arange(N), owners=owners, budgets=OWN)
    Examples(ids=np.arange(N), owners=owners, budgets=np.repeat(OWN[:6], 2))


def test_nothing_that_is_shown_tells_who_has_which_budget(tmp_path):
    examples = Examples(ids=np.arange(N), budgets=OWN)
    with Run.create(tmp_path / "run", scaled(), examples).journal as journal:
        shown = [repr(examples), repr(journal), repr(journal._opening.promised)]
        shown += [repr(promise) for promise in journal.promises]
    public = [file.read_text() for file in (tmp_path / "run" / "public").iterdir()]
    digest = promised.assignment_digest(journal._opening.promised.assigned, "00" * 32)
    for text in (*shown, *public):
        assert "array" not in text
        assert "assign" not in text
        assert digest not in text
    run = Run.open(tmp_path / "run")
    np.testing.assert_array_equal(run.examples.budgets, OWN)
    run.verify()


def altered(monkeypatch, change):
    """What a journal would hold that was made to promise less, or more, than it may."""
    true = promised.promised_facts

    def facts(plan, assigned, salt):
        found = true(plan, assigned, salt)
        change(found)
        return found

    monkeypatch.setattr("epsilons.journal.opening.promised_facts", facts)


def _cheaper(facts):
    facts["prices"][0][1] = [price // 2 for price in facts["prices"][0][1]]


def _larger_share(facts):
    facts["promises"][0]["share"] *= 1.01


def _larger_allowance(facts):
    facts["promises"][0]["allowance"] *= 1.01


def _another_assignment(facts):
    facts["assignment"] = "0" * 64


def _another_budget(facts):
    facts["promises"][0]["budget"] = 1.1


@pytest.mark.parametrize(
    ("plan", "change", "sentence"),
    [
        (filtered(), _cheaper, "a price of the budget ε = 2 is below"),
        (filtered(), _larger_allowance, "the promise of ε = 1 would cost more"),
        (scaled(), _larger_share, "the promise of ε = 1 would cost more"),
        (scaled(), _another_assignment, "who has which budget was changed"),
        (scaled(), _another_budget, "not those of the plan"),
    ],
)
def test_verify_finds_what_breaks_a_promise(tmp_path, monkeypatch, plan, change, sentence):
    altered(monkeypatch, change)
    journal = carried_out(journal_of(tmp_path / "j", plan))
    with pytest.raises(ValueError, match=sentence):
        journal.verify()


def test_verify_finds_bounds_that_could_not_be_paid_for(tmp_path, monkeypatch):
    from epsilons.journal import filtered as module

    true = module.affordable_levels

    def generous(*arguments, limit, **options):
        return true(*arguments, limit=2 * limit, **options)

    monkeypatch.setattr(module, "affordable_levels", generous)
    journal = carried_out(journal_of(tmp_path / "j", filtered(pace=1.0)))
    with pytest.raises(ValueError, match="not those that follow from norms and prices"):
        journal.verify()


def test_verify_finds_steps_that_were_not_promised(tmp_path, monkeypatch):
    from epsilons.journal import charges

    journal = carried_out(journal_of(tmp_path / "j", scaled()), 17)
    journal.restart(12)
    monkeypatch.setattr(charges, "phase_end", lambda chain, plan, step: plan.phase(step).end)
    for first, last in itertools.pairwise((12, 20, 30, 40)):
        if journal.plan.refresh_due(first):
            journal.record(first, norms_at(first))
        journal.charge(first, last - 1)
    with pytest.raises(ValueError, match="45 steps were charged"):
        journal.verify()
