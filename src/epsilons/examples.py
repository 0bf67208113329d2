"""Examples: what travels with the data of a run, beside the tensors themselves.

Ids, owners, groups by column, and (after training) losses and correctness. All of it is private.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GROUP = "group:"
_OPTIONAL = ("owners", "losses", "correct", "digests")


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """Who the examples of a data set are: columns (n,) in its order, all of them private.

    `ids`: a name for each, all different. `owners`: whose each is; several may have the same.
    `groups`: columns by name, such as class or sex, by which figures are compared. `losses` and
    `correct`: of each example under the final model. Only the ids are needed. `digests`: what each
    record is known by in other runs on the same data, whatever its id there; `fit` computes them
    from the data (`training.identity.record_digests`). `budgets`: the ε that each has chosen of
    those that the plan offers (`Plan(budgets=…)`); fixed before training. ValueError for ids that
    repeat, columns of another length, and records of one owner that have different budgets.

    >>> people = Examples(ids=["a", "b"], groups={"sex": ["F", "M"]})
    >>> people
    <Examples n=2 groups=sex>
    """

    ids: NDArray[Any]
    owners: NDArray[Any] | None = None
    groups: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    losses: NDArray[np.float64] | None = None
    correct: NDArray[np.bool_] | None = None
    digests: NDArray[Any] | None = None
    budgets: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        ids = _column("ids", self.ids, None)
        if len(np.unique(ids)) != len(ids):
            raise ValueError(f"ids of {len(ids)} examples repeat; every example needs its own")
        object.__setattr__(self, "ids", ids)
        for name in (*_OPTIONAL, "budgets"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _column(name, getattr(self, name), len(ids)))
        groups = {name: _column(name, column, len(ids)) for name, column in self.groups.items()}
        object.__setattr__(self, "groups", groups)
        self._check_budgets()

    def _check_budgets(self) -> None:
        if self.budgets is None:
            return
        if self.budgets.dtype.kind not in "fiu":
            raise ValueError("budgets are ε's, one number for each example")
        object.__setattr__(self, "budgets", self.budgets.astype(np.float64))
        if self.owners is None:
            return
        owners = np.unique(self.owners, return_inverse=True)[1]
        first = np.zeros(owners.max() + 1)
        first[owners] = self.budgets
        if (first[owners] != self.budgets).any():
            raise ValueError(
                "records of one owner have different budgets; give each owner one. A budget can't "
                "be divided among records: halves of ε = 1 cost 1.068 together, fifths 1.160"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        groups = f" groups={','.join(self.groups)}" if self.groups else ""
        return f"<Examples n={len(self)}{groups}>"

    @classmethod
    def numbered(cls, n: int) -> Self:
        """Examples, `n` of them, whose ids are their positions in the data set."""
        return cls(ids=np.arange(n))

    def with_outcomes(self, losses: ArrayLike, correct: ArrayLike | None) -> Self:
        """The same examples with their `losses` (n,) under the final model, and `correct` (n,).

        `correct`: whether the model is right about each; None where that means nothing.
        """
        return replace(self, losses=losses, correct=correct)  # type: ignore[arg-type]


def packed(examples: Examples, *, ids: bool = True) -> bytes:
    """Every column but the budgets, with the ids or without, as an `.npz` file.

    Budgets are the journal's own to keep, beside the promises.
    """
    columns = {_GROUP + name: column for name, column in examples.groups.items()}
    for name in (*(("ids",) if ids else ()), *_OPTIONAL):
        if getattr(examples, name) is not None:
            columns[name] = getattr(examples, name)
    content = io.BytesIO()
    np.savez_compressed(content, **columns)  # type: ignore[arg-type]
    return content.getvalue()


def unpacked(content: bytes, ids: ArrayLike | None = None) -> Examples:
    """What `packed` was made of; `ids` where it was made without. ValueError if damaged."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            columns = dict(stored)
        groups = {
            name.removeprefix(_GROUP): columns.pop(name)
            for name in list(columns)
            if name.startswith(_GROUP)
        }
        given = columns if ids is None else {"ids": ids, **columns}
        return Examples(groups=groups, **given)
    except (
        ValueError, EOFError, RuntimeError, TypeError, zipfile.BadZipFile, zlib.error,
    ) as error:  # fmt: skip
        raise ValueError(f"the columns of the examples are damaged: {error}") from error


def _column(name: str, values: ArrayLike, n: int | None) -> NDArray[Any]:
    column = np.asarray(values)
    if column.dtype == object:
        column = column.astype(str)
    if column.ndim != 1 or (n is not None and len(column) != n):
        expected = "one value per example" if n is None else f"one value for each of {n} examples"
        raise ValueError(f"{name} has shape {column.shape}; expected {expected}")
    return column
