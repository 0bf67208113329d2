"""Statistics of the individual ε's, for everyone: charged to the run's budget, then drawn.

An ε_i is a function of example i and of the models that training released, so given those models
one record more or less is one value more or less here. n is the plan's, public.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from epsilons.accounting import checks
from epsilons.files import disk_is_full
from epsilons.release.budget import Budget, Cost, Limit
from epsilons.release.ledger import EPSILONS, write_ledger
from epsilons.release.mechanisms import Size, noisy_size, noisy_sum
from epsilons.release.quantiles import (
    CONFIDENCE,
    DESCENT_STEPS,
    Estimate,
    descent_quantiles,
    epsilon_grid,
    two_stage_draws,
    two_stage_noise,
    two_stage_quantiles,
)
from epsilons.runs import Run

Method = Literal["two-stage", "descent"]
METHODS: tuple[Method, ...] = ("two-stage", "descent")
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)

# Shares of μ²: the mean's beside quantiles, and the size's of a group.
_MEAN_SHARE = 0.25
_SIZE_SHARE = 0.2
# A group is published where the noise of a rank is at most 1/20 of its noisy size; one record can
# put a group of its own there with a probability of Φ(−12) < 1e-32.
_LEAST_IN_NOISE = 20.0
_LEAST_IN_SIZE_NOISE = 12.0


@dataclass(frozen=True)
class Statistics:
    """What is published of one set of examples; `size` of a group only, where it is private.

    `mean` of the ε's, if it was asked for. `quantiles`: by the share of examples that are below.
    """

    mean: Estimate | None
    quantiles: Mapping[float, Estimate]
    size: Estimate | None = None

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The statistics that `fields`, read from JSON, were written from."""
        return cls(
            mean=fields["mean"] and Estimate(**fields["mean"]),
            quantiles={float(q): Estimate(**found) for q, found in fields["quantiles"].items()},
            size=fields["size"] and Estimate(**fields["size"]),
        )


