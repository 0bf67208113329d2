"""Tables of one's own: CSV files with a header.

Columns become inputs by ranges and categories that are known beforehand. Taking them from the data
would be a release that no noise protects, so that has to be asked for.
"""

from __future__ import annotations

import csv as reader
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from epsilons.data.official import sha256
from epsilons.data.split import Data, Part, split
from epsilons.examples import Examples


class Table(dict[str, NDArray[np.str_]]):
    """Columns by name; `lines` says where in the file each row ends.

    Messages name line and column, never what stands there: a cell is somebody's.
    """

    def __init__(self, columns: Mapping[str, NDArray[np.str_]], lines: Sequence[int]) -> None:
        super().__init__(columns)
        self.lines = lines


def csv(
    file: str | os.PathLike[str],
    *,
    target: str,
    test_file: str | os.PathLike[str] | None = None,
    id: str | None = None,
    owner: str | None = None,
    groups: Sequence[str] = (),
    ignore: Sequence[str] = (),
    ranges: Mapping[str, tuple[float, float]] | None = None,
    categories: Mapping[str, Sequence[str]] | None = None,
    classes: Sequence[str] = (),
    learn_encoding: bool = False,
    test_share: float = 0.2,
    seed: int = 0,
) -> Data:
    """Rows of a CSV file with a header, as vectors with values in [0, 1].

    `file`: its path.

    `target` is the column to predict, one of `classes`. Columns named by `id` (default: the line
    number) and `owner` are no inputs; neither are those in `ignore`. `groups` travel with the
    examples, and are inputs too unless ignored. Numbers are scaled from `ranges` (lowest, highest)
    and cut off there; texts are one-hot by `categories`, all zero for one that is not listed, and a
    warning says how many those are. `learn_encoding` takes ranges, categories and classes that are
    not given from the data. Without `test_file`, a `test_share` is held out by `seed`. ValueError,
    which names line and column, for cells, columns and options that don't fit.
    """
    path = Path(file)
    sums: dict[str, str] = {}
    tables = [_table(path, sums)] + ([] if test_file is None else [_table(Path(test_file), sums)])
    table = tables[0]
    for name in (target, id, owner, *groups, *ignore, *(ranges or {}), *(categories or {})):
        if name is not None and name not in table:
            raise ValueError(f"{path} has no column {name!r}; it has {', '.join(table)}")
    if len(tables) > 1 and list(tables[1]) != list(table):
        raise ValueError(f"{test_file} has other columns than {path}: {', '.join(tables[1])}")
    names = [name for name in table if name not in {target, id, owner, *ignore}]
    if not learn_encoding:
        _check_declared(path, names, ranges or {}, categories or {}, classes)
    known = _encoding(path, table, names, ranges or {}, categories or {})
    labels = tuple(classes) or tuple(sorted(set(table[target].tolist())))
    parts = []
    for where, part in zip((path, test_file), tables, strict=False):
        if id is not None:
            _check_ids(where, id, part)
        columns = [_column(where, name, part, known[name]) for name in names]
        y = _labels(where, target, part, labels)
        examples = Examples(
            ids=np.arange(len(y)) if id is None else part[id],
            owners=None if owner is None else part[owner],
            groups={name: part[name] for name in groups},
        )
        parts.append(Part(torch.from_numpy(np.concatenate(columns, axis=1)), y, examples))
    return split(
        parts[0],
        parts[1] if len(parts) > 1 else None,
        classes=labels,
        checksums=sums,
        test_share=test_share,
        seed=seed,
    )


def _table(path: Path, sums: dict[str, str]) -> Table:
    if not path.is_file():
        raise ValueError(f"{path} is not there; expected a CSV file with a header")
    content = path.read_bytes()
    sums[path.name] = sha256(content)
    try:
        lines = reader.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
        header = [name.strip() for name in next(lines, [])]
        if len(set(header)) != len(header) or "" in header or not header:
            raise ValueError(f"{path}, line 1: expected a header of different names")
        rows, places = [], []
        for row in lines:
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}, line {lines.line_num}: {len(row)} values under {len(header)} columns"
                )
            if row:
                rows.append([value.strip() for value in row])
                places.append(lines.line_num)
    except (UnicodeDecodeError, reader.Error) as error:
        raise ValueError(f"{path} is not a CSV file in UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{path} has a header and no rows")
    columns = zip(header, zip(*rows, strict=True), strict=True)
    return Table({name: np.array(values) for name, values in columns}, places)


