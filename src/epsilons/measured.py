"""Norms measured elsewhere, in JAX, TensorFlow or a loop of one's own: read, price, write.

| file       | norms                                             | also read, if there          |
|------------|---------------------------------------------------|------------------------------|
| `.npy`     | (rows, n), or (n,) for one row                    |                              |
| `.npz`     | array `norms`, as above                           | `ids` (n,), `steps` (rows,)  |
| `.parquet` | a row per example, a column per refresh, in order | column `id`                  |
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from epsilons.accounting.individual import Clipping, Method, epsilons_from_blocks
from epsilons.accounting.plan import Rounding
from epsilons.accounting.results import Epsilons

# Norms in memory at a time (128 MiB), however many there are in the file.
_MOST_NORMS = 2**24


@dataclass(frozen=True, repr=False)
class Measured:
    """Norms (rows, n) with what came along in their file."""

    norms: NDArray[np.floating[Any]]
    ids: NDArray[Any] | None = None
    steps: NDArray[np.int64] | None = None

    def blocks(self, steps: ArrayLike) -> Iterator[tuple[NDArray[np.floating[Any]], ArrayLike]]:
        rows, n = self.norms.shape
        chunk = max(1, _MOST_NORMS // max(1, rows))
        for first in range(0, n, chunk):
            yield self.norms[:, first : first + chunk], steps


def read_norms(path: str | os.PathLike[str]) -> Measured:
    """The norms of a file, by its ending; `.npy` is mapped, not loaded."""
    path = Path(path)
    readers: dict[str, Callable[[Path], Measured]] = {
        ".npy": _from_npy,
        ".npz": _from_npz,
        ".parquet": _from_parquet,
    }
    if path.suffix not in readers:
        raise ValueError(f"{path} ends in {path.suffix!r}; expected {', '.join(readers)}")
    if not path.is_file():
        raise ValueError(f"{path} is not there; expected a file of norms")
    found = readers[path.suffix](path)
    if found.norms.ndim == 1:
        found = Measured(found.norms[None, :], found.ids, found.steps)
    if found.norms.ndim != 2 or not np.issubdtype(found.norms.dtype, np.floating):
        raise ValueError(
            f"{path} holds {found.norms.dtype} of shape {found.norms.shape}; "
            "expected floating-point norms (rows, n)"
        )
    return found


def account(
    measured: Measured,
    steps: ArrayLike | None,
    *,
    noise_std: ArrayLike,
    sample_rate: ArrayLike,
    max_grad_norm: ArrayLike,
    delta: float,
    method: Method,
    levels: int | None = None,
    rounding: Rounding | None = None,
    clipping: Clipping = "max",
    progress: Callable[[int], None] | None = None,
) -> Epsilons:
    """ε of every example. `steps`: how many each row stands for, one number or one per row."""
    return epsilons_from_blocks(
        measured.blocks(steps_of_rows(measured, steps)),
        noise_std=noise_std,
        sample_rate=sample_rate,
        max_grad_norm=max_grad_norm,
        delta=delta,
        method=method,
        levels=levels,
        rounding=rounding,
        clipping=clipping,
        progress=progress,
    )


def steps_of_rows(measured: Measured, steps: ArrayLike | None) -> NDArray[Any]:
    """(rows,): for how many steps each row of norms holds, as given or as its file says."""
    rows = len(measured.norms)
    given = measured.steps if steps is None else np.atleast_1d(np.asarray(steps))
    if given is None:
        raise ValueError(
            "for how many training steps did each row of norms hold? Give steps: one number for "
            "all rows or one per row, which add up to the length of the training."
        )
    if given.size not in (1, rows):
        raise ValueError(f"{given.size} numbers of steps for {rows} rows; expected 1 or {rows}")
    return np.broadcast_to(given, rows)


def _from_npy(path: Path) -> Measured:
    try:
        return Measured(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy array of numbers: {error}") from error


def _from_npz(path: Path) -> Measured:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = dict(stored)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a .npz file of numbers: {error}") from error
    if "norms" not in arrays:
        raise ValueError(f"{path} holds {', '.join(arrays) or 'nothing'}; expected an array norms")
    return Measured(arrays["norms"], arrays.get("ids"), arrays.get("steps"))


def _from_parquet(path: Path) -> Measured:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as missing:
        raise ValueError("reading parquet needs pyarrow: pip install 'epsilons[report]'") from (
            missing
        )
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    ids = table.column("id").to_numpy(zero_copy_only=False) if "id" in table.column_names else None
    columns = [table.column(name) for name in table.column_names if name != "id"]
    try:
        norms = np.stack([column.to_numpy().astype(np.float64) for column in columns])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} has a column that holds no norms: {error}") from error
    return Measured(norms, ids)
