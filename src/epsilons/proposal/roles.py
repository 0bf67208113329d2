"""Which column is what: target, id, owner, groups, inputs. Guessed by names and kinds of values."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from epsilons.proposal.columns import FEWEST_ROWS, MOST_VALUES, Column

_MOST_CLASSES = 20  # of a target that was not named
_MOST_GROUPS = 10  # values of a column whose values are proposed as groups
_LONGEST_ID = 40  # characters
_TARGETS = {"target", "label", "class", "outcome", "response", "y"}
_PEOPLE = {
    "owner", "person", "patient", "user", "customer", "client", "member", "account", "household",
    "participant", "subject", "employee", "student",
}  # fmt: skip
_IDS = _PEOPLE | {"id", "uid", "uuid", "guid", "key", "index", "number", "no", "nr", "record"}


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What each column is taken for; `ignored` with reasons."""

    target: Column
    id: Column | None
    owner: Column | None
    groups: tuple[Column, ...]
    inputs: tuple[Column, ...]
    ignored: tuple[tuple[Column, str], ...]


def roles_of(columns: Sequence[Column], target: str | None = None) -> Roles:
    """The roles of columns; `target`: the name of the column to predict, if it is known."""
    id = _id(columns, target)
    owner = _owner([column for column in columns if column.name != target])
    chosen = _target([c for c in columns if c not in (id, owner)], target)
    rest = [column for column in columns if column not in (chosen, id, owner)]
    reasons = [(column, _reason_to_ignore(column)) for column in rest]
    inputs = tuple(column for column, reason in reasons if not reason)
    if not inputs:
        raise ValueError(
            f"nothing is left to predict {chosen.name!r} from; expected a column of numbers, or "
            f"one of at most {MOST_VALUES} different values, beside it"
        )
    return Roles(
        target=chosen,
        id=id,
        owner=owner,
        groups=tuple(c for c in columns if c in (chosen, *inputs) and _is_grouping(c)),
        inputs=inputs,
        ignored=tuple((column, reason) for column, reason in reasons if reason),
    )


def _target(columns: Sequence[Column], name: str | None) -> Column:
    if name is not None:
        return _named_target(columns, name)
    found = [c for c in columns if 2 <= len(c.values or ()) <= _MOST_CLASSES]
    if not found:
        raise ValueError(
            f"no column has 2 to {_MOST_CLASSES} different values, which could be predicted; name "
            "the one to predict by --target"
        )
    return next((c for c in found if _words(c.name) & _TARGETS), found[-1])


def _named_target(columns: Sequence[Column], name: str) -> Column:
    names = [column.name for column in columns]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        way_out = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
        raise ValueError(f"no column is called {name!r}; {way_out}")
    column = columns[names.index(name)]
    if column.values is None or len(column.values) < 2:
        found = "one value" if column.values else f"more than {MOST_VALUES} different values"
        raise ValueError(
            f"column {name!r} has {found}; expected 2 to {MOST_VALUES} classes. A number has to be "
            "put into classes first, as low and high"
        )
    return column


def _id(columns: Sequence[Column], target: str | None) -> Column | None:
    found = [c for c in columns if c.differs and c.longest <= _LONGEST_ID and c.name != target]
    named = [c for c in found if _words(c.name) & _IDS and (c.whole or not c.numbers)]
    return next(iter(named + [c for c in found if not c.numbers or _counts_rows(c)]), None)


def _counts_rows(column: Column) -> bool:
    return column.numeric and column.whole and column.high - column.low + 1 == column.rows


def _owner(columns: Sequence[Column]) -> Column | None:
    return next(
        (c for c in columns if _words(c.name) & _PEOPLE and not c.differs and _repeats_little(c)),
        None,
    )


def _repeats_little(column: Column) -> bool:
    return column.values is None or len(column.values) * 10 > column.rows


def _reason_to_ignore(column: Column) -> str:
    """Why a column can be no input; empty if it can."""
    values = column.values
    if values is not None and len(values) == 1:
        return "the same in every row"
    if column.numeric:
        named = _words(column.name) & _IDS
        return "names rows" if column.differs and (named or _counts_rows(column)) else ""
    if values is not None and column.frequent_values:
        mixed = 2 * column.numbers > column.rows and len(values) > _MOST_GROUPS
        return _without_number(column) if mixed else ""
    if 2 * column.numbers > column.rows:
        return _without_number(column)
    if values is not None:
        return f"no value that {FEWEST_ROWS} rows have"
    return f"text, more than {MOST_VALUES} different values or long ones"


def _without_number(column: Column) -> str:
    return f"numbers, but none in {column.rows - column.numbers} rows: fill them in to use it"


def _is_grouping(column: Column) -> bool:
    values = column.values or ()
    return 2 <= len(values) <= _MOST_GROUPS and len(column.frequent_values) == len(values)


def _words(name: str) -> set[str]:
    """The words of a column's name in small letters.

    >>> sorted(_words("customerId")), sorted(_words("PATIENT_NO"))
    (['customer', 'id'], ['no', 'patient'])
    """
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
    return set(re.findall(r"[^\W_]+", parted.lower()))
