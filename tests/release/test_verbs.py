import json
import os
import subprocess
import sys

import pytest
from folders import make_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", n=2000).path


def epsilons(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "epsilons", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"},
    )


def test_publish_prints_statistics_cost_and_total(folder):
    shown = epsilons("publish", folder, "--epsilon", "0.5", "--quantiles", "0.5")
    assert shown.returncode == 0, shown.stderr
    for word in ("mean", "0.5 quantile", "releases", "ε = 0.5", "total"):
        assert word in shown.stdout
    refused = epsilons("publish", folder, "--epsilon", "0.95")
    assert refused.returncode == 2
    assert "is more than is left" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_owner_prints_a_statement_in_the_format_asked_for(folder):
    assert "What is guaranteed" in epsilons("owner", folder, "id-00001").stdout
    found = json.loads(epsilons("owner", folder, "id-00001", "--format", "json").stdout)
    assert found["records"][0]["id"] == "id-00001"
    refused = epsilons("owner", folder, "id-00001", "--format", "pdf")
    assert "choose one of text, json, html" in refused.stderr


def test_an_unknown_id_is_one_sentence(folder):
    shown = epsilons("owner", folder, "nobody")
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.strip() == "error: no record of 'nobody' is in this run"
