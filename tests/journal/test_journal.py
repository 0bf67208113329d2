import stat

import numpy as np
import pytest

from epsilons import Journal, Margin, Plan, individual_epsilons
from epsilons.accounting import NOTHING, Releases

EXACT = Margin(relative=0.0, parameters=None)  # norms are priced as they are given


def small_plan(**changes):
    constants = dict(
        n=7, sample_rate=0.1, steps=50, noise_multiplier=1.5, max_grad_norm=2.0, delta=1e-5
    )
    return Plan(**{**constants, "refresh_every": 10, **changes})


def created(path, plan, **options):
    return Journal.create(path, plan, margin=EXACT, **options)


@pytest.fixture
def norms():
    return np.random.default_rng(1).uniform(0, 3, size=(5, 7))


def filled(path, plan, norms):
    journal = created(path, plan)
    for step, row in zip(plan.refresh_steps, norms, strict=False):
        journal.record(step, row)
        journal.charge(step, step + 9)
    return journal


def test_journal_gives_the_epsilons_of_its_rows(tmp_path, norms):
    journal = filled(tmp_path / "j", small_plan(), norms)
    direct = individual_epsilons(
        norms, np.full(5, 10), sample_rate=0.1, noise_std=3.0, max_grad_norm=2.0, delta=1e-5,
        method="rdp",
    )  # fmt: skip
    found = journal.epsilons(method="rdp", hold="previous")
    np.testing.assert_array_equal(found.values, direct.values)


def test_histories_do_not_depend_on_the_chunk(tmp_path, norms):
    journal = filled(tmp_path / "j", small_plan(), norms)
    blocks = list(journal.histories(chunk=3, hold="previous"))
    whole = np.concatenate([block for block, _ in blocks], axis=1)
    np.testing.assert_array_equal(whole, norms)
    for _, steps in blocks:
        np.testing.assert_array_equal(steps, np.full(5, 10))


def test_what_was_written_is_read_after_reopening(tmp_path, norms):
    before = filled(tmp_path / "j", small_plan(), norms)
    values = before.epsilons().values
    before.close()
    with Journal.open(tmp_path / "j") as again:
        assert again.plan == small_plan()
        assert again.refreshes == (0, 10, 20, 30, 40)
        assert again.steps_charged == 50
        np.testing.assert_array_equal(again.norms(20), norms[2])
        np.testing.assert_array_equal(again.epsilons().values, values)


def test_ids_are_kept(tmp_path):
    names = np.array(["ä", "b", "c", "d", "e", "f", "long-name"])
    created(tmp_path / "j", small_plan(), ids=names).close()
    with Journal.open(tmp_path / "j") as journal:
        np.testing.assert_array_equal(journal.ids, names)


def test_only_charged_steps_are_priced(tmp_path):
    journal = created(tmp_path / "j", small_plan())
    journal.record(0, np.ones(7))
    assert (journal.epsilons().values == 0).all()
    journal.charge(0, 4)
    some = journal.epsilons().values
    journal.charge(5, 9)
    assert (some > 0).all()
    assert (journal.epsilons().values > some).all()


def test_a_norm_always_at_the_bound_costs_the_worst_case(tmp_path):
    plan = small_plan()
    journal = filled(tmp_path / "j", plan, np.full((5, 7), 2.0))
    found = journal.epsilons()
    np.testing.assert_allclose(found.values, plan.worst_case(), rtol=1e-12)
    assert found.worst_case == pytest.approx(plan.worst_case(), rel=1e-12)


def test_steps_before_the_first_record_cost_the_worst_case(tmp_path):
    journal = created(tmp_path / "j", small_plan(refresh_every=None))
    journal.charge(0, 49)
    np.testing.assert_allclose(journal.epsilons().values, small_plan().worst_case(), rtol=1e-12)
    late = created(tmp_path / "late", small_plan(refresh_every=25))
    late.charge(0, 24)
    late.record(25, np.zeros(7))
    late.charge(25, 49)
    np.testing.assert_allclose(
        late.epsilons().values, small_plan().worst_case(steps=25), rtol=1e-12
    )


def test_a_norm_that_is_no_number_costs_the_worst_case(tmp_path):
    journal = created(tmp_path / "j", small_plan())
    journal.record(0, [np.nan, np.inf, 2.0, 1e300, 0, 0, 0])
    journal.charge(0, 9)
    values = journal.epsilons().values
    np.testing.assert_allclose(values[:4], small_plan().worst_case(steps=10), rtol=1e-12)
    assert (values[4:] == 0).all()


