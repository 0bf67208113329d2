"""Settings: one run in one flat TOML file, checked before anything is loaded.

A key that is not known is an error that names the nearest one; a key that does not go with the
data set is refused by `job`, which knows what each reader takes.
"""

from __future__ import annotations

import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from epsilons.accounting.adaptive import AdaptiveClipping
from epsilons.accounting.composition import NOTHING, Releases
from epsilons.accounting.plan import Clipping, NormStorage, Plan, Rounding, Schedule, Unit
from epsilons.accounting.sums import Sums

# What the readers of data sets take; None: not given.
DATA_KEYS = (
    "target", "id", "owner", "groups", "ignore", "ranges", "categories", "classes",
    "learn_encoding", "test_file", "test_share", "size", "task", "balanced", "data_seed",
)  # fmt: skip
ADAPTIVE_KEYS = tuple(field.name for field in fields(AdaptiveClipping))
_PLAN_KEYS = (
    "delta", "batch_size", "sample_rate", "epochs", "steps", "refreshes_per_epoch",
    "refresh_every", "refresh_schedule", "clipping", "rounding", "levels", "sums",
    "norm_storage", "max_records_per_owner", "unit", "pace", "slack", "order",
)  # fmt: skip


def _unquoted(value: object) -> object:
    # pydantic would take "4" for 4 and true for 1
    if isinstance(value, bool | str):
        raise ValueError("input should be a valid number, without quotes")
    return value


def _bound(value: object) -> object:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    named = value in ("median", "adaptive")
    if not named and not (number and 0 < value < math.inf):  # type: ignore[operator]
        raise ValueError("expected a number > 0, 'median' or 'adaptive'")
    return value


Number = Annotated[float, BeforeValidator(_unquoted)]
Whole = Annotated[int, BeforeValidator(_unquoted)]


