import hashlib
import json
import re

import numpy as np
import pytest
from folders import make_run, train

from epsilons.accounting.composition import gaussian_epsilon
from epsilons.release import (
    Budget,
    Limit,
    publish,
    release_median_norm,
    renew_ledger,
    write_ledger,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rng = np.random.default_rng(8)
    n = 3000
    run = make_run(
        tmp_path_factory.mktemp("runs") / "run",
        n=n,
        owners=[f"owner-{k // 2:05d}" for k in range(n)],
        groups={"town": np.r_[["hamlet"] * 4, rng.choice(["X", "Y"], n - 4)]},
    )
    with Budget.of_run(run.path) as budget:
        release_median_norm(run.journal.norms(0), epsilon=0.5, budget=budget)
    publish(run, epsilon=0.5, groups=["town"])
    publish(run, epsilon=0.3, quantiles=(0.5,))
    return run


@pytest.fixture(scope="module")
def ledger(run):
    return json.loads((run.path / "public" / "publications.json").read_text(encoding="utf-8"))


def test_the_ledger_lists_every_question_with_its_cost_and_answer(ledger):
    assert [line["epsilon"] for line in ledger["publications"]] == [0.5, 0.5, 0.3]
    assert all(line["answer"] for line in ledger["publications"])
    assert ledger["questions"] == ledger["answered"] == 3


def test_the_total_is_training_clip_bound_and_publications_composed(run, ledger):
    with Budget.of_run(run.path) as budget:
        spent = budget.spent
    assert ledger["total"]["epsilon"] == run.plan.worst_case(releases=spent.releases)
    training, releases = ledger["training"]["epsilon"], ledger["releases"]["epsilon"]
    assert training == run.plan.worst_case()
    assert releases == gaussian_epsilon(spent.releases.mu, 1e-5, spent.releases.distance)
    assert max(training, releases) < ledger["total"]["epsilon"] < training + releases


def test_a_ledger_that_knows_less_does_not_replace_one_that_knows_more(run, ledger, monkeypatch):
    with Budget.of_run(run.path) as budget, monkeypatch.context() as patched:
        patched.setattr(Budget, "entries", lambda self: [])
        written = write_ledger(run, budget)
    assert json.loads(written.read_text(encoding="utf-8")) == ledger


def test_steps_that_were_repeated_are_in_the_totals_and_answers_anew(tmp_path):
    run = make_run(tmp_path / "run", n=3000)
    asked = dict(epsilon=0.3, quantiles=(), limit=Limit(2.0, 1e-5))
    publish(run, **asked)
    file = run.path / "public" / "publications.json"
    before = json.loads(file.read_text(encoding="utf-8"))
    run.journal.restart(50)
    train(run, 50)
    renew_ledger(run)
    now = json.loads(file.read_text(encoding="utf-8"))
    assert now["training"] == {
        "epsilon": run.journal.worst_case(), "delta": 1e-5, "steps": 150, "repeated_steps": 50,
        "sums_covered": False,
    }  # fmt: skip
    assert now["training"]["epsilon"] > 1.2 * before["training"]["epsilon"]
    assert now["total"]["epsilon"] > now["training"]["epsilon"]
    assert now["publications"] == before["publications"]
    # everyone has paid more since, so the same words are another question
    publish(run, **asked)
    answers = json.loads(file.read_text(encoding="utf-8"))["publications"]
    assert [line["question"]["steps"] for line in answers] == [100, 150]


def test_a_value_above_the_planned_worst_case_is_not_cut_to_it(tmp_path):
    run = make_run(tmp_path / "run", n=3000)
    for _ in range(40):
        run.journal.restart(50)
        run.journal.charge(50, 99)
    mean = run.epsilons().cautious.mean()
    assert mean > run.plan.worst_case()
    published = publish(run, epsilon=0.9, quantiles=()).everyone.mean
    reach = published.value - published.low  # of 95 %: three times as much is 5.9 deviations
    assert abs(published.value - mean) <= 3 * reach


def test_a_ledger_of_nothing_says_so_and_makes_no_budget(tmp_path):
    run = make_run(tmp_path / "run", n=40)
    renew_ledger(run)
    page = json.loads((run.path / "public" / "publications.json").read_text(encoding="utf-8"))
    assert (page["questions"], page["publications"], page["limit"]) == (0, [], None)
    assert page["total"]["epsilon"] == page["training"]["epsilon"] == run.plan.worst_case()
    assert page["releases"]["epsilon"] == page["clip_bound"]["epsilon"] == 0
    assert not (run.path / "private" / "budget.sqlite").exists()


def test_checksums_are_those_of_the_public_files(run):
    public = run.path / "public"
    sums = json.loads((public / "checksums.json").read_text(encoding="utf-8"))
    assert {"plan.json", "publications.json"} <= set(sums)
    for name, expected in sums.items():
        assert hashlib.sha256((public / name).read_bytes()).hexdigest() == expected


def test_no_individual_value_or_exact_statistic_is_in_any_byte_of_public(run):
    epsilons, town = run.epsilons(), run.examples.groups["town"]
    values = epsilons.cautious
    secret = [values, epsilons.values, run.journal.norms(0), run.journal.norms(50)]
    for members in (np.ones(len(values), dtype=bool), *(town == t for t in ("X", "Y", "hamlet"))):
        part = values[members]
        secret += [[part.mean()], np.quantile(part, np.linspace(0.05, 0.95, 19))]
    secret = np.concatenate(secret)
    names = {*run.examples.ids.tolist(), *run.examples.owners.tolist(), "hamlet"}
    files = [file for file in (run.path / "public").rglob("*") if file.is_file()]
    assert len(files) >= 3
    for file in files:
        content = file.read_bytes()
        assert not [name for name in names if name.encode() in content], file
        for kind in ("<f8", "<f4", ">f8"):
            packed = secret.astype(kind).tobytes()
            size = np.dtype(kind).itemsize
            found = {packed[k : k + size] for k in range(0, len(packed), size)}
            windows = {content[k : k + size] for k in range(len(content) - size + 1)}
            assert not found & windows, file
        text = content.decode()
        shown = np.array([float(t) for t in re.findall(r"\d+\.\d+(?:[eE][-+]?\d+)?", text)])
        near = np.abs(shown[:, None] / secret - 1) < 1e-9
        assert not near.any(), (file, shown[near.any(axis=1)])