def test_recording_and_charging_the_same_again_changes_nothing(tmp_path, norms):
    once = filled(tmp_path / "once", small_plan(), norms)
    twice = created(tmp_path / "twice", small_plan())
    for step, row in zip(small_plan().refresh_steps, norms, strict=True):
        for _ in range(2):
            twice.record(step, row)
        for _ in range(2):
            twice.charge(step, step + 9)
            twice.record(step, row)
    assert twice.verify().entries == once.verify().entries
    np.testing.assert_array_equal(twice.epsilons().values, once.epsilons().values)


def test_steps_taken_again_after_a_restart_are_paid_again(tmp_path):
    journal = created(tmp_path / "j", small_plan())
    journal.record(0, np.full(7, 2.0))
    journal.charge(0, 9)
    journal.record(10, np.full(7, 2.0))
    journal.charge(10, 19)
    journal.restart(5)
    assert journal.steps_charged == 5
    journal.charge(5, 9)
    journal.record(10, np.full(7, 2.0))
    for first in (10, 20, 30, 40):
        journal.record(first, np.full(7, 2.0))
        journal.charge(first, first + 9)
    paid = small_plan(steps=65).worst_case()
    np.testing.assert_allclose(journal.epsilons().values, paid, rtol=1e-12)


def test_the_worst_case_is_that_of_every_charge(tmp_path):
    plan = small_plan(phases=((20, {"noise_multiplier": 3.0}),))
    journal = created(tmp_path / "j", plan)
    assert journal.worst_case() == 0
    assert journal.worst_case(until=50) == plan.worst_case()
    for first in (0, 10, 20):
        journal.charge(first, first + 9)
    assert journal.worst_case() == plan.worst_case(steps=30)
    assert (journal.charged(), journal.repeated) == ((20, 10), 0)
    journal.restart(15)
    assert (journal.charged(), journal.repeated) == ((20, 10), 15)
    assert journal.worst_case(until=10) == plan.worst_case(steps=30)
    assert journal.charged(until=25) == (25, 15)
    journal.charge(15, 19)
    journal.charge(20, 29)
    assert (journal.charged(), journal.repeated) == ((25, 20), 15)
    assert journal.charged(until=50) == (25, 40)
    longer = small_plan(steps=45, phases=((25, {"noise_multiplier": 3.0}),))
    for method in ("tight", "rdp"):
        assert journal.worst_case(method) == pytest.approx(longer.worst_case(method), rel=1e-12)
        paid = journal.epsilons(method=method)
        assert journal.worst_case(method) == pytest.approx(paid.worst_case, rel=1e-9)


def test_after_a_restart_the_norms_of_then_hold_again(tmp_path):
    journal = created(tmp_path / "j", small_plan())
    journal.record(0, np.full(7, 0.5))
    journal.charge(0, 9)
    journal.record(10, np.full(7, 1.5))
    journal.charge(10, 19)
    journal.restart(5)
    assert journal.refreshes_now() == (0,)
    journal.charge(5, 9)
    ((norms, steps),) = journal.histories(hold="previous")
    np.testing.assert_array_equal(norms[:, 0], [0.5, 1.5, 0.5])
    np.testing.assert_array_equal(steps, [10, 10, 5])


def test_after_a_restart_the_refresh_of_its_step_still_holds(tmp_path):
    journal = created(tmp_path / "j", small_plan())
    for first in (0, 10, 20):
        journal.record(first, np.full(7, 0.5))
        journal.charge(first, first + 9)
    journal.restart(10)
    journal.charge(10, 19)
    with pytest.raises(ValueError, match=r"a refresh at step 20, and .* of step 10"):
        journal.charge(20)


@pytest.mark.parametrize(
    ("clipping", "expected"),
    [("max", [2.0, 2.0, 2.0]), ("individual", [0.5, 1.0, 2.0])],
)
def test_bounds_are_what_is_charged(tmp_path, clipping, expected):
    plan = small_plan(clipping=clipping, levels=4, phases=((20, {"max_grad_norm": 0.8}),))
    journal = created(tmp_path / "j", plan)
    journal.charge(0, 9)
    np.testing.assert_array_equal(journal.bounds(3, [0, 6]), [2.0, 2.0])
    journal.record(10, [0.1, 0.6, 9.0, 0, 0, 0, 0])
    journal.charge(10, 19)
    np.testing.assert_array_equal(journal.bounds(19, [0, 1, 2]), expected)
    np.testing.assert_array_equal(journal.bounds(9, [0]), [2.0])
    journal.record(20, np.full(7, 9.0))
    journal.charge(20, 29)
    np.testing.assert_array_equal(journal.bounds(20, [4, 1]), [0.8, 0.8])
    assert journal.bounds(20, []).shape == (0,)


