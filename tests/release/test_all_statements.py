"""The statement of every owner at once is that of each alone."""

import dataclasses

import pytest
from folders import make_run

from epsilons import Run
from epsilons.release import owner_names, owner_statement, owner_statements, publish

FIGURES = ("worst_case", "individual", "training_worst_case")


def alike(one, other):
    for name in FIGURES:
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-5)
    for mine, theirs in zip(one.records, other.records, strict=True):
        assert mine.id == theirs.id
        assert mine.epsilon == pytest.approx(theirs.epsilon, rel=1e-5)
        assert mine.training_epsilon == pytest.approx(theirs.training_epsilon, rel=1e-5)
    priced = dict.fromkeys((*FIGURES, "records"))
    assert dataclasses.replace(one, **priced) == dataclasses.replace(other, **priced)


def test_statements_of_all_owners_are_those_of_each_alone(tmp_path):
    owners = ["three"] * 3 + ["two", "one"] + ["two"] + [f"other-{k}" for k in range(594)]
    make_run(tmp_path / "run", n=600, owners=owners)
    publish(Run.checked(tmp_path / "run"), epsilon=0.9, quantiles=())
    run = Run.checked(tmp_path / "run")
    found = {statement.owner: statement for statement in owner_statements(run)}
    assert list(found) == owner_names(run).tolist() == sorted(set(owners))
    for owner in ("three", "two", "one", "other-17"):
        alike(found[owner], owner_statement(run, owner))
    assert found["one"].releases == 1
    assert found["one"].records[0].training_epsilon < found["one"].individual


def test_without_owners_every_record_has_a_statement_of_its_own(tmp_path):
    run = make_run(tmp_path / "run", n=60)
    found = list(owner_statements(run, delta=1e-6))
    assert [statement.owner for statement in found] == sorted(run.examples.ids.tolist())
    alike(found[7], owner_statement(run, found[7].owner, delta=1e-6))
