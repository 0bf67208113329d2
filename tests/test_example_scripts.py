"""The scripts of examples/, each carried out in a size that takes a second or two."""

import ast
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from epsilons import Run, individual_epsilons
from epsilons.cli import main
from epsilons.data import digits, fewer

SCRIPTS = Path(__file__).parent.parent / "examples"
VERBS = ["init", "train", "status", "export", "owner", "publish"]
RESULT = "# What the three lines give:"

pytestmark = pytest.mark.filterwarnings("ignore")  # what frameworks say of one another


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        yield


@pytest.fixture
def carried_out(monkeypatch, capsys):
    """Carry a script out as typed; its run folder and what it printed come back."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--out", "runs/example"])
        runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        return Run.open(Path("runs/example")), capsys.readouterr().out

    return run


def check_result(run, shown):
    """The worst case, the private median and the run folder are printed; the median comes back."""
    assert run.finished
    worst = float(re.search(r"^worst case +ε = (\S+) at δ", shown, re.M)[1])
    assert worst == run.journal.worst_case()
    n, median = re.search(r"^private +half of the (\d+) \w+ have ε ≤ (\S+) ", shown, re.M).groups()
    assert int(n) == run.plan.n
    assert 0 < float(median) <= worst
    assert re.search(r"^run folder +runs/example; .*: epsilons status runs/example$", shown, re.M)
    return float(median)


def test_own_loop_and_again(carried_out, monkeypatch):
    few = fewer(digits(), 600)
    monkeypatch.setattr("epsilons.data.digits", lambda: few)
    run, shown = carried_out("own_loop.py", "--epochs", "20")
    eps = run.epsilons()
    assert check_result(run, shown) == eps.quantile(0.5) < eps.quantile(0.9)
    run.journal.close()
    _, again = carried_out("own_loop.py", "--epochs", "20")
    assert shown.startswith("step 0 of 23: ")
    assert "step" not in again
    assert shown.endswith(again)


def test_opacus_loop(carried_out):
    run, shown = carried_out("opacus_loop.py", "--epochs", "1")
    check_result(run, shown)
    theirs = float(re.search(r"^Opacus +ε = (\S+)", shown, re.M)[1])
    assert run.journal.worst_case() < theirs


def test_at_most_three_lines_are_added_to_an_opacus_loop(monkeypatch, capsys):
    """Without them it is a whole Opacus loop that knows nothing of us, and runs."""
    loop = (SCRIPTS / "opacus_loop.py").read_text(encoding="utf-8").partition(RESULT)[0]
    lines = loop.splitlines()
    theirs = "\n".join(line for line in lines if not line.endswith("  # added"))
    assert sum(line.endswith("  # added") for line in lines) <= 3
    assert not {"epsilons", "attached"} & {
        name for node in ast.walk(ast.parse(theirs)) for name in names_of(node)
    }
    monkeypatch.setattr(sys, "argv", ["opacus_loop.py", "--epochs", "1"])
    exec(compile(theirs, "opacus_loop.py", "exec"), {})
    assert re.match(r"Opacus +ε = \d", capsys.readouterr().out)
    assert not Path("runs").exists()


def names_of(node):
    if isinstance(node, ast.ImportFrom):
        return {str(node.module).partition(".")[0]}
    return {node.id} if isinstance(node, ast.Name) else set()


def test_lightning_module(carried_out):
    pytest.importorskip("lightning")
    check_result(*carried_out("lightning_module.py", "--epochs", "1"))


def test_transformers_lora(carried_out):
    pytest.importorskip("peft")
    run, shown = carried_out("transformers_lora.py", "--epochs", "1", "--texts", "200")
    check_result(run, shown)
    trained = torch.load(run.model_file, weights_only=True)
    assert any("lora_B" in name and tensor.any() for name, tensor in trained.items())


def typed(words, monkeypatch):
    """What is typed, done in this process."""
    monkeypatch.setenv("MKL_CBWR", "AUTO")  # as `main` does, until the end of the test
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, words


def test_norms_of_other_frameworks_are_priced(monkeypatch, capsys):
    monkeypatch.setattr("subprocess.run", lambda command, check: typed(command[2:], monkeypatch))
    price = runpy.run_path(str(SCRIPTS / "jax_norms.py"), run_name="example")["price"]
    norms = np.random.default_rng(0).uniform(0.1, 1.2, (3, 50))
    price(norms, 25, Path("priced"))  # measured before steps 0, 10 and 20
    shown = capsys.readouterr().out
    assert "steps           25 in all, for 3 rows of norms" in shown
    stored = np.genfromtxt("priced/epsilons.csv", delimiter=",", names=True)["epsilon"]
    expected = individual_epsilons(
        norms * (1 + 1e-4), [10, 10, 5], sample_rate=0.05, noise_std=1.0, max_grad_norm=1.0,
        delta=1e-4,
    )  # fmt: skip
    np.testing.assert_allclose(stored, expected.values, rtol=1e-9)
    assert {p.stat().st_mode & 0o777 for p in Path("priced").iterdir()} == {0o600}


def test_norms_measured_in_jax(monkeypatch, capfd):
    pytest.importorskip("jax", reason="JAX is not installed; the pricing half is tested above")
    monkeypatch.setattr(sys, "argv", ["jax_norms.py", "--steps", "25", "--out", "runs/jax"])
    runpy.run_path(str(SCRIPTS / "jax_norms.py"), run_name="__main__")
    shown = capfd.readouterr().out
    assert "JAX" in shown
    assert "worst case      ε = " in shown


def test_a_table_without_python(monkeypatch, capsys):
    shutil.copytree(SCRIPTS, "examples")
    Path("runs").mkdir()
    script = Path("examples/csv_without_python.sh").read_text(encoding="utf-8")
    lines = [shlex.split(line) for line in script.splitlines() if line.startswith("epsilons ")]
    assert [words[1] for words in lines] == VERBS
    for words in lines:
        typed([*words, *(["epochs=2", "levels=8"] if words[1] == "train" else [])], monkeypatch)
    shown = capsys.readouterr().out
    assert "Privacy statement for p17" in shown
    assert "0.5 quantile" in shown
    assert len(Path("runs/clinic.csv").read_text(encoding="utf-8").splitlines()) == 401


def test_every_script_is_in_the_list_of_scripts():
    page = (SCRIPTS / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in SCRIPTS.iterdir() if path.suffix in (".py", ".sh")}
    assert set(re.findall(r"\]\((\w+\.(?:py|sh))\)", page)) == scripts