def held_by_hand(plan, refreshes, sampled):
    """(steps, n) the norm that each example is charged with at each step, one at a time."""
    table = np.empty((plan.steps, plan.n))
    current = np.full(plan.n, plan.max_grad_norm)
    for step in range(plan.steps):
        if step in refreshes:
            current = refreshes[step].copy()
        if step in sampled:
            indices, norms = sampled[step]
            current[indices] = norms
        table[step] = current
    return table


def test_by_the_papers_rule_norms_of_sampled_examples_hold_until_their_next_record(tmp_path):
    random = np.random.default_rng(4)
    plan = small_plan()
    refreshes = {step: random.uniform(0, 2, 7) for step in plan.refresh_steps}
    sampled = {}
    journal = created(tmp_path / "j", plan)
    for first in plan.refresh_steps:
        journal.record(first, refreshes[first])
        journal.charge(first, first + 9)
        draws = [np.flatnonzero(random.random(7) < 0.3) for _ in range(10)]
        norms = [random.uniform(0, 2, len(draw)) for draw in draws]
        journal.record_some("sampled", first, draws, norms)
        sampled |= {first + k: pair for k, pair in enumerate(zip(draws, norms, strict=True))}
    by_hand = individual_epsilons(
        held_by_hand(plan, refreshes, sampled), np.ones(50, dtype=int), sample_rate=0.1,
        noise_std=3.0, max_grad_norm=2.0, delta=1e-5, method="rdp",
    )  # fmt: skip
    found = journal.epsilons(method="rdp", hold="previous")
    np.testing.assert_allclose(found.values, by_hand.values, rtol=1e-9)
    assert found.kind == "estimate"
    for block, steps in journal.histories(chunk=3):
        assert block.shape == steps.shape
        np.testing.assert_array_equal(steps.sum(axis=0), 50)
    without = journal.epsilons(method="rdp", sampled=False, hold="previous")
    assert not np.allclose(without.values, found.values)
    for method in ("rdp", "tight"):
        every = journal.epsilons(method=method, hold="previous")
        some = journal.epsilons(method=method, only=[1, 2, 6], hold="previous")
        np.testing.assert_allclose(some.values, every.values[[1, 2, 6]], rtol=1e-12)
        assert (some.worst_case, some.kind) == (every.worst_case, every.kind)
        exact = individual_epsilons(
            held_by_hand(plan, refreshes, sampled)[:, [1, 2, 6]], np.ones(50, dtype=int),
            sample_rate=0.1, noise_std=3.0, max_grad_norm=2.0, delta=1e-5, method=method,
            levels=1024,
        )  # fmt: skip
        assert (some.values >= exact.values * (1 - 1e-4)).all()


@pytest.mark.parametrize("only", [[], [3, 1], [2, 2], [-1, 0], [7]])
def test_examples_asked_for_are_ascending_positions(tmp_path, norms, only):
    journal = filled(tmp_path / "j", small_plan(), norms)
    with pytest.raises(ValueError, match="ascending positions from 0 to 6"):
        journal.epsilons(only=only)


def test_individual_clipping_takes_no_norms_of_sampled_examples(tmp_path):
    journal = created(tmp_path / "j", small_plan(clipping="individual"))
    journal.record(0, np.ones(7))
    journal.charge(0)
    with pytest.raises(ValueError, match="secret sampling"):
        journal.record(0, [1.0], indices=[3])


def test_phases_are_priced_with_their_own_constants(tmp_path, norms):
    plan = small_plan(phases=((20, {"noise_multiplier": 3.0, "max_grad_norm": 1.0}),))
    journal = filled(tmp_path / "j", plan, norms)
    direct = individual_epsilons(
        norms, np.full(5, 10), sample_rate=0.1, noise_std=[3.0] * 5,
        max_grad_norm=[2.0, 2.0, 1.0, 1.0, 1.0], delta=1e-5, method="rdp",
    )  # fmt: skip
    found = journal.epsilons(method="rdp", hold="previous")
    np.testing.assert_array_equal(found.values, direct.values)


def test_without_norms_every_phase_costs_its_worst_case(tmp_path):
    plan = small_plan(refresh_every=None, phases=((20, {"noise_multiplier": 3.0}),))
    journal = created(tmp_path / "j", plan)
    with pytest.raises(ValueError, match="two phases"):
        journal.charge(0, 49)
    journal.charge(0, 19)
    journal.charge(20, 49)
    np.testing.assert_allclose(journal.epsilons().values, plan.worst_case(), rtol=1e-12)


