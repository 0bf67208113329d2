"""Runs whose examples are owners: whatever is said of them is said per person."""

import json
import re
import sys

import numpy as np
import pytest
from folders import train

from epsilons import Examples, Plan, Run
from epsilons.accounting.persons import divided_epsilon
from epsilons.accounting.printed import epsilon_text
from epsilons.analysis import compare
from epsilons.analysis.attack import expect_comparable
from epsilons.cli import main
from epsilons.randomness import Randomness
from epsilons.release import (
    owner_statement,
    person_worst_case,
    persons,
    release_mean,
    releases_of,
    statement_html,
    statement_text,
    total,
)
from epsilons.report import write_public_report, write_report

OWNERS = [f"owner-{k:02d}" for k in range(60)]


def made(path, unit="owner", **columns):
    plan = Plan(
        n=60, batch_size=3, steps=100, noise_multiplier=2.0, max_grad_norm=1.0, delta=1e-5,
        refresh_every=50, levels=32, max_records_per_owner=7, unit=unit,
    )  # fmt: skip
    if unit == "record":
        columns["owners"] = OWNERS
    run = Run.create(
        path, plan, Examples(ids=OWNERS, **columns), randomness=Randomness.of_fit(None)
    )
    train(run, 100)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    found = made(tmp_path_factory.mktemp("runs") / "run", digests=[f"{k:032d}" for k in range(60)])
    release_mean(found, epsilon=0.9, delta=1e-5)
    return found


@pytest.fixture
def shown(run, monkeypatch, capsys):
    def typed(*arguments):
        monkeypatch.setattr(sys, "argv", ["epsilons", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, " ".join(capsys.readouterr().out.split())

    return typed


def test_a_statement_is_about_all_records_of_its_owner(run):
    told = owner_statement(run, "owner-07")
    every = run.epsilons(releases=releases_of(run))
    assert told.individual == every.cautious[7]
    assert told.worst_case == every.worst_case
    assert told.to_dict()["per"] == "person"
    for text in (statement_text(told), re.sub("<[^>]*>", " ", statement_html(told))):
        said = " ".join(text.split())
        assert "per record" not in said
        assert "your record " not in said
        assert "detects your records together" in said
        assert "This is the worst case per person, and holds whatever the records contain" in said
        assert f"your records together: ε, all included {epsilon_text(told.individual)}" in said


def test_the_guarantee_per_person_is_the_run_s_own(run):
    worst = run.journal.worst_case(releases=releases_of(run))
    assert all(person_worst_case(run, m, releases_of(run)) == worst for m in (1, 7))
    assert persons(run, run.epsilons()) is None


def test_the_public_half_speaks_of_persons(run):
    page = json.loads((run.path / "public" / "publications.json").read_text(encoding="utf-8"))
    assert page["total"]["per"] == "person"
    assert "all records of one person added or removed" in page["total"]["composition"]
    assert page["per_person"]["epsilon"] == page["total"]["epsilon"]
    assert page["per_person"]["records"] == 7
    plan = json.loads((run.path / "public" / "plan.json").read_text(encoding="utf-8"))["plan"]
    assert plan["unit"] == "owner"


@pytest.mark.parametrize(
    "write", [write_report, lambda run: write_public_report(run.path)], ids=["private", "public"]
)
def test_reports_speak_of_persons(run, write):
    text = " ".join(re.sub("<[^>]*>", " ", write(run).read_text(encoding="utf-8")).split())
    assert "per person" in text
    assert "at most 7, and the sum of their gradients was clipped" in text
    assert "for all records of one person added or removed together" in text
    assert "per record" not in text
    assert "for every record" not in text


def test_commands_speak_of_persons(run, shown):
    for arguments in (("status", str(run.path)), ("total", str(run.path))):
        code, text = shown(*arguments)
        assert code == 0
        assert "per person" in text
        assert "per record" not in text
    assert "60 persons" in shown("status", str(run.path))[1]


def test_runs_of_records_and_of_owners_do_not_add_up(run, tmp_path):
    other = made(tmp_path / "record", unit="record")
    with pytest.raises(ValueError, match="Add up those of one unit"):
        total([run, other])
    with pytest.raises(ValueError, match="Add up those of one unit"):
        owner_statement(run, "owner-07", others=[other])


def test_two_runs_of_owners_add_up_per_person(run, tmp_path):
    other = made(tmp_path / "other", digests=[f"{k:032d}" for k in range(1, 61)])
    found = total([run, other])
    assert found.per == "person"
    told = owner_statement(run, "owner-07", others=[other])
    # what the person has elsewhere is theirs too, and is one example there as here
    assert told.worst_case == pytest.approx(found.worst_case, rel=1e-9)
    assert told.elsewhere == 1


def test_mean_losses_of_owners_are_not_attacked_by_those_of_single_records(run, tmp_path):
    with pytest.raises(ValueError, match="persons, whose mean losses"):
        expect_comparable(run)
    expect_comparable(made(tmp_path / "record", unit="record"))
    assert compare(run, run).left.attack is None


def test_epsilon_divided_among_records_costs_more_than_epsilon_together():
    """The figures of the error message, and that sampling makes it worse."""
    rounded_up = {m: np.ceil(1e3 * divided_epsilon(1.0, m, delta=1e-5)) / 1e3 for m in (2, 5)}
    assert rounded_up == {2: 1.068, 5: 1.160}
    of_plan = dict(batch_size=50, steps=50, max_grad_norm=1.0, delta=1e-5, n=1000)
    for m in (2, 5):
        each = Plan.for_epsilon(1 / m, **of_plan)
        together = Plan(**of_plan, noise_multiplier=each.noise_multiplier / m).worst_case()
        assert together > rounded_up[m]
