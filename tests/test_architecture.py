"""The walls of the house, read from the imports."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "epsilons"

# Each room and the rooms it may look into.
GROUND = {"files", "randomness", "tables", "terminal"}
ACCOUNTING = {"accounting"} | GROUND
FACTS = {"journal", "examples"} | ACCOUNTING
RUNS = {"runs"} | FACTS
ALLOWED = {
    "files": set(),
    "tables": {"files"},
    "randomness": set(),
    "terminal": set(),
    "accounting": GROUND,
    "journal": ACCOUNTING,
    "examples": ACCOUNTING,
    "measured": ACCOUNTING,
    "runs": FACTS,
    "gradients": set(),
    "noise": ACCOUNTING,
    "training": RUNS | {"gradients", "noise", "release"},
    "analysis": RUNS,
    "release": RUNS,
    "data": RUNS,
    "models": set(),
    "report": RUNS | {"analysis", "release"},
    "integrations": RUNS | {"gradients", "noise", "training", "release"},
    "settings": ACCOUNTING,
    "job": RUNS | {"gradients", "training", "data", "models", "settings", "release"},
    "cli": RUNS | {"analysis", "release", "report", "job", "measured", "settings"},
    "__init__": RUNS,
    "__main__": {"cli"},
}
NUMBA_ROOMS = {"accounting", "noise"}
ROOMS_OF_SHORT_FILES = ("gradients", "journal", "noise", "training")
MOST_LINES = 400
TORCH_ROOMS = {"gradients", "noise", "training", "data", "models", "integrations", "job"}


def imports(file: Path) -> set[str]:
    """Absolute dotted names of everything the file imports."""
    package = ("epsilons", *file.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def room(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_follow_the_arrows(file):
    for name in imports(file):
        parts = name.split(".")
        if (
            parts[0] == "epsilons"
            and len(parts) > 1
            and (PACKAGE / parts[1]).exists() | (PACKAGE / f"{parts[1]}.py").exists()
        ):
            assert parts[1] in ALLOWED[room(file)] | {room(file)}, f"{file.name} imports {name}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_the_torch_rooms_import_torch(file):
    if room(file) not in TORCH_ROOMS:
        assert not {name for name in imports(file) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", ROOMS_OF_SHORT_FILES)
def test_files_are_short(name):
    lines = {
        str(file.relative_to(PACKAGE)): len(file.read_text(encoding="utf-8").splitlines())
        for file in FILES
        if room(file) == name
    }
    assert lines
    assert {file: count for file, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_inner_lines_hold(file):
    """Rules don't know the tracer; gradients and noise know neither each other nor runs."""
    names = imports(file)
    libraries = {name.split(".")[0] for name in names}
    inside = {name.removeprefix("epsilons.") for name in names if name.startswith("epsilons.")}
    assert "llvmlite" not in libraries
    assert "numba" not in libraries or room(file) in NUMBA_ROOMS
    if file.is_relative_to(PACKAGE / "gradients" / "rules"):
        assert not {name for name in inside if name.startswith("gradients.tracer")}
    if room(file) in ("gradients", "noise"):
        assert {name.split(".")[0] for name in inside} <= {room(file)} | ACCOUNTING


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.py")), ids=lambda f: f.name)
def test_experiments_use_public_names_alone(file):
    """What an experiment imports of `epsilons` is a name that its room gives out."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "epsilons":
            room = ROOT / "src" / Path(*str(node.module).split(".")) / "__init__.py"
            assert room.is_file(), f"{file.name} imports from {node.module}"
            given = room.read_text(encoding="utf-8").partition("__all__")[2]
            for alias in node.names:
                assert f'"{alias.name}"' in given, f"{file.name} imports {alias.name}"


def test_importing_the_package_finds_no_torch():
    code = "import epsilons, sys; print([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_room_stands_in_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in sorted({room(file) for file in FILES} - {"__main__"}):
        assert name in page
