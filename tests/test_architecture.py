"""What may import what, as docs/architecture.md says, checked on the imports of every file.

A package here is a folder or a single file directly below src/epsilons.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "epsilons"

# Each package and the packages that it may import.
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
    "gradients": {"accounting"},
    "noise": ACCOUNTING,
    "training": RUNS | {"gradients", "noise", "release"},
    "analysis": RUNS,
    "audit": RUNS | {"gradients", "noise", "training", "release"},
    "release": RUNS,
    "data": RUNS,
    "models": set(),
    "report": RUNS | {"analysis", "release"},
    "service": RUNS | {"release", "report"},
    "integrations": RUNS | {"gradients", "noise", "training", "release"},
    "settings": ACCOUNTING,
    "proposal": ACCOUNTING | {"settings"},
    "job": RUNS | {"audit", "gradients", "training", "data", "models", "settings", "release"},
    "cli": RUNS
    | {"analysis", "release", "report", "service", "job", "measured", "proposal", "settings"},
    "__init__": RUNS,
    "__main__": {"cli"},
}
NUMBA_PACKAGES = {"accounting", "noise"}
PACKAGES_OF_SHORT_FILES = ("gradients", "journal", "noise", "training")
MOST_LINES = 400
TORCH_PACKAGES = {
    "gradients",
    "noise",
    "training",
    "data",
    "models",
    "integrations",
    "job",
    "audit",
}


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


def package_of(file: Path) -> str:
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
            assert parts[1] in ALLOWED[package_of(file)] | {package_of(file)}, (
                f"{file.name} imports {name}"
            )


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_only_the_torch_packages_import_torch(file):
    if package_of(file) not in TORCH_PACKAGES:
        assert not {name for name in imports(file) if name.split(".")[0] == "torch"}


@pytest.mark.parametrize("name", PACKAGES_OF_SHORT_FILES)
def test_files_are_short(name):
    lines = {
        str(file.relative_to(PACKAGE)): len(file.read_text(encoding="utf-8").splitlines())
        for file in FILES
        if package_of(file) == name
    }
    assert lines
    assert {file: count for file, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_imports_inside_packages_are_limited(file):
    """Rules don't import the tracer; gradients and noise import neither each other nor runs."""
    names = imports(file)
    libraries = {name.split(".")[0] for name in names}
    inside = {name.removeprefix("epsilons.") for name in names if name.startswith("epsilons.")}
    assert "llvmlite" not in libraries
    assert "numba" not in libraries or package_of(file) in NUMBA_PACKAGES
    if file.is_relative_to(PACKAGE / "gradients" / "rules"):
        assert not {name for name in inside if name.startswith("gradients.tracer")}
    if package_of(file) in ("gradients", "noise"):
        assert {name.split(".")[0] for name in inside} <= {package_of(file)} | ACCOUNTING


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.py")), ids=lambda f: f.name)
def test_experiments_import_public_names_only(file):
    """What an experiment imports of `epsilons` is in the `__all__` of its package."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "epsilons":
            place = ROOT / "src" / Path(*str(node.module).split("."))
            of_integration = place.parent.name == "integrations"
            init = place.with_suffix(".py") if of_integration else place / "__init__.py"
            assert init.is_file(), f"{file.name} imports from {node.module}"
            exported = init.read_text(encoding="utf-8").partition("__all__")[2]
            for alias in node.names:
                assert f'"{alias.name}"' in exported, f"{file.name} imports {alias.name}"


def test_importing_epsilons_does_not_import_torch():
    code = "import epsilons, sys; print([m for m in sys.modules if m.split('.')[0] == 'torch'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_every_package_is_on_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for name in sorted({package_of(file) for file in FILES} - {"__main__"}):
        assert name in page
