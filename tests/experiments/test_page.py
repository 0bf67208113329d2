"""The reproduction page says what the JSON says."""

import json

import pytest

from experiments.catalogue import EXPERIMENTS
from experiments.page import PAGE, RESULTS, ROOT, generated, inserted, stored


def test_the_page_holds_the_tables_of_the_results():
    written = PAGE.read_text(encoding="utf-8")
    assert inserted(written, generated()) == written, "run python -m experiments.page"


def test_a_changed_number_changes_the_page(tmp_path):
    for file in RESULTS.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "adult.json"
    result = json.loads(file.read_text(encoding="utf-8"))
    result["numbers"]["lowest"] = [9.9 for _ in result["numbers"]["lowest"]]
    file.write_text(json.dumps(result), encoding="utf-8")
    written = PAGE.read_text(encoding="utf-8")
    assert inserted(written, generated(tmp_path)) != written


@pytest.mark.parametrize("name", [n for n in EXPERIMENTS if (RESULTS / f"{n}.json").exists()])
def test_every_result_has_commit_seeds_settings_and_picture(name):
    result = stored(RESULTS)[name]
    assert result["preset"] == "cpu"
    assert result["commit"]
    for run in EXPERIMENTS[name].RUNS:
        facts = result["runs"][run]
        assert len(facts["found"]) == len(facts["seeds"]) >= 1
        assert facts["epochs"] > 0
    assert (ROOT / "docs" / "pictures" / "reproduction" / f"{name}.png").is_file()


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="begin claims"):
        inserted("# nothing", {"claims": "x"})
