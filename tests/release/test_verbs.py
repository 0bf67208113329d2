import json
import sys

import pytest
from folders import make_run

from epsilons.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", n=400).path


@pytest.fixture
def epsilons(monkeypatch, capsys):
    """Runs the command line; returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["epsilons", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        shown = capsys.readouterr()
        return left.value.code, shown.out, shown.err

    return run


def test_publish_prints_statistics_cost_and_total(folder, epsilons):
    code, out, _ = epsilons("publish", folder, "--epsilon", "0.8", "--quantiles", "0.5")
    assert code == 0
    for word in (
        "mean",
        "0.5 quantile",
        "releases",
        "ε = 0.8",
        "worst case",
        "consists of     training ε = ",
    ):
        assert word in out
    code, out, err = epsilons("publish", folder, "--epsilon", "0.95", "--quantiles", "0.5")
    assert (code, out) == (2, "")
    assert "is more than is left" in err


def test_publish_says_when_no_group_is_large_enough(tmp_path, epsilons):
    run = make_run(
        tmp_path / "run", n=400, groups={"town": [f"town {i % 100}" for i in range(400)]}
    )
    code, out, err = epsilons(
        "publish", run.path, "--epsilon", "0.8", "--quantiles", "0.5", "--groups", "town"
    )
    assert (code, err) == (0, "")
    assert "no group is large enough" in out
    assert "town 1" not in out


def test_owner_prints_a_statement_in_the_format_asked_for(folder, epsilons):
    assert "What is guaranteed" in epsilons("owner", folder, "id-00001")[1]
    found = json.loads(epsilons("owner", folder, "id-00001", "--format", "json")[1])
    assert found["records"][0]["id"] == "id-00001"
    code, _, err = epsilons("owner", folder, "id-00001", "--format", "pdf")
    assert code == 2
    assert "choose one of text, json, html" in err


def test_an_unknown_id_is_one_sentence(folder, epsilons):
    code, out, err = epsilons("owner", folder, "nobody")
    assert (code, out) == (2, "")
    assert err.strip() == "error: no record of 'nobody' is in this run"


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        (["--limit-epsilon", "-1"], "the limit's epsilon=-1.0"),
        (["--limit-epsilon", "1", "--limit-delta", "2"], "the limit's delta=2.0"),
    ],
)
def test_a_wrong_limit_is_named(folder, epsilons, option, sentence):
    code, _, err = epsilons("publish", folder, *option)
    assert code == 2
    assert sentence in err
