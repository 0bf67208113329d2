"""Each guide of the docs, followed word by word."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from epsilons import Run
from epsilons.cli import main

GUIDES = Path(__file__).parent.parent / "docs" / "guides"


def blocks(name):
    """(language, text) of the guide's code, in order."""
    page = (GUIDES / name).read_text(encoding="utf-8")
    return re.findall(r"```(\w+)\n(.*?)```", page, flags=re.DOTALL)


def follow(name, monkeypatch):
    """Do what the guide says in the current folder; what was typed comes back."""
    names = {}
    typed = []
    for language, text in blocks(name):
        if language == "python":
            exec(compile(text, name, "exec"), names)
        elif language == "toml":
            Path(text.split("\n")[0].removeprefix("# ")).write_text(text, encoding="utf-8")
        elif language == "sh":
            for line in text.strip().splitlines():
                monkeypatch.setattr(sys, "argv", shlex.split(line))
                with pytest.raises(SystemExit) as ended:
                    main()
                assert not ended.value.code, line
                typed.append(line)
    return names, typed


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_own_loop(monkeypatch):
    names, _ = follow("own_loop.md", monkeypatch)
    assert names["eps"].worst_case <= 3.0
    assert names["run"].examples.correct.mean() > 0.7
    averaged = Run.checked("runs/averaged")
    assert averaged.finished
    assert (averaged.journal.steps_charged, averaged.journal.repeated) == (60, 0)
    assert names["journal"].steps_charged == 60


@pytest.mark.filterwarnings("ignore:Secure RNG turned off")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:Optimal order is the")
def test_opacus(monkeypatch):
    names, _ = follow("opacus.md", monkeypatch)
    theirs = names["engine"].get_epsilon(1e-4)
    assert names["eps"].worst_case < theirs
    by_rdp = names["attached"].run.epsilons(method="rdp").worst_case
    assert by_rdp == pytest.approx(theirs, rel=1e-3)
    assert "manual_seed(" not in (GUIDES / "opacus.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore")
def test_huggingface(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names, _ = follow("huggingface.md", monkeypatch)
    assert names["eps"].worst_case <= 8.0
    assert Run.open("runs/gpt").finished
    assert names["trainer"].train().global_step == names["plan"].steps  # by the loss of its own


@pytest.mark.filterwarnings("ignore")
def test_lightning(monkeypatch):
    names, _ = follow("lightning.md", monkeypatch)
    assert names["eps"].worst_case <= 3.0
    assert names["loader"].run.finished


def test_command_line(monkeypatch, capsys):
    _, typed = follow("command_line.md", monkeypatch)
    assert [line.split()[1] for line in typed] == ["init", "train", "status", "verify", "export"]
    shown = capsys.readouterr().out
    accuracy = float(re.search(r"test accuracy +([\d.]+)%", shown)[1])
    assert accuracy > 70
    assert Path("eps.parquet").stat().st_mode & 0o777 == 0o600


def test_owners_page(monkeypatch):
    _, typed = follow("owners_page.md", monkeypatch)
    assert [line.split()[1] for line in typed] == ["tokens"] * 3 + ["dossier"] * 4
    assert len(Path("tokens.csv").read_text("utf-8").splitlines()) == 391
    assert len(Path("new.csv").read_text("utf-8").splitlines()) == 2
    assert "patient" not in Path("card.md").read_text("utf-8")


def test_distributed(monkeypatch, capsys):
    # by one process, with what the guide to a loop of one's own has defined by then
    names = {}
    for _, text in blocks("own_loop.md")[:3]:
        exec(compile(text, "own_loop.md", "exec"), names)
    (loop,) = [text for language, text in blocks("distributed.md") if language == "python"]
    exec(compile(f"from epsilons.training import PrivateTraining\n{loop}", "loop", "exec"), names)
    assert Run.open("runs/together").finished


def test_choose_your_epsilon(monkeypatch, capsys):
    names, typed = follow("choose_your_epsilon.md", monkeypatch)
    assert [line.split()[1] for line in typed] == ["plan", "train", "status", "verify"]
    shown = capsys.readouterr().out
    assert "Promised before training, whatever your record contains" in shown
    assert "of the clip bound" in shown
    assert len(names["plan"].promises) == 2


def test_the_readme_and_guides_can_be_followed_in_one_folder():
    pages = [*GUIDES.glob("*.md"), GUIDES.parent.parent / "README.md"]
    made = [
        name
        for page in pages
        for name in set(re.findall(r'(?:out=|create\()"(.*?)"', page.read_text("utf-8")))
    ]
    assert len(made) >= 5
    assert len(set(made)) == len(made)


def test_every_link_of_the_guides_leads_somewhere():
    for page in GUIDES.glob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
