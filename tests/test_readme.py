"""The Python of README and pages runs as it stands, and its commands exist."""

import re
from pathlib import Path

import pytest

from epsilons.gradients.rules import RULES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/audit.md",
        "docs/norms.md",
        "docs/promises.md",
        "docs/releasing.md",
        "docs/scale.md",
        "docs/sums.md",
    ],
)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rules = dict(RULES)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    assert blocks
    names = {}
    try:
        for block in blocks:
            exec(compile(block, page, "exec"), names)
    finally:
        RULES.clear()
        RULES.update(rules)


def test_commands_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"make ([a-z]+)", README)) <= targets
    assert {"demo", "test"} <= set(re.findall(r"make ([a-z]+)", README))


def test_pictures_of_the_readme_exist():
    for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (ROOT / picture).is_file()
