"""The wording of the pages: one TOML file per language in `messages/`, nothing of it in code."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib.resources import files

from epsilons.accounting.printed import epsilon_text, percent_text

DEFAULT = "en"


@dataclass(frozen=True)
class Messages:
    """The messages of one language, by dotted key."""

    language: str
    texts: dict[str, str]

    def __call__(self, key: str, **values: object) -> str:
        """The message, with `values` in its placeholders."""
        return self.texts[key].format(**values)

    def epsilon(self, value: float | None) -> str:
        """An ε as a bound is printed: rounded up; None is ∞."""
        if value is None or value == float("inf"):
            return self("number.no_bound")
        return self._localized(epsilon_text(value))

    def percent(self, share: float, digits: int = 1) -> str:
        """A probability that is a bound, rounded up."""
        return self._localized(percent_text(share, digits))

    def number(self, value: float, form: str = ".3f") -> str:
        """Any other number."""
        return self._localized(f"{value:{form}}")

    def decimal(self, value: float) -> str:
        """A small number with all its digits, and no power of ten."""
        return self._localized(f"{Decimal(repr(value)):f}")

    def _localized(self, text: str) -> str:
        return text.replace(".", self("number.decimal"))


@cache
def catalogues() -> dict[str, Messages]:
    """The messages of every language there is."""
    found = {}
    for file in files("epsilons.service").joinpath("messages").iterdir():
        if file.name.endswith(".toml"):
            language = file.name.removesuffix(".toml")
            found[language] = Messages(language, _flat(tomllib.loads(file.read_text("utf-8"))))
    return dict(sorted(found.items()))


def chosen(asked: str | None, accepted: str) -> Messages:
    """The messages of the language asked for, else of the first that the browser accepts."""
    known = catalogues()
    if asked in known:
        return known[asked]
    for part in accepted[:200].split(","):
        language = part.split(";")[0].strip().lower().split("-")[0]
        if language in known:
            return known[language]
    return known[DEFAULT]


def _flat(tree: dict[str, object], above: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{key}.")
        else:
            found[above + key] = str(value)
    return found
