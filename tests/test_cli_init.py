"""init, as typed."""

import shlex
import stat
import sys
from pathlib import Path

import pytest

from epsilons.cli import main

ROWS = [f"p{k},{20 + k * 7 % 61},{('no', 'yes')[k * 7 % 61 > 30]}" for k in range(100)]


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("some clinic.csv").write_text("\n".join(["patient,age,returned", *ROWS]))

    def run(*arguments):
        monkeypatch.setenv("MKL_CBWR", "AUTO")
        monkeypatch.setattr(sys, "argv", ["epsilons", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


def test_init_says_what_it_found_what_to_check_and_what_to_run_next(typed):
    code, shown, said = typed("init", "some clinic.csv")
    assert code == 0
    lines = {line[:16].strip(): line[16:] for line in shown.splitlines()}
    assert (lines["target"], lines["id"], lines["owner"]) == ("returned", "patient", "none")
    assert (lines["inputs"], lines["ignored"]) == ("age", "none")
    assert lines["privacy"].startswith("ε = 4.000 at δ = 0.001 for each of 80 rows: ")
    assert "check settings.toml first" in said
    assert "the guarantee does not cover" in said
    assert stat.S_IMODE(Path("settings.toml").stat().st_mode) == 0o600

    assert shlex.split(lines["next"])[-2:] == ["--out", "runs/some clinic"]
    code, shown, said = typed(*shlex.split(lines["next"])[1:], "epochs=1", "levels=8")
    assert code == 0
    assert "worst case      ε = " in shown
    assert "learn_encoding: ranges and categories of the data are outside the guarantee" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none.csv"], "none.csv is not there"),
        (["some clinic.csv", "--target", "retuned"], "did you mean 'returned'?"),
        (["some clinic.csv", "--target", "age"], "expected 2 to 50 classes"),
        (["some clinic.csv", "--out", "some clinic.csv"], "is there already"),
        (["some clinic.csv", "--out", "none/settings.toml"], "none/settings.toml"),
        ([], "Missing argument"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(typed, arguments, sentence):
    code, shown, said = typed("init", *arguments)
    assert (code, shown) == (2, "")
    assert sentence in said
    assert "p17" not in said
    assert not Path("settings.toml").exists()
