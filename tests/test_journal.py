import stat

import numpy as np
import pytest

from epsilons import Journal, Plan, individual_epsilons


def small_plan(**changes):
    constants = dict(
        n=7, sample_rate=0.1, steps=50, noise_multiplier=1.5, max_grad_norm=2.0, delta=1e-5
    )
    return Plan(**{**constants, "refresh_every": 10, **changes})


@pytest.fixture
def norms():
    return np.random.default_rng(1).uniform(0, 3, size=(5, 7))


def filled(path, plan, norms):
    journal = Journal.create(path, plan)
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
    np.testing.assert_array_equal(journal.epsilons(method="rdp").values, direct.values)


def test_histories_do_not_depend_on_the_chunk(tmp_path, norms):
    journal = filled(tmp_path / "j", small_plan(), norms)
    whole = np.concatenate([block for block, _ in journal.histories(chunk=3)], axis=1)
    np.testing.assert_array_equal(whole, norms)
    for _, steps in journal.histories(chunk=3):
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
    Journal.create(tmp_path / "j", small_plan(), ids=names).close()
    with Journal.open(tmp_path / "j") as journal:
        np.testing.assert_array_equal(journal.ids, names)


def test_only_charged_steps_are_priced(tmp_path):
    journal = Journal.create(tmp_path / "j", small_plan())
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
    np.testing.assert_allclose(found.values, plan.worst_case("rdp"), rtol=1e-12)
    assert found.worst_case == pytest.approx(plan.worst_case("rdp"), rel=1e-12)


def test_steps_before_the_first_record_cost_the_worst_case(tmp_path):
    journal = Journal.create(tmp_path / "j", small_plan(refresh_every=None))
    journal.charge(0, 49)
    np.testing.assert_allclose(
        journal.epsilons().values, small_plan().worst_case("rdp"), rtol=1e-12
    )
    late = Journal.create(tmp_path / "late", small_plan())
    late.charge(0, 24)
    late.record(25, np.zeros(7))
    late.charge(25, 49)
    np.testing.assert_allclose(
        late.epsilons().values, small_plan().worst_case("rdp", steps=25), rtol=1e-12
    )


def test_a_norm_that_is_no_number_costs_the_worst_case(tmp_path):
    journal = Journal.create(tmp_path / "j", small_plan())
    journal.record(0, [np.nan, np.inf, 2.0, 1e300, 0, 0, 0])
    journal.charge(0, 9)
    values = journal.epsilons().values
    np.testing.assert_allclose(values[:4], small_plan().worst_case("rdp", steps=10), rtol=1e-12)
    assert (values[4:] == 0).all()


def test_journal_is_readable_by_its_owner_alone(tmp_path, norms):
    filled(tmp_path / "j", small_plan(), norms)
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_readers_see_what_a_writer_has_written_so_far(tmp_path, norms):
    writer = Journal.create(tmp_path / "j", small_plan())
    with Journal.open(tmp_path / "j") as reader:
        writer.record(0, norms[0])
        writer.charge(0)
        assert reader.steps_charged == 1
        assert reader.epsilons().values.shape == (7,)


@pytest.mark.parametrize(
    ("act", "sentence"),
    [
        (lambda j: j.record(10, np.zeros(6)), r"expected \(7,\)"),
        (lambda j: j.record(10, -np.ones(7)), "negative"),
        (lambda j: j.record(0, np.ones(7)), "does not follow"),
        (lambda j: j.record(3, np.ones(7)), "charged already"),
        (lambda j: j.charge(3), "don't follow"),
        (lambda j: j.charge(12), "don't follow"),
        (lambda j: j.charge(10, 9), "don't follow"),
        (lambda j: j.charge(10, 50), "beyond the plan"),
        (lambda j: j.norms(5), "no norms"),
        (lambda j: Journal.create(j.path, j.plan), "never overwritten"),
        (lambda j: Journal.create(j.path.with_name("k"), j.plan, ids=[1, 2]), "expected 7"),
    ],
)
def test_wrong_entries_are_refused_and_nothing_is_lost(tmp_path, norms, act, sentence):
    journal = Journal.create(tmp_path / "j", small_plan())
    journal.record(0, norms[0])
    journal.charge(0, 9)
    with pytest.raises(ValueError, match=sentence):
        act(journal)
    assert journal.refreshes == (0,)
    assert journal.steps_charged == 10


def test_other_files_are_not_journals(tmp_path):
    with pytest.raises(ValueError, match="is not there"):
        Journal.open(tmp_path / "none")
    (tmp_path / "text").write_text("not a database, however long this text may be" * 100)
    with pytest.raises(ValueError, match="is not a journal"):
        Journal.open(tmp_path / "text")
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="is not a journal"):
        Journal.open(tmp_path / "empty")
