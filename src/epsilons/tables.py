"""Private tables, one row per example: `.csv`, `.parquet` or `.json`, by the file's ending.

| file       | where the facts stand (δ, method, kind, …)     | a value of ∞ |
|------------|------------------------------------------------|--------------|
| `.csv`     | in columns of their own, the same in every row | `inf`        |
| `.parquet` | in the metadata of the file                    | ∞            |
| `.json`    | beside `"rows"`                                | null         |
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.files import private_file

Columns = Mapping[str, NDArray[Any]]
Facts = Mapping[str, object]


def expect_table(path: str | os.PathLike[str]) -> Path:
    """The path, if a table can be written there by its ending; else a `ValueError`."""
    path = Path(path)
    if path.suffix not in _WRITERS:
        raise ValueError(
            f"{path} ends in {path.suffix!r}; expected one of {', '.join(_WRITERS)}, which says "
            "how the table is written"
        )
    return path


def write_table(
    path: str | os.PathLike[str],
    columns: Mapping[str, ArrayLike],
    facts: Facts,
    *,
    ending: str | None = None,
) -> None:
    """Write columns of one length, with what holds for all rows, to a file of mode 0600.

    It appears complete or not at all; one that is there is replaced. `ending`: how it is written,
    by default the file's own.
    """
    path = expect_table(path) if ending is None else Path(path)
    arrays = {name: np.asarray(column) for name, column in columns.items()}
    with private_file(path) as file:
        _WRITERS[ending or path.suffix](file, arrays, facts)


def _to_csv(file: IO[bytes], columns: Columns, facts: Facts) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    rows = csv.writer(text)
    rows.writerow([*columns, *facts])
    same = [_exact(value) for value in facts.values()]
    for row in zip(*(column.tolist() for column in columns.values()), strict=True):
        rows.writerow([*map(_exact, row), *same])
    text.detach()  # flushed; the file is closed by who opened it


def _to_json(file: IO[bytes], columns: Columns, facts: Facts) -> None:
    rows = [
        dict(zip(columns, map(_finite, row), strict=True))
        for row in zip(*(column.tolist() for column in columns.values()), strict=True)
    ]
    page = {**{name: _finite(value) for name, value in facts.items()}, "rows": rows}
    text = json.dumps(page, indent=1, ensure_ascii=False, allow_nan=False)
    file.write(text.encode() + b"\n")


def _to_parquet(file: IO[bytes], columns: Columns, facts: Facts) -> None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as missing:
        raise ImportError(
            "writing parquet needs pyarrow: pip install 'epsilons[report]'"
        ) from missing
    table = pa.table(dict(columns))
    pq.write_table(
        table.replace_schema_metadata({name: str(_exact(value)) for name, value in facts.items()}),
        file,
    )


_WRITERS: dict[str, Callable[[IO[bytes], Columns, Facts], None]] = {
    ".csv": _to_csv,
    ".parquet": _to_parquet,
    ".json": _to_json,
}


def _exact(value: Any) -> Any:
    """A number with all its digits, whatever numpy calls it."""
    return repr(float(value)) if isinstance(value, float) else value


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
