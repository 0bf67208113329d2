"""What is released: sdist and wheel hold what they should, and the wheel installs and runs."""

import re
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

hatchling = pytest.importorskip("hatchling.build")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION = PROJECT["version"]
SOURCES = {
    str(file.relative_to(ROOT / "src"))
    for file in (ROOT / "src" / "epsilons").rglob("*")
    if file.is_file() and "__pycache__" not in file.parts
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        folder = tmp_path_factory.mktemp("wheel")
        return folder / hatchling.build_wheel(str(folder))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        folder = tmp_path_factory.mktemp("sdist")
        return folder / hatchling.build_sdist(str(folder))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    about = f"epsilons-{VERSION}.dist-info"
    assert names == SOURCES | {
        f"{about}/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert "epsilons/py.typed" in names
    assert "epsilons/report/templates/report.html.j2" in names


def test_the_sdist_holds_all_that_is_needed_to_test_and_build_it(sdist):
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert {f"src/{name}" for name in SOURCES} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {
        "src", "tests", "examples", "experiments", "benchmarks", "docs", "mkdocs.yml", "Makefile",
        "constraints.txt", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
        "CITATION.cff", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore",
    }  # fmt: skip
    kinds = {Path(name).suffix for name in names}
    assert not kinds & {".pyc", ".sqlite", ".pt", ".bin", ".npz", ".parquet"}


def test_the_metadata_say_what_pages_show(wheel):
    with zipfile.ZipFile(wheel) as file:
        about = message_from_bytes(file.read(f"epsilons-{VERSION}.dist-info/METADATA"))
    assert about["Version"] == VERSION
    labels = {url.partition(",")[0] for url in about.get_all("Project-URL")}
    assert {"Source", "Documentation", "Changelog", "Security"} <= labels
    core = {re.split("[<>=~! ;]", name)[0] for name in PROJECT["dependencies"]}
    assert core == {"numpy", "scipy", "numba", "pydantic", "typer", "rich"}


def test_changelog_and_citation_speak_of_this_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)
    assert next(v for v in versions if v != "Unreleased") == VERSION
    assert "0.1.0" in versions
    assert f"version: {VERSION}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


PLAN = "--n 60000 --batch-size 1024 --epochs 100 --epsilon 2.4 --delta 1e-5"


EVERYTHING = ",".join(sorted(PROJECT["optional-dependencies"].keys() - {"dev", "docs"}))


@pytest.mark.slow
@pytest.mark.parametrize("extras", ["", "[train]", f"[{EVERYTHING}]"])
def test_the_wheel_runs_in_a_fresh_environment(wheel, tmp_path, extras):
    """With nothing but what it asks for itself."""
    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"

    def run(*arguments):
        done = subprocess.run(
            [python, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    install = ("-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"))
    if extras:
        run(*install, "torch")  # first and alone, as `make setup` does
    run(*install, f"{wheel}{extras}")
    assert run("-c", "import epsilons; print(epsilons.__version__)").strip() == VERSION
    assert "noise multiplier" in run("-m", "epsilons", "plan", *PLAN.split())
    installed = run("-m", "pip", "list", "--format=freeze")
    if not extras:
        assert "torch==" not in installed
        return
    code = (
        "import torch, epsilons; from epsilons.data import digits\n"
        "from epsilons.training import fit, supervised\n"
        "data, model = digits(), torch.nn.Linear(64, 10)\n"
        "plan = epsilons.Plan(n=len(data.train), batch_size=512, steps=4, noise_multiplier=2.0,\n"
        "                     max_grad_norm=1.0, delta=1e-4, refresh_every=2)\n"
        "loss_fn = supervised(torch.nn.CrossEntropyLoss(reduction='none'))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n"
        "print(fit(model, optimizer, loss_fn, data.train, plan, out='run').epsilons())\n"
    )
    assert "<Epsilons n=1437" in run("-c", code)
    if "report" in extras:
        run("-m", "epsilons", "report", "run")
        assert (tmp_path / "run" / "private" / "report.html").is_file()
