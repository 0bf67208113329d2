"""Arrays of one's own, in an npz file."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from epsilons.data.official import sha256
from epsilons.data.split import Data, Part, split
from epsilons.examples import Examples


def npz(file: str | os.PathLike[str], *, test_share: float = 0.2, seed: int = 0) -> Data:
    """Arrays `x` (n, …) and `y` (n,) of labels 0, 1, …; held out: `x_test`, `y_test`, or a share.

    Bytes are scaled to [0, 1]. `ids` and `owners` name the examples, `classes` the labels; every
    other array (n,) is a group. The held-out ones end in `_test`. No pickled object is read.
    `file`: its path. `test_share`: held out, drawn by `seed`, if there is no `x_test`; by default
    0.2. ValueError for arrays that don't fit.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{path} is not there; expected an .npz file with x and y")
    content = path.read_bytes()
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            arrays = dict(stored)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not an .npz file of plain arrays: {error}") from error
    for name in ("x", "y"):
        if name not in arrays:
            raise ValueError(f"{path} has {', '.join(arrays) or 'nothing'}; expected x and y")
    names = tuple(arrays.pop("classes", np.empty(0, dtype=str)).astype(str).tolist())
    later = {n.removesuffix("_test"): arrays.pop(n) for n in list(arrays) if n.endswith("_test")}
    train, test = _part(path, arrays), _part(path, later) if later else None
    largest = int(max(part.y.max(initial=-1) for part in (train, test) if part is not None))
    if names and largest >= len(names):
        raise ValueError(f"{path} has labels up to {largest} and {len(names)} classes")
    return split(
        train,
        test,
        classes=names or tuple(str(label) for label in range(largest + 1)),
        checksums={path.name: sha256(content)},
        test_share=test_share,
        seed=seed,
    )


def _part(path: Path, arrays: dict[str, NDArray[Any]]) -> Part:
    x, y = arrays.get("x"), arrays.get("y")
    if x is None or y is None or y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer):
        found = {name: f"{array.dtype} {array.shape}" for name, array in arrays.items()}
        raise ValueError(f"{path} has {found}; expected x (n, …) and whole numbers y (n,)")
    if y.min(initial=0) < 0:
        raise ValueError(f"{path} has a negative label; expected 0, 1, …")
    scale = 255 if x.dtype == np.uint8 else 1
    groups = {
        name: column.astype(str)
        for name, column in arrays.items()
        if name not in ("x", "y", "ids", "owners")
    }
    examples = Examples(arrays.get("ids", np.arange(len(y))), arrays.get("owners"), groups)
    inputs = torch.from_numpy(x.astype(np.float32) / np.float32(scale))
    if not bool(inputs.isfinite().all()):
        raise ValueError(f"{path} has values in x that are not finite; expected numbers")
    return Part(inputs, y.astype(np.int64), examples)