def test_followed_examples_are_priced_by_their_norms_of_every_step(tmp_path, norms):
    journal = created(tmp_path / "j", small_plan(steps=5, refresh_every=10))
    journal.charge(0, 4)
    journal.record_some("followed", 0, [np.array([5, 2])] * 2, list(norms[:2, [5, 2]]))
    journal.record_some("followed", 2, [np.array([5, 2])] * 3, list(norms[2:, [5, 2]]))
    chosen, table = journal.followed()
    np.testing.assert_array_equal(chosen, [2, 5])
    np.testing.assert_array_equal(table, norms[:, [2, 5]])
    direct = individual_epsilons(
        norms, np.ones(5, dtype=int), sample_rate=0.1, noise_std=3.0, max_grad_norm=2.0,
        delta=1e-5, method="rdp",
    )  # fmt: skip
    exact = journal.followed_epsilons(method="rdp")
    assert exact.kind == "exact"
    np.testing.assert_allclose(exact.values, direct.values[[2, 5]], rtol=1e-12)
    np.testing.assert_allclose(
        journal.epsilons().values, small_plan(steps=5).worst_case(), rtol=1e-12
    )


def every_step(journal, norms):
    for step, row in enumerate(norms):
        journal.record(step, row)
        journal.charge(step)
    return journal


def kind_of(path, norms, **options):
    """The kind of a run of K = 1 as it is recorded, step by step."""
    flags = {name: options.pop(name) for name in list(options) if name.startswith("random_")}
    journal = every_step(created(path, small_plan(refresh_every=1, **options), **flags), norms)
    return journal.kind


def test_what_draws_at_random_makes_norms_of_every_step_an_estimate(tmp_path, norms):
    assert kind_of(tmp_path / "a", norms) == "exact"
    assert kind_of(tmp_path / "b", norms, rounding="up") == "bound"
    assert kind_of(tmp_path / "c", norms, random_loss=True) == "estimate"
    assert kind_of(tmp_path / "d", norms, random_data=True) == "estimate"
    assert kind_of(tmp_path / "e", norms, random_loss=True, rounding="up") == "estimate"
    assert kind_of(tmp_path / "f", norms, random_loss=True, clipping="individual") == "exact"


def test_randomness_that_shows_later_is_on_record(tmp_path, norms):
    with every_step(created(tmp_path / "j", small_plan(refresh_every=1)), norms) as journal:
        assert (journal.kind, journal.random) == ("exact", ())
        entries, _ = journal.check()
        for _ in range(2):
            journal.record_random("data", step=journal.steps_charged)
        assert journal.check()[0] == entries + 1  # appended, and once
        assert (journal.kind, journal.random) == ("estimate", ("data",))
        assert journal.epsilons().kind == "estimate"
    with pytest.raises(ValueError, match="expected one of loss, data, norms"):
        Journal.open(tmp_path / "j").record_random("weather", step=3)


def test_without_norms_everyone_is_at_the_bound_whatever_was_planned(tmp_path):
    for refresh_every in (None, 1, 4):
        plan = small_plan(refresh_every=refresh_every)
        journal = created(tmp_path / f"{refresh_every}", plan)
        journal.charge(0)
        assert journal.kind == "bound"
    assert journal.epsilons().kind == "bound"


def test_norms_that_a_plan_did_not_foresee_make_an_estimate(tmp_path, norms):
    """The plan, without refreshes, says `bound`; the norms hold for steps they are not of."""
    plan = small_plan(refresh_every=None, refreshes_per_epoch=0)
    journal = created(tmp_path / "j", plan)
    journal.record(0, norms[0])
    journal.charge(0, 4)
    assert (plan.kind, journal.kind) == ("bound", "estimate")


def test_steps_before_the_first_norms_make_a_bound(tmp_path, norms):
    journal = created(tmp_path / "j", small_plan(refresh_every=1))
    journal.charge(0)
    journal.record(1, norms[0])
    journal.charge(1)
    assert journal.kind == "bound"


def test_no_figure_of_a_run_whose_loss_mixes_examples_is_given(tmp_path, norms):
    with filled(tmp_path / "j", small_plan(), norms) as journal:
        journal.record_mixing(journal.steps_charged)
        for figure in (journal.epsilons, journal.worst_case, lambda: journal.kind):
            with pytest.raises(ValueError, match="no figure of this run holds"):
                figure()


