"""From columns to a settings file: how much to train at which ε, and the text with its reasons.

Ranges, categories and classes are read off the data here, which no noise protects. So the text
says `learn_encoding = true`, with which `epsilons train` repeats that the guarantee leaves them
out, until someone has put in what is known without the data and deleted that line.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path

from epsilons.accounting.plan import Plan
from epsilons.proposal.columns import FEWEST_ROWS, Column, read_columns
from epsilons.proposal.roles import Roles, roles_of
from epsilons.settings import Settings

_TEST_SHARE = 0.2


@dataclass(frozen=True, repr=False)
class Proposal:
    """A settings file (`text`), what its columns are taken for, and the plan it comes to."""

    text: str
    roles: Roles
    plan: Plan

    def write(self, out: str | os.PathLike[str]) -> None:
        """A new file of mode 0600; one that is there already is an error."""
        _expect_no_file(Path(out))
        with open(out, "x", encoding="utf-8", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(self.text)


def propose(
    file: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    target: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Proposal:
    """Settings for a CSV file, to be written to `out`, which must not be there yet.

    `target`: the column to predict, if it is known. `progress` is called with the bytes read.
    """
    _expect_no_file(Path(out))
    if "$" in str(file) or str(file).startswith("~"):
        raise ValueError(f"{file}: settings read $ and ~ in a path differently; rename the file")
    columns = read_columns(file, progress)
    roles = roles_of(columns, target)
    n = columns[0].rows - round(columns[0].rows * _TEST_SHARE)
    text = "\n".join(
        [
            f"# Proposed by `epsilons init` from {columns[0].rows} rows. Correct it, then:",
            f"#     {train_command(file, out)}",
            *_data_lines(Path(file), roles),
            *_encoding_lines(roles),
            *_plan_lines(n),
            "",
        ]
    )
    return Proposal(text, roles, Settings.of(tomllib.loads(text), str(out)).plan(n))


def train_command(file: str | os.PathLike[str], out: str | os.PathLike[str]) -> str:
    """What to type next."""
    return f"epsilons train {shlex.quote(str(out))} --out {shlex.quote(f'runs/{Path(file).stem}')}"


def _expect_no_file(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out} is there already, and is not overwritten; give another --out")


def _data_lines(file: Path, roles: Roles) -> list[str]:
    id, owner = roles.id, roles.owner
    ignored = [f"    {_quoted(c.name)},  # {reason}" for c, reason in roles.ignored]
    return [
        "# All but the path will stand in the public half of the run folder.",
        "",
        'data = "csv"',
        f"path = {_quoted(str(file))}",
        f"test_share = {_TEST_SHARE}  # held out, to measure accuracy",
        "",
        f"target = {_quoted(roles.target.name)}  # the column to predict",
        (
            '# id = "COLUMN"  # names each row; without it, its number does'
            if id is None
            else f"id = {_quoted(id.name)}  # names each row"
        ),
        (
            '# owner = "COLUMN"  # whose row it is, if one person may have several'
            if owner is None
            else f"owner = {_quoted(owner.name)}  # whose row it is"
        ),
        "# max_records_per_owner = 3  # as many as one person may have: then ε is stated for them",
        "# groups: ε and accuracy are compared between them. They are inputs too, unless ignored.",
        f"groups = [{', '.join(_quoted(c.name) for c in roles.groups)}]",
        *(["ignore = [", *ignored, "]"] if ignored else ["ignore = []"]),
        "",
    ]


def _encoding_lines(roles: Roles) -> list[str]:
    numbers = [_range(column) for column in roles.inputs if column.numeric]
    texts = [_categories(column) for column in roles.inputs if not column.numeric]
    return [
        "# CHECK: the values from here to the next blank line were read off the data, and no noise",
        "# protects that. Put in what you know without the data: the ends of a scale, the answers",
        "# of a form. Then delete the line learn_encoding; as long as it is there, the guarantee",
        "# does not cover these values.",
        "learn_encoding = true",
        f"classes = {_listed(roles.target.values or ())}",
        "# Numbers are cut off at the ends of their ranges. Codes that are no amounts: categories.",
        *numbers,
        *texts,
        "",
    ]


def _range(column: Column) -> str:
    low, high = _round_range(column.low, column.high)
    return f"ranges.{_key(column.name)} = [{low}, {high}]"


def _categories(column: Column) -> str:
    rest = len(column.values or ()) - len(column.frequent_values)
    left_out = f"  # without those of fewer than {FEWEST_ROWS} rows" if rest else ""
    return f"categories.{_key(column.name)} = {_listed(column.frequent_values)}{left_out}"


def _plan_lines(n: int) -> list[str]:
    epsilon = 4.0 if n < 10_000 else 2.0 if n < 100_000 else 1.0
    batch = min(n, 2 ** round(math.log2(4 * math.sqrt(n))))
    return [
        'model = "logistic"  # or "mlp", with hidden = [32]',
        "lr = 2.0",
        "",
        "# Privacy, for each row: ε in the worst case. 1 is strong, 10 is little; a smaller one",
        f"# needs more rows to learn as much. δ is well below 1/n, for n = {n} rows of training.",
        f"epsilon = {epsilon}",
        f"delta = 1e-{math.ceil(math.log10(10 * n))}",
        f"batch_size = {batch}  # expected: each row is drawn by its own coin",
        f"epochs = {20 if n < 100_000 else 10}",
        "max_grad_norm = 1.0  # C: what is longer of a row's gradient is cut off",
        "refreshes_per_epoch = 1  # how often every row's gradient norm is measured",
    ]


def _round_range(low: float, high: float) -> tuple[str, str]:
    """Round numbers around low and high, in steps of 1, 2 or 5 times a power of ten.

    >>> _round_range(18, 87), _round_range(92, 171), _round_range(-0.31, 0.2)
    (('0', '100'), ('50', '200'), ('-0.5', '0.5'))
    """
    least, most = Decimal(low), Decimal(high)
    power = Decimal(10) ** ((most - least) / 2).adjusted()
    step = next(k * power for k in (1, 2, 5, 10) if k * power * 2 >= most - least)
    return _number(step * (least / step).to_integral_value(ROUND_FLOOR)), _number(
        step * (most / step).to_integral_value(ROUND_CEILING)
    )


def _number(value: Decimal) -> str:
    number = float(value)
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _listed(values: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_quoted, values))}]"


def _quoted(text: str) -> str:
    """A string of TOML: that of JSON, which lets one control character more stand."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quoted(name)
