"""Epsilons: the n individual ε's with their kind, δ and method; a `repr` shows no value."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from epsilons.tables import write_table

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["exact", "bound", "estimate", "none"]

# An example that is at the clip bound in every step has the worst case up to rounding.
_AT_WORST = 1e-6


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Epsilons:
    """One ε per example, in dataset order; private values, so `repr` shows none of them.

    `values` (n,): ε of each example at `delta`, never below that of its norms, whatever the
    accountant approximated (see `individual_epsilons`). `method`: the accountant, `"tight"`,
    `"rdp"` or `"rdp-classic"`. `worst_case`: ε of an example that is at the clip bound in every
    step. `kind` says what the norms, and so the values, are worth: `exact`, `bound` or `estimate`
    (`none`: not private). ValueError unless `values` have one dimension; they are copied, and the
    copy can't be written to.

    `cautious` (n,): of an estimate from a journal its second reading, else `values`. Where a step
    has no norm of its own, `values` charge it the norm nearest in time: the best estimate, and
    often too low. `cautious` charges it the larger of the norms before and after it: rarely too
    low, never below `values`, and what a person is told.

    >>> Epsilons(values=np.ones(3), delta=1e-5, method="rdp", kind="exact", worst_case=2.0)
    <Epsilons n=3 δ=1e-05 rdp exact>
    """

    values: NDArray[np.float64]
    delta: float
    method: str
    kind: Kind
    worst_case: float
    cautious: NDArray[np.float64] = None  # type: ignore[assignment]  # filled from values

    def __post_init__(self) -> None:
        values = _frozen(self.values)
        one = self.cautious is None or self.cautious is self.values
        cautious = values if one else _frozen(self.cautious)
        if values.ndim != 1 or cautious.shape != values.shape:
            raise ValueError(
                f"values {values.shape} and cautious {cautious.shape} must have one shape (n,)."
            )
        if (cautious < values).any():
            raise ValueError("a cautious ε is below the value it stands for; expected none.")
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "cautious", cautious)

    def __len__(self) -> int:
        return int(self.values.size)

    def __repr__(self) -> str:
        return f"<Epsilons n={len(self)} δ={self.delta:g} {self.method} {self.kind}>"

    @classmethod
    def joined(cls, parts: Sequence[Epsilons]) -> Epsilons:
        """The ε's of successive parts of a data set together, as priced by several processes.

        `parts`: one or more results of the same run, by the same method. ValueError if their δ,
        method, kind or worst case differ.

        >>> part = Epsilons(values=np.ones(3), delta=1e-5, method="rdp", kind="exact",
        ...                 worst_case=2.0)
        >>> Epsilons.joined([part, part])
        <Epsilons n=6 δ=1e-05 rdp exact>
        """
        facts = {(part.delta, part.method, part.kind, part.worst_case) for part in parts}
        if len(facts) != 1:
            raise ValueError(
                f"{len(parts)} parts with {len(facts)} different (δ, method, kind, worst case); "
                "expected parts of one run that were priced alike"
            )
        values = np.concatenate([part.values for part in parts])
        one = all(part.cautious is part.values for part in parts)
        cautious = values if one else np.concatenate([part.cautious for part in parts])
        return replace(parts[0], values=values, cautious=cautious)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor: arrays of a plain unpickling would be writeable.
        return _rebuilt, (dict(vars(self)),)

    def quantile(self, q: float | Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """Quantiles of the values, at `q` in [0, 1], a number or several: private, as they are.

        Each is one of the values, the next higher one where `q` falls between two. ValueError
        without examples.
        """
        if not len(self):
            raise ValueError("no examples, hence no quantile.")
        # Not interpolated: between a finite ε and ∞ there is no value.
        result = np.asarray(np.quantile(self.values, q, method="higher"))
        return result[()]

    @property
    def at_worst_case(self) -> NDArray[np.bool_]:
        """(n,) True where ε is the worst case to 1e-6; its mean is the share of such examples."""
        if not np.isfinite(self.worst_case):
            return np.isinf(self.values)
        return self.values >= self.worst_case * (1 - _AT_WORST)

    def save(self, path: str | os.PathLike[str], *, ids: Sequence[object] | None = None) -> None:
        """Write `epsilon` (and `id`) to a `.csv`, `.parquet` or `.json` file, by its ending.

        Of an estimate with two readings also `cautious`, which is what a person is told.

        δ, method, kind and worst case go along; see `tables`. `path`: the file, which is its
        owner's alone (mode 0600), and appears complete or not at all; one that is there is
        replaced. `ids` (n,): names of the examples, for a column of their own; by default none.

        ValueError for another ending, or unless there is one id for each example; ImportError if
        parquet is asked for and pyarrow is not installed.
        """
        write_table(path, self._columns(ids), self._facts())

    def to_csv(self, path: str | os.PathLike[str], *, ids: Sequence[object] | None = None) -> None:
        """Write a CSV file as `save` does, whatever the ending of `path`; `ids` as there."""
        write_table(path, self._columns(ids), self._facts(), ending=".csv")

    def to_parquet(
        self, path: str | os.PathLike[str], *, ids: Sequence[object] | None = None
    ) -> None:
        """Write a Parquet file as `save` does, whatever the ending of `path`; `ids` as there.

        ImportError if pyarrow is not installed.
        """
        write_table(path, self._columns(ids), self._facts(), ending=".parquet")

    def to_frame(self, *, ids: Sequence[object] | None = None) -> pd.DataFrame:
        """The values as a pandas data frame of one row per example: private, as they are.

        Column `epsilon`, before it `id` where `ids` (n,) are given, and after it `cautious` of an
        estimate with two readings; its `attrs` have delta, method, kind and worst_case. The columns
        are copies. ImportError if pandas is not installed; ValueError unless there is one id for
        each example.
        """
        try:
            import pandas as pd
        except ImportError as missing:
            raise ImportError("a data frame needs pandas: pip install pandas") from missing
        frame = pd.DataFrame(
            {name: np.array(column) for name, column in self._columns(ids).items()}
        )
        frame.attrs.update(self._facts())
        return frame

    def _columns(self, ids: Sequence[object] | None) -> dict[str, Any]:
        columns = {"epsilon": self.values}
        if self.cautious is not self.values:
            columns["cautious"] = self.cautious
        if ids is None:
            return columns
        if len(ids) != len(self):
            raise ValueError(f"{len(ids)} ids for {len(self)} examples; expected one each.")
        return {"id": ids, **columns}

    def _facts(self) -> dict[str, Any]:
        return {
            "delta": float(self.delta),
            "method": self.method,
            "kind": self.kind,
            "worst_case": float(self.worst_case),
        }


def _frozen(values: NDArray[np.float64]) -> NDArray[np.float64]:
    copy = np.array(values, dtype=np.float64)
    copy.flags.writeable = False
    return copy


def _rebuilt(fields: dict[str, Any]) -> Epsilons:
    return Epsilons(**fields)


def small_bound(epsilons: Epsilons) -> str | None:
    """A sentence where everyone is at the worst case, so that C tells nobody apart; else None."""
    worst = epsilons.worst_case
    if epsilons.kind == "none" or not worst > 0 or not epsilons.at_worst_case.all():
        return None
    return (
        "C is small: every norm that was recorded is at the clip bound, or none was recorded, "
        "and everyone is at the worst case. A larger max_grad_norm tells examples apart."
    )
