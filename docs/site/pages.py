"""Pages of the site that are made of other files: README, changelog, scripts, `--help`."""

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files

from epsilons.cli import app

ROOT = Path(__file__).parents[2]
_COPIED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
}
_WIDE = ("index.md", "reproduction.md")  # code and tables that need the whole width


def on_files(files: Files, config: Any) -> Files:
    """Add the pages; mkdocs calls this before it reads them."""
    for source, page in _COPIED.items():
        files.append(File.generated(config, page, content=_for_the_site(source)))
    files.append(File.generated(config, "reference/command_line.md", content=_command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    """Leave the table of contents out where the width is needed."""
    if page.file.src_uri in _WIDE:
        page.meta["hide"] = ["toc"]


def _for_the_site(source: str) -> str:
    """A page of the repository, with links as the site has them."""
    text = (ROOT / source).read_text(encoding="utf-8")
    if source.startswith("examples/"):
        text = text.replace("](../docs/", "](")
        return re.sub(r"\]\((\w+)\.(py|sh)\)", r"](#\1\2)", text) + _scripts()
    text = text.replace("](docs/", "](")
    for name, page in _COPIED.items():
        text = text.replace(f"]({name})", f"]({page})")
    return re.sub(r"\[([^\]]+)\]\((?:CITATION\.cff|LICENSE)\)", r"`\1`", text)


def _scripts() -> str:
    """The scripts of `examples/`, whole."""
    parts = [
        f"\n## {file.name}\n\n```{'python' if file.suffix == '.py' else 'sh'}\n"
        f"{file.read_text(encoding='utf-8')}```\n"
        for file in sorted((ROOT / "examples").glob("*.*"))
        if file.suffix in (".py", ".sh")
    ]
    return "".join(parts)


def _command_line() -> str:
    """What `epsilons VERB --help` says, for every verb."""
    group: Any = typer.main.get_command(app)
    parts = [f"# Command line\n\n{group.help}\n"]
    for name, verb in group.commands.items():
        context = group.context_class(verb, info_name=f"epsilons {name}", max_content_width=80)
        context.terminal_width = 80
        parts.append(f"\n## epsilons {name}\n\n```text\n{verb.get_help(context)}\n```\n")
    return "".join(parts)
