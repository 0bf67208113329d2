"""Per record and per person: what several records of one owner cost, and who may know it."""

import json
import sys

import numpy as np
import pytest
from folders import make_run

from epsilons.accounting.printed import epsilon_text
from epsilons.cli import main
from epsilons.release import (
    owner_statement,
    person_worst_case,
    persons,
    release_mean,
    releases_of,
)
from epsilons.release.owner import chain_rule
from epsilons.report import write_public_report
from epsilons.report.sentences import per_person

# A household of 6, one of 3, one of 2, and single ones.
OWNERS = ["H6"] * 6 + ["H3"] * 3 + ["H2"] * 2 + [f"single-{k}" for k in range(69)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", n=80, most=8, owners=OWNERS)


@pytest.fixture(scope="module")
def found(run):
    return persons(run, run.epsilons())


@pytest.mark.parametrize("records", [3, 6])
def test_combined_epsilons_of_all_owners_are_never_below_their_statements(run, found, records):
    told = owner_statement(run, f"H{records}")
    (epsilon,) = found.epsilons[found.records == records]
    assert told.individual <= epsilon <= 1.12 * told.individual
    assert told.worst_case <= found.worst_case
    assert (told.worst_case == found.worst_case) == (records == 6)


def test_one_record_of_an_owner_costs_what_it_costs(run, found):
    alone = run.epsilons().cautious[11:]
    assert np.array_equal(found.epsilons[found.records == 1], np.sort(alone))
    assert sorted(found.records) == [*[1] * 69, 2, 3, 6]


def chained(run, rows, delta):
    """Every record priced at its own δ, by RDP."""
    asked = [
        lambda d, row=row: float(run.epsilons(d, "rdp", only=[row]).cautious[0])
        for row in sorted(rows, key=lambda k: run.epsilons(only=[k]).values[0])
    ]
    return chain_rule(asked, delta)


def test_pricing_at_few_deltas_costs_little_over_pricing_each_record_at_its_own(run, found):
    exact = chained(run, range(6), run.plan.delta)
    assert exact <= found.epsilons[found.records == 6] <= 1.005 * exact


def test_records_whose_epsilon_is_cut_off_at_zero_are_not_priced_too_low(tmp_path):
    """A line through an ε of 0 that stands for less than 0 would be too flat."""
    run = make_run(tmp_path / "run", n=3, taken=0, owners=["a"] * 3)
    run.journal.record(0, [0.0, 1e-6, 1e-6])
    run.journal.charge(0, 49)
    delta = 1.25e-4  # the RDP ε of almost nothing is 0 here, and at 0.4 of it no longer
    found = persons(run, run.epsilons(delta))
    assert 0 < chained(run, range(3), delta) <= found.epsilons[0] < 0.01


def test_without_owners_nothing_is_said_of_persons(tmp_path):
    run = make_run(tmp_path / "run", n=40)
    assert persons(run, run.epsilons()) is None
    assert "Per person nothing is known" in per_person(None)[0]


def test_combined_epsilons_are_not_printed(found):
    assert not any(character.isdigit() for character in repr(found).split(" at 0x")[0])


def test_the_public_half_states_the_number_promised_and_not_the_one_in_the_data(run):
    release_mean(run, epsilon=0.9)
    ledger = json.loads((run.path / "public" / "publications.json").read_text())
    per_person = ledger["per_person"]
    assert per_person["records"] == 8
    assert (
        per_person["epsilon"]
        == person_worst_case(run, 8, releases_of(run))
        > 8 * ledger["total"]["epsilon"]
    )
    page = write_public_report(run.path).read_text(encoding="utf-8")
    assert "per record" in page
    stated = f"ε ≤ {epsilon_text(per_person['epsilon'])} at δ = 1e-5: no meaningful guarantee"
    assert f"(8 records, the most that one may have): {stated}" in page
    assert "6 records" not in page
    told = owner_statement(run, "single-0").individual
    assert told > run.epsilons().cautious[11]
    assert np.isclose(persons(run, run.epsilons()).epsilons, told, rtol=1e-12).any()


def test_without_a_promise_the_public_half_states_no_bound_per_person(tmp_path):
    run = make_run(tmp_path / "run", n=80, owners=OWNERS)
    release_mean(run, epsilon=0.9)
    assert json.loads((run.path / "public" / "publications.json").read_text())["per_person"] is None
    page = write_public_report(run.path).read_text(encoding="utf-8")
    assert "Per person no bound is stated" in page
    assert "6 records" not in page


def test_status_has_the_promise_above_the_line_and_the_owners_below(run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["epsilons", "status", str(run.path)])
    with pytest.raises(SystemExit):
        main()
    public, private = capsys.readouterr().out.split("\nprivate ")
    assert "per record" in public
    assert "for up to 8 records together: no meaningful guarantee" in public
    assert "72 with 1 to 6 records, half with at most 1" in private
    assert "worst owner" in private
    assert "6 records" not in public