def test_journal_is_readable_by_its_owner_alone(tmp_path, norms):
    filled(tmp_path / "j", small_plan(), norms)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_readers_see_what_a_writer_has_written_when_they_open_it(tmp_path, norms):
    writer = created(tmp_path / "j", small_plan())
    with Journal.open(tmp_path / "j") as before:
        writer.record(0, norms[0])
        writer.charge(0)
        with Journal.open(tmp_path / "j") as reader:
            assert reader.steps_charged == 1
            assert reader.epsilons().values.shape == (7,)
        assert before.steps_charged == len(before.refreshes) == 0
        with pytest.raises(ValueError, match="opened for reading"):
            before.charge(0)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda j: j.record(10, np.zeros(6)), r"expected \(7,\)"),
        (lambda j: j.record(10, -np.ones(7)), "negative"),
        (lambda j: j.record(0, np.ones(7)), "recorded once, before"),
        (lambda j: j.record(3, np.ones(7)), "recorded once, before"),
        (lambda j: j.record(11, np.ones(7)), "recorded once, before"),
        (lambda j: j.record(10, np.ones(2), indices=[0, 1]), "charge them first"),
        (lambda j: j.record(9, np.ones(2), indices=[0, 7]), "outside the 7 examples"),
        (lambda j: j.record(9, np.ones(2), indices=[0]), r"expected \(1,\)"),
        (lambda j: j.record_some("foo", 0, [np.array([0])], [np.array([1.0])]), "kind='foo'"),
        (lambda j: j.charge(10), "a refresh at step 10, and the norms that hold are of step 0"),
        (lambda j: j.bounds(10, [0]), "step 10 is not among the 10 charged"),
        (lambda j: j.charge(10, 20), "cross a refresh"),
        (lambda j: j.restart(11), "can't go back"),
        (lambda j: j.charge(3), "don't follow"),
        (lambda j: j.charge(12), "don't follow"),
        (lambda j: j.charge(10, 9), "don't follow"),
        (lambda j: j.charge(10, 50), "beyond the plan"),
        (lambda j: j.norms(5), "no norms"),
        (lambda j: created(j.path, j.plan), "never overwritten"),
        (lambda j: created(j.path.with_name("k"), j.plan, ids=[1, 2]), "expected 7"),
    ],
)
def test_wrong_entries_are_refused_and_nothing_is_lost(tmp_path, norms, act, sentence):
    journal = created(tmp_path / "j", small_plan())
    journal.record(0, norms[0])
    journal.charge(0, 9)
    with pytest.raises(ValueError, match=sentence):
        act(journal)
    assert journal.refreshes == (0,)
    assert journal.steps_charged == 10


def test_a_margin_that_is_a_number_is_refused_before_a_file_is_there(tmp_path):
    with pytest.raises(TypeError, match=r"margin=0\.1; expected a Margin"):
        Journal.create(tmp_path / "j", small_plan(), margin=0.1)
    assert not (tmp_path / "j").exists()


def test_other_files_are_not_journals(tmp_path):
    with pytest.raises(ValueError, match="is not there"):
        Journal.open(tmp_path / "none")
    (tmp_path / "text").write_text("not a database, however long this text may be" * 100)
    with pytest.raises(ValueError, match="is not a journal"):
        Journal.open(tmp_path / "text")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is not a journal"):
        Journal.open(tmp_path / "empty")


def test_every_epsilon_has_the_clip_bounds_cost_and_publications_when_asked(tmp_path):
    costly = dict(clip_bound_mu=0.3, clip_bound_distance=1e-20)
    plans = small_plan(levels=16), small_plan(levels=16, **costly)
    journals = [created(tmp_path / f"{k}.sqlite", p) for k, p in enumerate(plans)]
    norms = np.linspace(0, 1.2, small_plan().n)
    for journal in journals:
        journal.record(0, norms)
        journal.charge(0, 9)
    free, paid = (journal.epsilons() for journal in journals)
    assert (paid.values > free.values).all()
    assert paid.values[0] == pytest.approx(plans[1].clip_bound.epsilon(paid.delta), rel=1e-4)
    assert paid.worst_case == pytest.approx(journals[1].worst_case(), rel=1e-9)
    assert paid.values.max() <= paid.worst_case
    everything = Releases(0.5, 1e-19)
    more, alone = (journals[1].epsilons(releases=r) for r in (everything, NOTHING))
    assert (more.values > paid.values).all()
    np.testing.assert_allclose(alone.values, free.values, rtol=1e-9)
    assert more.worst_case == pytest.approx(journals[1].worst_case(releases=everything), rel=1e-9)
    for journal in journals:
        journal.close()
