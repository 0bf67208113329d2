import hashlib
import json
import re
import shutil

import pytest
from made_runs import make_run

from epsilons.report import write_public_report


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


def test_story_is_told_from_the_public_half_alone(folder):
    publish(folder)
    page = write_public_report(folder).read_text(encoding="utf-8")
    assert "ε ≤ 2.500" in page
    assert "ε ≤ 2.600" in page
    assert "half have ε ≤ 0.900" in page
    assert "mean: 1.110 (1.100–1.120)" in page
    assert "Highest for class ant, 0.700" in page
    assert "too few examples to publish: rare" in page
    assert "private median of gradient norms: 0.5" in page


def test_without_publications_the_plan_speaks(folder):
    page = write_public_report(folder).read_text(encoding="utf-8")
    assert "not published" in page
    plan = json.loads((folder / "public" / "plan.json").read_text())
    assert f"ε ≤ {next(iter(plan['worst_case'].values())):.3f}" in page


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