def _check_declared(
    path: Path,
    names: Sequence[str],
    ranges: Mapping[str, tuple[float, float]],
    categories: Mapping[str, Sequence[str]],
    classes: Sequence[str],
) -> None:
    undeclared = [name for name in names if name not in ranges and name not in categories]
    if undeclared or not classes:
        missing = [f"columns {', '.join(undeclared)}"] if undeclared else []
        missing += ["classes"] if not classes else []
        raise ValueError(
            f"{path}: what values can {' and '.join(missing)} have? Give ranges = {{column = "
            "[lowest, highest]}, categories = {column = [values]} and classes = [values] from what "
            "is known without the data, or ignore = [columns]; learn_encoding = true takes them "
            "from the data, which the guarantee does not cover."
        )


Known = tuple[float, float] | tuple[str, ...]


def _encoding(
    path: Path,
    table: Table,
    names: Sequence[str],
    ranges: Mapping[str, tuple[float, float]],
    categories: Mapping[str, Sequence[str]],
) -> dict[str, Known]:
    """For each input column its range, or its categories."""
    known: dict[str, Known] = {}
    for name in names:
        if name in ranges:
            low, high = ranges[name]
            if not low < high:
                raise ValueError(f"ranges: {name} = [{low}, {high}]; expected lowest < highest")
            known[name] = (float(low), float(high))
        elif name in categories:
            known[name] = tuple(str(value) for value in categories[name])
        else:
            numbers = _numbers(table[name])
            if numbers is None:
                known[name] = tuple(sorted(set(table[name].tolist())))
            else:
                low, high = float(numbers.min()), float(numbers.max())
                known[name] = (low, high if high > low else low + 1)
    if not known:
        raise ValueError(f"{path} has no column left to learn from")
    return known


def _column(where: object, name: str, table: Table, known: Known) -> NDArray[np.float32]:
    """(n, 1) numbers in [0, 1], or (n, categories) zeros and ones."""
    column = table[name]
    low = known[0] if known else ""
    if isinstance(low, str):
        hot: NDArray[np.bool_] = column[:, None] == np.array(known, dtype=str)
        none = np.flatnonzero(~hot.any(axis=1))
        if len(none):
            warnings.warn(
                f"{where}, column {name}: {len(none)} of {len(column)} rows, the first in line "
                f"{table.lines[none[0]]}, have none of the categories {', '.join(map(str, known))} "
                "and count as none of them; is that meant, and not another spelling?",
                stacklevel=4,
            )
        return hot.astype(np.float32)
    numbers = _numbers(column)
    if numbers is None:
        wrong = next(k for k in range(len(column)) if _numbers(column[k : k + 1]) is None)
        raise ValueError(
            f"{where}, line {table.lines[wrong]}, column {name}: expected a number, "
            "since the column has a range"
        )
    high = float(known[1])
    return np.clip((numbers - low) / (high - low), 0, 1).astype(np.float32)[:, None]


def _check_ids(where: object, id: str, table: Table) -> None:
    _, first, which = np.unique(table[id], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[which] != np.arange(len(which)))
    if len(again):
        line, earlier = (table.lines[k] for k in (again[0], first[which[again[0]]]))
        raise ValueError(
            f"{where}, line {line}, column {id}: the same id as in line {earlier}; every row needs "
            f"its own. Rows of one person have owner = '{id}' in common, and an id each."
        )


def _numbers(column: NDArray[np.str_]) -> NDArray[np.float64] | None:
    """The column as finite numbers; None if it has something else."""
    try:
        numbers = column.astype(np.float64)
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def _labels(
    where: object, target: str, table: Table, classes: tuple[str, ...]
) -> NDArray[np.int64]:
    matches: NDArray[np.bool_] = table[target][:, None] == np.array(classes)
    strange = np.flatnonzero(~matches.any(axis=1))
    if len(strange):
        raise ValueError(
            f"{where}, line {table.lines[strange[0]]}, column {target}: expected one of the "
            f"classes {', '.join(classes)}"
        )
    labels: NDArray[np.int64] = np.argmax(matches, axis=1)
    return labels