class PhaseChange(BaseModel):
    """One `[[phase]]` table: what changes from a step on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    first_step: Whole = Field(gt=0)
    noise_multiplier: Number | None = Field(None, gt=0)
    max_grad_norm: Number | None = Field(None, gt=0)
    batch_size: Number | None = Field(None, gt=0)


class Settings(BaseModel):
    """Everything that `epsilons train` needs to know; read by `Settings.read`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # data
    data: str
    path: str | None = None
    take: Whole | None = Field(None, gt=0)
    target: str | None = None
    id: str | None = None
    owner: str | None = None
    groups: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    ranges: dict[str, tuple[float, float]] | None = None
    categories: dict[str, tuple[str, ...]] | None = None
    classes: tuple[str, ...] | None = None
    learn_encoding: bool | None = None
    test_file: str | None = None
    test_share: Number | None = Field(None, ge=0, lt=1)
    size: Whole | None = Field(None, gt=0)
    task: str | None = None
    balanced: bool | None = None
    data_seed: Whole | None = Field(None, ge=0)
    budget: str | None = None

    # model and optimizer
    model: str = "logistic"
    hidden: tuple[int, ...] | None = None
    loss: Literal["cross_entropy", "hinge"] = "cross_entropy"
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Number = Field(gt=0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    momentum: Number | None = Field(None, ge=0, lt=1)
    weight_decay: Number = Field(0.0, ge=0)

    # plan
    epsilon: Number | None = Field(None, gt=0)
    noise_multiplier: Number | None = Field(None, gt=0)
    delta: Number = Field(gt=0, lt=1)
    max_grad_norm: Annotated[float | Literal["median", "adaptive"], BeforeValidator(_bound)]
    median_epsilon: Number = Field(0.1, gt=0)
    median_delta: Number = Field(1e-5, gt=0, lt=1)
    initial_clipbound: Number | None = Field(None, gt=0)
    target_unclipped_quantile: Number | None = Field(None, gt=0, lt=1)
    clipbound_learning_rate: Number | None = Field(None, gt=0)
    min_clipbound: Number | None = Field(None, gt=0)
    max_clipbound: Number | None = Field(None, gt=0)
    unclipped_num_std: Number | None = Field(None, gt=0)
    update_every: Whole | None = Field(None, gt=0)
    batch_size: Number | None = Field(None, gt=0)
    sample_rate: Number | None = Field(None, gt=0, le=1)
    epochs: Number | None = Field(None, gt=0)
    steps: Whole | None = Field(None, gt=0)
    refreshes_per_epoch: Number | None = Field(None, ge=0)
    refresh_every: Whole | None = Field(None, gt=0)
    refresh_schedule: Schedule = "early"
    clipping: Clipping = "max"
    rounding: Rounding | None = None
    levels: Whole = Field(256, ge=1)
    sums: Sums = "float64"
    norm_storage: NormStorage = "float64"
    max_records_per_owner: Whole | None = Field(None, ge=1)
    unit: Unit = "record"
    budgets: dict[str, Number] | None = Field(None, min_length=1)
    pace: Number = Field(0.0, ge=0, le=1)
    slack: Number = Field(1.0, gt=0)
    order: Number | None = Field(None, gt=1)
    reserve_epsilon: Number | None = Field(None, gt=0)
    reserve_delta: Number = Field(1e-5, gt=0, lt=1)
    phase: tuple[PhaseChange, ...] = ()

    # how
    seed: Whole | None = Field(None, ge=0)
    device: str | None = None
    micro_batch: Whole | None = Field(None, gt=0)
    follow: Whole = Field(0, ge=0)
    evaluate_every: Whole | None = Field(None, gt=0)
    max_epsilon: Number | None = Field(None, gt=0)
    compile: Literal["auto"] | bool = "auto"
    shards: Whole | None = Field(None, gt=0)

    @classmethod
    def read(cls, file: str | os.PathLike[str], changes: Iterable[str] = ()) -> Self:
        """The settings of a TOML file, with `key=value` changes on top."""
        path = Path(file)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path} is not there; expected a TOML file of settings") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, IsADirectoryError) as error:
            raise ValueError(f"{path} is not a TOML file: {error}") from error
        given: dict[str, Any] = {}
        for key, value in map(_change, changes):
            if key in given:
                raise ValueError(f"{key} is given twice: {given[key]!r} and {value!r}")
            given[key] = value
        return cls.of({**values, **given}, str(path))

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str = "settings") -> Self:
        """The settings of plain values; ValueError with one sentence if they are wrong."""
        for key in values:
            if key not in cls.model_fields:
                raise ValueError(f"{where}: {key!r} is not a setting; {_nearest(key)}")
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise ValueError(f"{where}: {'; '.join(map(_sentence, error.errors()))}") from None
        settings._check_noise(where)
        settings._check_adaptive(where)
        return settings

    def _check_noise(self, where: str) -> None:
        """Whether what the noise is for is said once."""
        if self.budgets is None:
            if (self.epsilon is None) == (self.noise_multiplier is None):
                raise ValueError(
                    f"{where}: give epsilon (the worst case to meet) or noise_multiplier"
                )
            for key in ("budget", "reserve_epsilon"):
                if getattr(self, key) is not None:
                    raise ValueError(
                        f"{where}: {key} goes with budgets, e.g. {{low = 1, high = 4}}"
                    )
            return
        if self.epsilon is not None:
            raise ValueError(
                f"{where}: with budgets the largest of them is the worst case; leave epsilon out"
            )
        if len(self.budgets) > 1 and self.budget is None:
            raise ValueError(
                f"{where}: budget is missing, the column that says which of the budgets "
                f"({', '.join(self.budgets)}) each record has"
            )

    def _check_adaptive(self, where: str) -> None:
        given = [key for key in ADAPTIVE_KEYS if getattr(self, key) is not None]
        if self.max_grad_norm != "adaptive" and given:
            raise ValueError(f"{where}: {given[0]} goes with max_grad_norm = 'adaptive'")
        for key in ("initial_clipbound", "unclipped_num_std"):
            if self.max_grad_norm == "adaptive" and key not in given:
                raise ValueError(f"{where}: max_grad_norm = 'adaptive' needs {key}")

    def adaptive(self) -> AdaptiveClipping | None:
        """How the clip bound moves; None if it stays."""
        if self.max_grad_norm != "adaptive":
            return None
        given = {key: getattr(self, key) for key in ADAPTIVE_KEYS}
        known = {key: value for key, value in given.items() if value is not None}
        return AdaptiveClipping(**known)

    def plan(
        self,
        n: int,
        bound: float | None = None,
        clip_bound: Releases = NOTHING,
        reserve: Releases = NOTHING,
    ) -> Plan:
        """The plan of a run on n training examples.

        `bound` is what a median has come to, `clip_bound` what it cost: `epsilon` is met by both
        together, so that the training gets what the median leaves; so are `budgets`, and by what
        `reserve` sets aside for publications.
        """
        constants = {key: getattr(self, key) for key in _PLAN_KEYS}
        constants["max_grad_norm"] = self.max_grad_norm if bound is None else bound
        constants["adaptive"] = self.adaptive()
        constants["clip_bound_mu"] = clip_bound.mu
        constants["clip_bound_distance"] = clip_bound.distance
        constants["reserve_mu"], constants["reserve_distance"] = reserve.mu, reserve.distance
        # two labels may stand for the same ε
        offered = None if self.budgets is None else tuple(sorted({*self.budgets.values()}))
        changes = (phase.model_dump(exclude_none=True) for phase in self.phase)
        phases = tuple((change.pop("first_step"), change) for change in changes)
        if self.noise_multiplier is not None:
            plan = Plan(
                n=n,
                noise_multiplier=self.noise_multiplier,
                phases=phases,
                budgets=offered or (),
                **constants,
            )
            assert plan.promises is not None  # one that can't be made raises
        elif offered is not None:
            plan = Plan.for_budgets(offered, n=n, phases=phases, **constants)
        else:
            assert self.epsilon is not None
            plan = Plan.for_epsilon(self.epsilon, n=n, phases=phases, **constants)
        if plan.steps == 0:
            raise ValueError(
                f"epochs={plan.epochs:g} is not one step of batch_size={plan.batch_size:g} "
                f"among n={n}; expected at least {plan.sample_rate:g}"
            )
        return plan

    def data_options(self) -> dict[str, Any]:
        """The data keys that were given, by the names the readers use."""
        given = {key: getattr(self, key) for key in DATA_KEYS if getattr(self, key) is not None}
        return {"seed" if key == "data_seed" else key: value for key, value in given.items()}


def _change(text: str) -> tuple[str, Any]:
    """`key=value` with the value as in TOML; a bare word is a string.

    >>> _change("lr=0.5"), _change("data=mnist"), _change("hidden=[64, 32]")
    (('lr', 0.5), ('data', 'mnist'), ('hidden', [64, 32]))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"{text!r} is not key=value")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


# What settings are called elsewhere.
_ELSEWHERE = {
    "clip": "max_grad_norm",
    "l2_norm_clip": "max_grad_norm",
    "learning_rate": "lr",
    "privacy_budgets": "budgets",
    "sigma": "noise_multiplier",
    "target_delta": "delta",
    "target_epsilon": "epsilon",
}


def _nearest(key: str) -> str:
    near = [_ELSEWHERE[key]] if key in _ELSEWHERE else []
    near += difflib.get_close_matches(key, Settings.model_fields, n=1, cutoff=0.5)
    known = ", ".join(Settings.model_fields)
    return f"did you mean {near[0]!r}?" if near else f"expected one of {known}"


def _sentence(error: Any) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{key} is missing"
    said = error["msg"].removeprefix("Value error, ")
    return f"{key} = {error['input']!r}: {said[0].lower()}{said[1:]}"
