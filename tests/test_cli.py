import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from epsilons import __version__
from epsilons.cli import main_of

PLAN = ["plan", "--n", "60000", "--batch-size", "1024", "--epochs", "100", "--epsilon", "2.4"]


def epsilons(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "epsilons", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={"PATH": "", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"},
    )


def test_help_names_the_verbs():
    shown = epsilons("--help")
    assert shown.returncode == 0
    assert "plan" in shown.stdout
    assert "demo" in shown.stdout


def test_version_is_the_packages():
    assert epsilons("--version").stdout.strip() == f"epsilons {__version__}"
    assert __version__ == version("epsilons")


def test_plan_prints_noise_rate_steps_and_every_method():
    shown = epsilons(*PLAN, "--delta", "1e-5")
    assert shown.returncode == 0
    assert "0.0170667" in shown.stdout
    assert "5859" in shown.stdout
    assert re.search(r"rdp +│ 2\.50", shown.stdout)
    assert "rdp-classic" in shown.stdout
    assert "refreshed 11 times unless said otherwise" in shown.stdout
    assert "at most 10\u00a0% of the run's time" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*PLAN, "--delta", "2"], "delta=2.0"),
        ([*PLAN, "--delta", "x"], "'--delta': "),
        (PLAN, "--delta"),
        (["plan", "--n", "10", "--batch-size", "20", "--epochs", "1", "--epsilon", "1",
          "--delta", "1e-5"], "exceeds n=10"),
        ([*PLAN[:-1], "-1", "--delta", "1e-5"], "-1"),
        (["frobnicate"], "No such command"),
        (["demo", "--out", "."], "not empty"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_sentence_and_exit_code_2(tmp_path, arguments, sentence):
    (tmp_path / "something").touch()
    shown = epsilons(*arguments, cwd=tmp_path)
    assert shown.returncode == 2
    assert sentence in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [("torch", ["demo", "--out", "new"], "train"), ("matplotlib", ["report", "new"], "report")],
)
def test_without_an_extra_a_verb_says_what_to_install(tmp_path, missing, arguments, extra):
    code = f"""
import sys
class NotInstalled:
    def find_spec(self, name, *_):
        if name == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, NotInstalled())
sys.argv = {["epsilons", *arguments]}
from epsilons.cli import main
main()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert ended.returncode == 2
    assert ended.stderr == f"error: this needs {missing}: pip install 'epsilons[{extra}]'\n"
    assert not ended.stdout
    assert not list(tmp_path.iterdir())


def test_an_import_that_no_extra_brings_is_no_wrong_input():
    def act():
        raise ModuleNotFoundError("No module named 'typo'", name="typo")

    with pytest.raises(ModuleNotFoundError):
        main_of(act)