@dataclass(frozen=True)
class Publication:
    """One answer of `publish`; what it holds is for everyone.

    `everyone`: statistics of all examples. `groups`: statistics by column and label; None where a
    label that was named is too small a group.
    """

    everyone: Statistics
    groups: Mapping[str, Mapping[str, Statistics | None]]

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The publication that `fields`, read from JSON, were written from."""
        return cls(
            everyone=Statistics.from_dict(fields["everyone"]),
            groups={
                column: {label: part and Statistics.from_dict(part) for label, part in by.items()}
                for column, by in fields["groups"].items()
            },
        )


def publish(
    run: Run,
    *,
    epsilon: float = 0.1,
    delta: float = 1e-5,
    mean: bool = True,
    quantiles: Sequence[float] = QUANTILES,
    groups: Sequence[str] | Mapping[str, Sequence[str] | None] = (),
    method: Method = "two-stage",
    limit: Limit | None = None,
) -> Publication:
    """Mean and quantiles of the ε's, of everyone and by group, all of it together (ε, δ)-DP.

    `run`: one with charged steps, opened by `Run.checked`. `epsilon` (by default 0.1) and `delta`
    (by default 1e-5): the price of this answer. `mean`: whether the mean is asked for. `quantiles`:
    shares of examples in (0, 1), by default 0.1 to 0.9.

    `groups`: columns, or columns with the labels to publish. Labels that are not named are taken
    from the data, and only those of groups large enough appear. The groups of one column are
    disjoint and cost what one of them costs; columns, and everyone, share μ² evenly. `method`:
    `"two-stage"`, or `"descent"`, the paper's. `limit` is fixed by the run's first publication.

    Guarantee: (ε, δ)-DP for one record added or removed, given the models that training released;
    charged to the run's budget before anything is drawn; the same question again costs nothing,
    also after a disk was full (OSError). Values are in [0, worst case] and non-decreasing in the
    quantile. `OverBudget`, and nothing charged, where less is left of the budget, or of the reserve
    that promises include (`Plan.reserve_mu`); ValueError for a
    run too small for the noise, for one that is not private, and for unknown columns.
    """
    ask = _Asked(mean, tuple(float(q) for q in quantiles), method)
    columns = dict(groups) if isinstance(groups, Mapping) else dict.fromkeys(groups)
    for column in columns:
        checks.one_of("column", column, tuple(run.examples.groups))
    parts = 1 + len(columns)
    cost = Cost.of(epsilon, delta, ask.draws * parts)
    mu = cost.mu * parts**-0.5
    if run.plan.n < (least := ask.least_size(mu)):
        raise ValueError(
            f"n={run.plan.n} examples are too few for ε = {epsilon:g} at δ = {delta:g}: the noise "
            f"would drown them below {least:.0f}. Ask for less, or with a larger ε."
        )
    question = {
        "statistics": EPSILONS,
        "steps": sum(run.journal.charged()),
        "epsilon": epsilon,
        "delta": delta,
        "groups": {name: labels and [str(x) for x in labels] for name, labels in columns.items()},
        **asdict(ask),
    }
    upper = run.journal.worst_case()
    if not run.journal.steps_charged or not 0 < upper < np.inf:
        raise ValueError(f"the worst case is {upper}; only a private run of ≥ 1 step has ε's")

    def answer() -> dict[str, Any]:
        told = run.epsilons(hold="cautious").values
        values = np.clip(np.nan_to_num(told, nan=upper), 0.0, upper)
        everyone = ask.statistics(values, upper, Size(run.plan.n), mu)
        by = {
            column: _by_group(ask, values, upper, run.examples.groups[column], labels, mu)
            for column, labels in columns.items()
        }
        return asdict(Publication(everyone, by))

    try:
        with Budget.of_run(run.path, limit) as budget:
            promised = run.plan.releases if run.plan.budgets else None
            found = budget.ask(question, cost, answer, promised=promised)
            write_ledger(run, budget)
    except (OSError, sqlite3.Error) as error:
        if not disk_is_full(error):
            raise
        raise OSError(
            f"no room is left on the disk of {run.path}, and nothing was published. Make room and "
            "ask the same again: what was charged for it stays charged and is not charged twice"
        ) from error
    return Publication.from_dict(found)


def release_mean(
    run: Run, *, epsilon: float = 0.1, delta: float = 1e-5, limit: Limit | None = None
) -> Estimate:
    """The mean of the individual ε's of `run` alone, (`epsilon`, `delta`)-DP; see `publish`.

    `limit`, guarantees and errors as there.
    """
    found = publish(run, epsilon=epsilon, delta=delta, quantiles=(), limit=limit).everyone.mean
    assert found is not None
    return found


def release_quantiles(
    run: Run,
    quantiles: Sequence[float] = QUANTILES,
    *,
    epsilon: float = 0.1,
    delta: float = 1e-5,
    method: Method = "two-stage",
    limit: Limit | None = None,
) -> list[Estimate]:
    """Some `quantiles` of the individual ε's of `run`, together (ε, δ)-DP; see `publish`.

    In their order. `epsilon`, `delta`, `method`, `limit`, guarantees and errors as there.
    """
    found = publish(
        run,
        epsilon=epsilon,
        delta=delta,
        mean=False,
        quantiles=quantiles,
        method=method,
        limit=limit,
    )
    return [found.everyone.quantiles[float(q)] for q in quantiles]


@dataclass(frozen=True)
class _Asked:
    """Which statistics, and how."""

    mean: bool
    quantiles: tuple[float, ...]
    method: Method = field(default="two-stage")

    def __post_init__(self) -> None:
        checks.one_of("method", self.method, METHODS)
        if not self.mean and not self.quantiles:
            raise ValueError("nothing is asked for: neither the mean nor a quantile")
        if len(set(self.quantiles)) != len(self.quantiles) or not all(
            0 < q < 1 for q in self.quantiles
        ):
            raise ValueError(f"quantiles {self.quantiles} must be different and between 0 and 1")

    @property
    def draws(self) -> int:
        """At most so many noisy numbers are drawn for one set of examples."""
        k = len(self.quantiles)
        each = two_stage_draws(k) if self.method == "two-stage" else DESCENT_STEPS * k
        return 2 + (each if k else 0)

    def least_size(self, mu: float) -> float:
        """How many examples there must be for the noise not to drown them."""
        mean, quantiles = self._shares(mu)
        noise = [0.5 / mean] if mean else []
        if quantiles:
            noise.append(two_stage_noise(len(self.quantiles), quantiles))
        return _LEAST_IN_NOISE * max(noise)

    def statistics(
        self, values: NDArray[np.float64], upper: float, n: Size, mu: float
    ) -> Statistics:
        """μ-GDP statistics of n values in [0, U]."""
        for_mean, for_quantiles = self._shares(mu)
        found: list[Estimate] = []
        if for_quantiles and self.method == "two-stage":
            grid = epsilon_grid(upper)
            found = two_stage_quantiles(values, self.quantiles, grid, n, for_quantiles)
        elif for_quantiles:
            found = descent_quantiles(values, self.quantiles, upper, n, for_quantiles)
        return Statistics(
            mean=private_mean(values, upper, n, for_mean) if for_mean else None,
            quantiles=dict(zip(self.quantiles, found, strict=True)),
        )

    def _shares(self, mu: float) -> tuple[float, float]:
        """μ of the mean and μ of the quantiles."""
        share = _MEAN_SHARE if self.quantiles else 1.0
        share = share if self.mean else 0.0
        return mu * share**0.5, mu * (1 - share) ** 0.5


def private_mean(values: NDArray[np.float64], upper: float, n: Size, mu: float) -> Estimate:
    """The mean of n values in [0, U]: U/2 + Σ(xᵢ − U/2)/n with noise on the sum; μ-GDP."""
    total = noisy_sum(values, upper, mu)
    centred = float(total.values[0]) / n.value
    std = float(np.hypot(total.std, centred * n.std)) / n.value
    return _estimate(upper / 2 + centred, std, upper)


def _by_group(
    ask: _Asked,
    values: NDArray[np.float64],
    upper: float,
    column: NDArray[Any],
    named: Sequence[str] | None,
    mu: float,
) -> dict[str, Statistics | None]:
    """Statistics of each group of one column. A record is in one group, so all cost μ together."""
    names = column.astype(str)
    found: dict[str, Statistics | None] = {}
    for label in np.unique(names).tolist() if named is None else map(str, named):
        members = names == label
        size = noisy_size(members, mu * _SIZE_SHARE**0.5)
        for_rest = mu * (1 - _SIZE_SHARE) ** 0.5
        if size.value >= max(ask.least_size(for_rest), 1 + _LEAST_IN_SIZE_NOISE * size.std):
            rest = ask.statistics(values[members], upper, size, for_rest)
            count = _estimate(size.value, size.std, float(len(names)))
            found[label] = Statistics(rest.mean, rest.quantiles, count)
        elif named is not None:
            found[label] = None
    return found


def _estimate(value: float, std: float, upper: float) -> Estimate:
    """A number with normal noise and its interval, in [0, upper]."""
    reach = float(ndtri((1 + CONFIDENCE) / 2)) * std
    low, at, high = (min(max(v, 0.0), upper) for v in (value - reach, value, value + reach))
    return Estimate(at, low, high)
