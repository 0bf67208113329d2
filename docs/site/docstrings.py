"""Docstrings as Markdown: doctests and small tables of plain text become blocks of code."""

import re
from typing import Any

import griffe

_BLOCKS = re.compile(r"^(?:(?P<doctest>>>> .*(?:\n.+)*)|(?P<table>\|.*(?:\n\|.*)*))", re.MULTILINE)


class Blocks(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _BLOCKS.sub(_fenced, obj.docstring.value)


def _fenced(block: re.Match[str]) -> str:
    language = "pycon" if block["doctest"] else "text"
    return f"```{language}\n{block[0]}\n```"
