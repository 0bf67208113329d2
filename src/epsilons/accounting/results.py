"""What the accountant hands back: n individual ε's, what they are worth, and never in print."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kind = Literal["exact", "bound", "estimate", "none"]

# An example that is at the clip bound in every step has the worst case up to rounding.
_AT_WORST = 1e-6


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class Epsilons:
    """One ε per example, in dataset order; private values, so `repr` shows none of them.

    `values` (n,): ε of each example at `delta`. `upper` (n,): a bound of it that holds whatever
    the accountant approximated (see `individual_epsilons`). `worst_case`: ε of an example that
    is at the clip bound in every step. `kind` says what the values are worth: `exact`, `bound`
    or `estimate` (`none`: not private).

    >>> Epsilons(values=np.ones(3), delta=1e-5, method="rdp", kind="exact", worst_case=2.0)
    <Epsilons n=3 δ=1e-05 rdp exact>
    """

    values: NDArray[np.float64]
    delta: float
    method: str
    kind: Kind
    worst_case: float
    upper: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        values = np.array(self.values, dtype=np.float64)
        upper = values if self.upper is None else np.array(self.upper, dtype=np.float64)
        if values.ndim != 1 or upper.shape != values.shape:
            raise ValueError(
                f"values {values.shape} and upper {upper.shape} must both have shape (n,)."
            )
        values.flags.writeable = upper.flags.writeable = False
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "upper", upper)

    def __len__(self) -> int:
        return int(self.values.size)

    def __repr__(self) -> str:
        return f"<Epsilons n={len(self)} δ={self.delta:g} {self.method} {self.kind}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor: arrays of a plain unpickling would be writeable.
        return _rebuilt, (dict(vars(self)),)

    def quantile(self, q: float | Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
        """The q-quantiles of the values; of n private values, hence private."""
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

    def to_parquet(
        self, path: str | os.PathLike[str], *, ids: Sequence[object] | None = None
    ) -> None:
        """Writes the columns `epsilon` and `upper` (and `id`) to a file that its owner alone reads.

        δ, method, kind and worst case go into the file's metadata. The file appears complete or
        not at all, with mode 0600; one that is there is replaced.
        """
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as missing:
            raise ImportError(
                "writing parquet needs pyarrow: pip install 'epsilons[report]'"
            ) from missing
        columns: dict[str, Any] = {"epsilon": self.values, "upper": self.upper}
        if ids is not None:
            if len(ids) != len(self):
                raise ValueError(f"{len(ids)} ids for {len(self)} examples; expected one each.")
            columns = {"id": ids, **columns}
        facts = {
            "delta": repr(float(self.delta)),
            "method": self.method,
            "kind": self.kind,
            "worst_case": repr(float(self.worst_case)),
        }
        table = pa.table(columns).replace_schema_metadata(facts)
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(target)) from None
        try:
            with os.fdopen(handle, "wb") as file:
                pq.write_table(table, file)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _rebuilt(fields: dict[str, Any]) -> Epsilons:
    return Epsilons(**fields)
