import json

import pytest
from typer.testing import CliRunner

from epsilons.cli import app


def said(*arguments):
    found = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "120"})
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.stdout


def test_report_says_where_it_is(followed, individual):
    assert str(followed.report_file) in said("report", followed.path)
    assert "public/report.html" in said("report", followed.path, "--public")
    shown = said("report", followed.path, "--compare", individual.path)
    assert "compared-with-individual.html" in shown
    with pytest.raises(ValueError, match="don't go together"):
        said("report", followed.path, "--public", "--compare", individual.path)


def test_groups_prints_each_column_and_intersections(followed):
    shown = said("groups", followed.path)
    assert "ant" in shown
    assert "│ F" in shown
    assert "gap" in shown
    assert "ant × F" in said("groups", followed.path, "--by", "class,sex")


def test_groups_for_machines(followed):
    found = json.loads(said("groups", followed.path, "--by", "class", "--json"))
    (summary,) = found["by"]
    assert [row["group"] for row in summary["rows"]] == ["ant", "bee", "cat"]
    assert summary["rows"][0]["interval"]["low"] < summary["rows"][0]["mean_epsilon"]


def test_groups_of_a_run_without_noise_are_not_private(bare):
    assert "NOT PRIVATE" in said("groups", bare.path)
    found = json.loads(said("groups", bare.path, "--json"))
    assert found["by"][0]["rows"][0]["mean_epsilon"] is None


def test_attack_prints_everyone_and_groups(followed):
    assert "everyone" in said("attack", followed.path, "--by", "class", "--splits", "3")
    found = json.loads(said("attack", followed.path, "--splits", "3", "--json"))
    assert found["rows"] == []
    assert 0.4 < found["everyone"]["success"] < 0.7


def test_compare_prints_both_and_what_differs(followed, individual):
    shown = said("compare", followed.path, individual.path)
    assert "worst-case ε" in shown
    assert "individual" in shown
    found = json.loads(said("compare", followed.path, individual.path, "--json"))
    assert found["differences"] == {"clipping": ["max", "individual"]}
    assert found["private"] == [True, True]
