import errno
import os
import sqlite3

import numpy as np
import pytest
from folders import make_run, train

from epsilons.release import (
    Budget,
    Limit,
    OverBudget,
    Publication,
    publish,
    release_mean,
    release_quantiles,
)
from epsilons.release import statistics as module
from epsilons.release.budget import Spent
from epsilons.release.mechanisms import Size
from epsilons.release.statistics import _Asked, _by_group


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(8)
    groups = {
        "sex": rng.choice(["F", "M"], 3000),
        "town": np.r_[["hamlet"] * 4, rng.choice(["X", "Y"], 2996)],
    }
    return make_run(tmp_path_factory.mktemp("runs") / "run", groups=groups)


@pytest.fixture
def run(folder):
    """The run with a new budget."""
    for file in folder.path.glob("*/budget*"):
        file.unlink()
    (folder.path / "public" / "publications.json").unlink(missing_ok=True)
    return folder


def spent(run):
    with Budget.of_run(run.path) as budget:
        return budget.spent


def test_mean_and_quantiles_are_near_the_true_ones(run):
    found = publish(run, epsilon=0.9).everyone
    values = run.epsilons().cautious
    assert found.mean.value == pytest.approx(values.mean(), rel=0.02)
    for share, part in found.quantiles.items():
        assert part.value == pytest.approx(np.quantile(values, share), rel=0.1)


def test_a_publication_costs_what_it_says(run):
    publish(run, epsilon=0.4)
    assert spent(run).epsilon(1e-5) == pytest.approx(0.4, rel=1e-6)
    assert spent(run).epsilon(1e-5) <= 0.4 + 1e-9


def test_asking_again_gives_the_same_at_no_cost(run):
    first = publish(run, epsilon=0.4)
    cost = spent(run)
    assert publish(run, epsilon=0.4) == first
    assert spent(run) == cost
    assert publish(run, epsilon=0.41) != first


def test_going_on_with_training_makes_it_another_question(tmp_path):
    run = make_run(tmp_path / "run", n=1000, taken=50)
    release_mean(run, epsilon=0.5)
    train(run, 50)
    release_mean(run, epsilon=0.5)
    assert spent(run).questions == 2


def test_mean_alone_and_quantiles_alone(run):
    assert release_mean(run, epsilon=0.3).value > 0
    low, high = release_quantiles(run, (0.2, 0.8), epsilon=0.5)
    assert low.value <= high.value
    (paper,) = release_quantiles(run, (0.5,), epsilon=0.3, method="descent")
    assert 0 < paper.value <= run.plan.worst_case()


def test_beyond_the_limit_it_is_refused(run):
    publish(run, epsilon=0.4, limit=Limit(0.5, 1e-5))
    with pytest.raises(OverBudget, match="left"):
        publish(run, epsilon=0.45)


def test_groups_of_one_column_cost_what_one_of_them_costs(run):
    found = publish(run, epsilon=0.9, quantiles=(0.5,), groups=["sex"])
    assert set(found.groups["sex"]) == {"F", "M"}
    assert spent(run).epsilon(1e-5) == pytest.approx(0.9, rel=1e-6)
    values, sex = run.epsilons().cautious, run.examples.groups["sex"]
    for label, part in found.groups["sex"].items():
        assert part.size.value == pytest.approx((sex == label).sum(), rel=0.1)
        assert part.mean.value == pytest.approx(values[sex == label].mean(), rel=0.1)


def test_columns_share_the_budget_so_each_gets_noisier(run, monkeypatch):
    seen = []

    def watch(ask, values, upper, column, named, mu):
        seen.append(mu)
        return {}

    monkeypatch.setattr(module, "_by_group", watch)
    publish(run, epsilon=0.9, groups=["sex", "town"])
    with Budget.of_run(run.path) as budget:
        total = budget.spent.releases.mu
    assert seen == pytest.approx([total / 3**0.5] * 2)


def test_a_small_group_taken_from_the_data_does_not_appear_at_all(run):
    found = publish(run, epsilon=0.9, quantiles=(), groups=["town"])
    assert set(found.groups["town"]) == {"X", "Y"}


def test_a_small_group_that_was_named_is_refused_by_name(run):
    found = publish(run, epsilon=0.9, quantiles=(), groups={"town": ["X", "hamlet", "nowhere"]})
    assert found.groups["town"]["X"] is not None
    assert found.groups["town"]["hamlet"] is None
    assert found.groups["town"]["nowhere"] is None


def test_whether_a_group_is_refused_depends_on_its_noisy_size_alone(monkeypatch):
    """The same noisy size for a group of none and of all: the same decision."""
    ask, values = _Asked(True, ()), np.full(100, 0.5)
    for noisy, published in ((10.0, False), (1e6, True)):
        monkeypatch.setattr(module, "noisy_size", lambda members, mu, n=noisy: Size(n, 1.0))
        for label in ("a", "b"):
            found = _by_group(ask, values, 1.0, np.full(100, "a"), [label], 1.0)
            assert (found[label] is not None) == published


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(quantiles=(), mean=False), "nothing is asked"),
        (dict(quantiles=(0.5, 0.5)), "different"),
        (dict(quantiles=(1.5,)), "between 0 and 1"),
        (dict(groups=["age"]), "column='age'"),
        (dict(method="guess"), "method='guess'"),
        (dict(epsilon=-1), "epsilon=-1"),
        (dict(delta=0.0), "delta=0"),
        (dict(epsilon=0.01), "too few"),
    ],
)
def test_wrong_questions_are_refused_and_cost_nothing(run, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        publish(run, **arguments)
    assert not (run.path / "private" / "budget.sqlite").exists()


def test_a_publication_survives_being_stored(run):
    found = publish(run, epsilon=0.9, groups={"town": ["X", "hamlet"]})
    with Budget.of_run(run.path) as budget:
        assert Publication.from_dict(budget.entries()[0].answer) == found


@pytest.mark.parametrize("where", ["budget", "public"])
def test_a_full_disk_is_one_sentence_and_the_same_question_goes_on(tmp_path, monkeypatch, where):
    """SQLite's error was a traceback, and nothing said what had been charged."""
    run = make_run(tmp_path / "run", n=400, groups={"town": ["x"] * 400})
    ask = {"epsilon": 0.8, "quantiles": (), "groups": {"town": ["x" * 20_000]}}
    Budget.of_run(run.path).close()

    def no_room(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def connect_without_room(*arguments, **options):
        connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 1")  # no page more than there are
        return connection

    connect = sqlite3.connect
    with monkeypatch.context() as full:
        if where == "budget":
            full.setattr(sqlite3, "connect", connect_without_room)
        else:
            full.setattr(os, "fsync", no_room)
        with pytest.raises(OSError, match=r"no room is left on the disk of .*ask the same again"):
            publish(run, **ask)
    first = publish(run, **ask)
    assert publish(run, **ask) == first
    assert Spent.of_run(run.path).questions == 1
