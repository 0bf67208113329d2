import hashlib
import json
import re
import shutil

import numpy as np
import pytest
from made_runs import make_run

from epsilons import Examples, Plan, Run
from epsilons.accounting.printed import epsilon_text
from epsilons.release import Budget, release_median_norm, releases_of, renew_ledger
from epsilons.release import publish as publish_true
from epsilons.report import write_public_report
from epsilons.runs import publish_plan


def number(value):
    return {"value": value, "low": value - 0.01, "high": value + 0.01}


def ledger(publications):
    return {
        "questions": len(publications), "answered": len(publications),
        "training": {"epsilon": 2.5, "delta": 1e-5, "steps": 40},
        "releases": {"epsilon": 0.1, "delta": 1e-5}, "limit": {"epsilon": 1.0, "delta": 1e-5},
        "total": {"epsilon": 2.6, "delta": 1e-5, "composition": "They compose."},
        "publications": publications,
    }  # fmt: skip


def entry(statistics, answer):
    return {"question": {"statistics": statistics}, "answer": answer}


PUBLICATIONS = [
    entry("median of initial gradient norms", number(0.5)),
    entry("individual epsilons", {
        "everyone": {"mean": number(1.11), "quantiles": {"0.1": number(0.3), "0.5": number(0.9)},
                     "size": None},
        "groups": {"class": {"ant": {"mean": number(0.7), "quantiles": {}, "size": number(99.0)},
                             "rare": None}},
    }),
    entry("individual epsilons", None),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """The public half of a run, alone."""
    run = make_run(tmp_path / "run", n=30)
    shutil.rmtree(run.path / "private")
    return run.path


def publish(folder, publications=PUBLICATIONS):
    (folder / "public" / "publications.json").write_text(json.dumps(ledger(publications)))


def test_noise_that_is_no_secret_is_said_with_the_guarantee(folder):
    assert "can’t compute the noise" not in write_public_report(folder).read_text(encoding="utf-8")
    file = folder / "public" / "plan.json"
    for source in ({"noise": "torch", "coins": "torch"}, None):  # None: an older folder
        file.write_text(json.dumps(json.loads(file.read_text()) | {"randomness": source}))
        page = write_public_report(folder).read_text(encoding="utf-8")
        assert "guarantee is against whoever can’t compute the noise" in page
        assert ("torch’s" if source else "was not recorded") in page.replace("&#39;", "’")


def test_story_is_told_from_the_public_half_alone(folder):
    publish(folder)
    page = write_public_report(folder).read_text(encoding="utf-8")
    assert "ε ≤ 2.500" in page
    assert "ε ≤ 2.600" in page
    assert "half of the records have ε below about 0.900" in page
    assert "mean: 1.110 (1.100–1.120)" in page
    assert "Highest for class ant, 0.700" in page
    assert "too few examples to publish: rare" in page
    assert "private median of gradient norms: 0.5" in page


def test_without_publications_the_plan_speaks(folder):
    page = write_public_report(folder).read_text(encoding="utf-8")
    assert "not published" in page
    plan = json.loads((folder / "public" / "plan.json").read_text())
    assert f"ε ≤ {epsilon_text(next(iter(plan['worst_case'].values())))}" in page


def test_the_page_says_what_the_journal_says_the_values_are_worth(tmp_path):
    """It went by the plan: "exact … what the steps really used" for a random loss."""
    plan = Plan(n=400, batch_size=40, steps=5, noise_multiplier=2.0, max_grad_norm=1.0,
                delta=1e-5, refresh_every=1)  # fmt: skip
    run = Run.create(tmp_path / "run", plan, Examples.numbered(400), random_loss=True)
    for step in range(5):
        run.journal.record(step, np.linspace(0, 2, 400))
        run.journal.charge(step)
    publish_true(run, epsilon=0.9, quantiles=())
    ledger = json.loads((run.path / "public" / "publications.json").read_text())
    assert (plan.kind, ledger["kind"], run.epsilons().kind) == ("exact", "estimate", "estimate")
    page = write_public_report(run.path).read_text(encoding="utf-8")
    assert "Each individual ε is an estimate" in page
    assert "what the steps really used" not in page
    shutil.rmtree(run.path / "private")
    assert "Each individual ε is an estimate" in write_public_report(run.path).read_text("utf-8")


def test_a_clip_bound_paid_for_before_training_claims_no_kind(tmp_path):
    """The ledger is written before the first norms, which would make everything a bound."""
    run = make_run(tmp_path / "run", n=400, taken=0)
    with Budget.of_run(run.path) as budget:
        release_median_norm(np.ones(400), epsilon=0.9, budget=budget)
    renew_ledger(run)
    ledger = json.loads((run.path / "public" / "publications.json").read_text())
    assert (ledger["questions"], ledger["kind"], run.journal.kind) == (1, None, "bound")


def test_where_nothing_is_published_no_kind_is_claimed(folder):
    page = write_public_report(folder).read_text(encoding="utf-8")
    assert "not stated" in page
    assert "Each individual ε is" not in page


def restarted(path):
    """A run that went back by half of its steps, as `fit` leaves it."""
    run = make_run(path, n=400)
    repeat(run)
    return run


def repeat(run):
    run.journal.restart(20)
    for first in (20, 30):
        run.journal.record(first, np.full(400, 0.5))
        run.journal.charge(first, first + 9)
    publish_plan(run)


def test_steps_that_were_repeated_are_in_the_guarantee_and_told(tmp_path):
    run = restarted(tmp_path / "run")
    paid = run.epsilons().worst_case
    assert paid > 1.1 * run.plan.worst_case()
    page = write_public_report(run.path).read_text(encoding="utf-8")
    assert f"ε ≤ {epsilon_text(paid)}" in page
    assert "In it are 20 steps that were repeated" in page
    assert "40, and 20 more that were repeated after restarts" in page
    shutil.rmtree(run.path / "private")
    assert write_public_report(run.path).read_text(encoding="utf-8") == page


def test_a_ledger_from_before_a_restart_is_renewed_or_refused(tmp_path):
    run = restarted(tmp_path / "run")
    publish_true(run, epsilon=0.9, quantiles=())
    repeat(run)
    shutil.copytree(run.path / "public", tmp_path / "alone" / "public")
    with pytest.raises(ValueError, match="steps were repeated since"):
        write_public_report(tmp_path / "alone")
    page = write_public_report(run.path).read_text(encoding="utf-8")
    total = run.journal.worst_case(releases=releases_of(run))
    assert f"ε ≤ {epsilon_text(total)}" in page


def test_a_clip_bound_that_was_paid_for_is_in_the_total(tmp_path):
    run = make_run(tmp_path / "run", n=400)
    with Budget.of_run(run.path) as budget:
        release_median_norm(run.journal.norms(0), epsilon=0.9, budget=budget)
    page = write_public_report(run.path).read_text(encoding="utf-8")
    total = run.journal.worst_case(releases=releases_of(run))
    assert total > 1.02 * run.journal.worst_case()
    assert f'<p class="big">ε ≤ {epsilon_text(total)} per record</p>' in page
    assert f"the training costs ε ≤ {epsilon_text(run.journal.worst_case())}" in page


def test_a_changed_plan_makes_no_report(tmp_path):
    run = make_run(tmp_path / "run", n=30)
    file = run.path / "public" / "plan.json"
    facts = json.loads(file.read_text())
    facts["plan"]["noise_multiplier"] = 9.0
    facts["worst_case"] = dict.fromkeys(facts["worst_case"], 0.01)
    file.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="differs from the journal in plan, worst_case"):
        write_public_report(run.path)
    assert not (run.path / "public" / "report.html").exists()


def test_damaged_public_files_are_one_sentence(folder):
    (folder / "public" / "publications.json").write_text("{}")
    with pytest.raises(ValueError, match="was damaged"):
        write_public_report(folder)


def test_page_asks_the_network_for_nothing(folder):
    publish(folder)
    page = write_public_report(folder).read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!#)|url\((?!#)|@import|<script""", page)


def test_checksums_know_the_page(folder):
    checksums = folder / "public" / "checksums.json"
    checksums.write_text(json.dumps({"plan.json": "0", "report.html": "old"}))
    page = write_public_report(folder)
    found = json.loads(checksums.read_text())
    assert found == {"plan.json": "0", "report.html": hashlib.sha256(page.read_bytes()).hexdigest()}


def test_page_is_for_everyone_to_read(folder):
    assert write_public_report(folder).stat().st_mode & 0o777 == 0o644


def test_a_run_without_noise_says_so(bare):
    assert "NOT private" in write_public_report(bare.path).read_text(encoding="utf-8")


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        write_public_report(tmp_path)
