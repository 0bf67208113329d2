"""What a CSV file has in each column: kinds, ranges, values that repeat.

The file is read once, in bounded memory however long it is. Messages name lines and columns, never
what stands in a cell.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TextIO

MOST_VALUES = 50  # different values that are kept of a column
FEWEST_ROWS = 5  # a value that fewer have is not named: it may be one person's
_ROWS = 10_000  # counted at a time
_LONGEST_LINE = 2**20  # characters
_LONGEST_VALUE = 100  # characters of a category
_COMPARED = 2**20  # cells, of all columns, kept to see whether a column differs in every row


@dataclass(repr=False, eq=False)
class Column:
    """What is known of one column after `rows` rows."""

    name: str
    compared: int = _COMPARED
    rows: int = 0
    numbers: int = 0
    whole: bool = True
    low: float = math.inf
    high: float = -math.inf
    longest: int = 0
    _counts: Counter[str] | None = field(default_factory=Counter)
    _hashes: set[int] | None = field(default_factory=set)

    def add(self, cells: Sequence[str]) -> None:
        found = Counter(cells)
        for value, count in found.items():
            self._add_number(value, count)
        self.longest = max(self.longest, *map(len, found))
        if self._counts is not None:
            self._counts += found
            if len(self._counts) > MOST_VALUES or self.longest > _LONGEST_VALUE:
                self._counts = None
        if self._hashes is not None:
            new = set(map(hash, found))
            if len(new) < len(cells) or not self._hashes.isdisjoint(new):
                self._hashes = None
            elif self.rows < self.compared:
                self._hashes |= new
        self.rows += len(cells)

    @property
    def numeric(self) -> bool:
        """Whether every cell is a number."""
        return self.numbers == self.rows

    @property
    def differs(self) -> bool:
        """Whether no two rows have the same value, as far as they were compared."""
        return self._hashes is not None and self.rows > 1

    @property
    def values(self) -> tuple[str, ...] | None:
        """Its values in order; None if they are too many or too long to be categories."""
        return None if self._counts is None else tuple(sorted(self._counts))

    @property
    def frequent_values(self) -> tuple[str, ...]:
        """Those that at least `FEWEST_ROWS` rows have."""
        counts = self._counts or Counter()
        return tuple(value for value in sorted(counts) if counts[value] >= FEWEST_ROWS)

    def _add_number(self, value: str, count: int) -> None:
        try:
            number = float(value)
        except ValueError:
            return
        if math.isfinite(number):
            self.numbers += count
            self.low, self.high = min(self.low, number), max(self.high, number)
            self.whole = self.whole and number.is_integer()


def read_columns(
    path: str | os.PathLike[str], progress: Callable[[int], None] | None = None
) -> tuple[Column, ...]:
    """The columns of a CSV file with a header; `progress` is called with the bytes read."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not there; expected a CSV file with a header")
    try:
        with path.open("rb") as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
            rows = csv.reader(_lines(path, file), strict=True)
            names = _header(path, next(rows, []))
            columns = tuple(Column(name, _COMPARED // len(names)) for name in names)
            whole_rows = _whole_rows(path, rows, len(names))
            while chunk := list(islice(whole_rows, _ROWS)):
                for column, cells in zip(columns, zip(*chunk, strict=True), strict=True):
                    column.add(cells)
                if progress is not None:
                    progress(raw.tell())
    except (UnicodeDecodeError, csv.Error) as error:
        said = "its bytes are not UTF-8" if isinstance(error, UnicodeError) else str(error)
        raise ValueError(f"{path} is not a CSV file in UTF-8: {said}") from error
    if not columns[0].rows:
        raise ValueError(f"{path} has a header and no rows")
    return columns


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(("\n", "\r")):
            raise ValueError(f"{path} has a line of more than {_LONGEST_LINE} characters")
        yield line


def _header(path: Path, row: list[str]) -> list[str]:
    names = [name.strip() for name in row]
    if len(names) == 1 and any(mark in names[0] for mark in ";\t|"):
        raise ValueError(f"{path}, line 1: expected commas between the columns")
    if not names or "" in names or len(set(names)) < len(names):
        raise ValueError(f"{path}, line 1: expected a header of different names")
    if any(_is_number(name) for name in names):
        raise ValueError(
            f"{path}, line 1: expected a header, and found a number; put a line with the names of "
            "the columns on top"
        )
    return names


def _whole_rows(path: Path, rows: Iterator[list[str]], width: int) -> Iterator[list[str]]:
    for row in rows:
        if row and len(row) != width:
            line = rows.line_num  # type: ignore[attr-defined]
            raise ValueError(f"{path}, line {line}: {len(row)} values under {width} columns")
        if row:
            yield [value.strip() for value in row]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
