"""Plan: the public constants of one run, fixed before training and safe to publish.

The plan is the one truth: sampler, step, journal and accountant all read it, so that what is done
and what is charged can't disagree. Under Poisson sampling every example pays at every step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from epsilons.accounting.adaptive import AdaptiveClipping, count_charge, step_multiplier
from epsilons.accounting.calibrate import least_noise
from epsilons.accounting.composition import Releases
from epsilons.accounting.filters import (
    NO_TIGHT,
    Allowance,
    Steps,
    choose_order,
    gaussian_allowance,
    rdp_allowance,
)
from epsilons.accounting.individual import Method
from epsilons.accounting.promises import (
    Promise,
    composed,
    filtered_promise,
    scaled_promise,
)
from epsilons.accounting.results import Kind
from epsilons.accounting.sums import Sums, batch_cap

if TYPE_CHECKING:
    import dp_accounting

Clipping = Literal["max", "individual", "filtered", "none"]
Unit = Literal["record", "owner"]
Rounding = Literal["up", "nearest"]
Schedule = Literal["early", "uniform"]
NormStorage = Literal["float64", "uint16"]
# Half of what 16 bits can tell apart is kept for norms up to the clip bound, the levels among them.
MOST_LEVELS_UINT16 = 2**15
_ENDLESS = 2**62
_REFRESH_SHARE = 0.1  # of a run's time, by default
_A_BOUND = "a finite number > 0, from 1e-300 to 1e300"  # its levels are no zeros
_MOST_BUDGETS = 256
_PHASE_CONSTANTS = ("noise_multiplier", "max_grad_norm", "batch_size")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Steps `first` to before `end` of a run, which have one sample rate, noise and clip bound.

    Made by a `Plan`: `plan.phase(step)` and `plan.all_phases`. `noise_multiplier`: standard
    deviation of the noise over the clip bound `max_grad_norm`. `batch_size`: the expected one,
    n · `sample_rate`. `max_batch`: the most examples that a step takes. `sums`: the dtype of sums
    over examples.

    Where the clip bound adapts there are two phases at a time, of the steps that release a count of
    unclipped examples, every `update_every`, and of the others. `unclipped_num_std`: standard
    deviation of the noise on that count; None without one.
    """

    first: int
    end: int
    noise_multiplier: float
    max_grad_norm: float
    batch_size: float
    sample_rate: float
    max_batch: int
    sums: Sums
    update_every: int | None = None
    unclipped_num_std: float | None = None

    @property
    def beside(self) -> float:
        """How far one example moves the released count, in deviations of its noise; 0 without."""
        return 0.0 if self.unclipped_num_std is None else count_charge(self.unclipped_num_std)

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the clipped sum, in units of the gradient."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def step_multiplier(self) -> float:
        """The noise multiplier of gradient and count together."""
        return step_multiplier(self.noise_multiplier, self.beside)

    def count(self, first: int, end: int) -> int:
        """How many of the steps `first` to before `end` are of this phase."""
        first, end = max(first, self.first), min(end, self.end)
        if self.update_every is None or end <= first:
            return max(0, end - first)
        updates = end // self.update_every - first // self.update_every
        return updates if self.beside else end - first - updates


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything about a run that does not depend on data.

    `n`: how many training examples there are; it is public. `noise_multiplier`: standard deviation
    of the noise over the clip bound `max_grad_norm`, to which per-example gradients are clipped;
    the product of the two is `noise_std`. `delta`: δ of the guarantee, in (0, 1).

    Give `batch_size` (the expected one) or `sample_rate`; `steps` or `epochs`; and how often the
    norms of all examples are refreshed, by `refreshes_per_epoch` (γ in the paper) or by
    `refresh_every` (K). With `refreshes_per_epoch=0` every example is charged at the clip bound.
    Neither steps nor epochs: a loop of unknown length, which needs `refresh_every`, and
    `worst_case(steps=…)`. What was left out is filled in:

        sample_rate = batch_size / n          steps = ⌊epochs · n / batch_size⌋
        refreshes_per_epoch = max(1, ⌊epochs / 9⌋) / epochs          (common clipping alone)

    So refreshes take 10 % of a run's time at most, if it has nine epochs or more (`refresh_share`).

    `refresh_schedule`: where `refreshes_per_epoch` puts the refreshes (`refresh_steps`): `"early"`
    or `"uniform"`. `rounding`: norms between two levels are interpolated (None, the default), or go
    `"up"` or to the `"nearest"`, as in the paper; `levels`: how many levels there are, by default
    256 (see `individual_epsilons`).

    `phases` changes noise, bound or batch size at given steps:
    `((first_step, {"noise_multiplier": …, "max_grad_norm": …, "batch_size": …}), …)`; what a phase
    does not name is as before it.

    `clipping` is `"max"` (Algorithm 1: everyone to `max_grad_norm`) or `"individual"`
    (Algorithm 3: each example to its own threshold, a level, rounded up); or `"filtered"` (to what
    it can still pay for of its budget); or `"none"`, with `noise_multiplier=0`: plain training on
    Poisson batches, which is not private at all.

    `budgets`: the ε's that people may choose from, one of which each example has
    (`Examples(budgets=…)`; with one budget everyone has it). To everyone with ε_i this promises
    (ε_i, `delta`)-DP before training (`promises`). With `clipping="max"` or `"individual"` their
    gradients are clipped to a share of `max_grad_norm` (Scale). With `"filtered"` bounds adapt to
    norms and to what is left: `pace` 0, the default, lets budgets be spent in proportion to the
    steps, 1 at any time (Feldman & Zrnic); a bound covers `slack` times the norm; `order` is the
    Rényi order, by default the one that lasts longest. `reserve_mu` and `reserve_distance`: what
    is set aside for publications (`release.Cost`); promises include it, and no more is published.

    `sums`: the dtype in which gradients are summed over examples. `"float64"`, the default, has a
    proof that rounding adds no more to an example's influence than is charged (`docs/sums.md`);
    `"float32"` is faster, and floating-point effects of the sum are not covered.

    `unit`: what n counts, one coin draws and one bound clips. `"record"`, the default, or
    `"owner"`: a person with all their records, whose gradients are added up and clipped as one.
    Then n counts owners, `batch_size` is the expected number of owners, and the worst case and
    every individual ε are per person.

    `norm_storage`: how the journal keeps the norms of refreshes: `"float64"`, the default, or
    `"uint16"`, rounded up to 2⁻¹⁵ of the clip bound, in a quarter of the space. ε's are then higher
    by about as little, and never lower; thresholds of individual clipping are the same.

    `max_records_per_owner`: how many records one person may have, decided without looking at the
    data, as everything here; data in which someone has more is refused. With `unit="record"` it
    says nothing about the `worst_case`, which is per record, and makes one per person possible;
    None: nothing is known. With `unit="owner"` it must be given: all passes have room for so many.

    `max_grad_norm="adaptive"`: the bound follows a quantile of the norms, as `adaptive` says, an
    `AdaptiveClipping` or its fields. The noise stays in proportion to it. `max_grad_norm` is the
    first bound then, and norms, thresholds and noise of journals are in units in which the bound
    stays there.

    `clip_bound_mu` and `clip_bound_distance`: what it cost to choose `max_grad_norm` by looking at
    the data (`ClipBound.cost.releases`); 0, the default, if it was chosen without. It is part of
    the worst case and of every individual ε.

    ValueError for values out of range and for two that disagree.

    >>> plan = Plan(n=60_000, batch_size=1024, epochs=100, noise_multiplier=2.50631,
    ...             max_grad_norm=1.0, delta=1e-5, refreshes_per_epoch=3)
    >>> plan.steps, round(plan.worst_case(), 4), round(plan.worst_case("rdp"), 3), plan.kind
    (5859, 2.2064, 2.4, 'estimate')
    """

    n: int
    noise_multiplier: float
    max_grad_norm: float
    batch_size: float = None  # type: ignore[assignment]  # filled from sample_rate
    sample_rate: float = None  # type: ignore[assignment]  # filled from batch_size
    steps: int = None  # type: ignore[assignment]  # filled from epochs; None: unknown length
    epochs: float = None  # type: ignore[assignment]  # filled from steps
    delta: float
    refreshes_per_epoch: float | None = None
    refresh_every: int | None = None
    refresh_schedule: Schedule = "early"
    clipping: Clipping = "max"
    rounding: Rounding | None = None
    levels: int = 256
    phases: tuple[tuple[int, Mapping[str, float]], ...] = ()
    sums: Sums = "float64"
    norm_storage: NormStorage = "float64"
    max_records_per_owner: int | None = None
    clip_bound_mu: float = 0.0
    clip_bound_distance: float = 0.0
    unit: Unit = "record"
    budgets: tuple[float, ...] = ()
    pace: float = 0.0
    slack: float = 1.0
    order: float | None = None
    reserve_mu: float = 0.0
    reserve_distance: float = 0.0
    adaptive: AdaptiveClipping | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, _plain(value))  # numpy's numbers are no JSON
        self._fill_adaptive()
        _check(_whole(self.n) and self.n >= 1, "n", self.n, "a whole number of examples ≥ 1")
        _check(_bound(self.max_grad_norm), "max_grad_norm", self.max_grad_norm, _A_BOUND)
        if self.clipping == "none":
            _check(self.noise_multiplier == 0, "noise_multiplier", self.noise_multiplier,
                   "0 with clipping='none', since noise hides no gradient of any size")  # fmt: skip
            _check(not self.phases, "phases", self.phases, "none with clipping='none'")
        else:
            _check(_positive(self.noise_multiplier), "noise_multiplier", self.noise_multiplier,
                   "a finite number > 0; not private at all is clipping='none'")  # fmt: skip
        _check(_positive(self.delta) and self.delta < 1, "delta", self.delta, "a number in (0, 1)")
        _check(self.clipping in ("max", "individual", "filtered", "none"), "clipping",
               self.clipping, "'max', 'individual', 'filtered' or 'none'")  # fmt: skip
        _check(self.rounding in (None, "up", "nearest"), "rounding", self.rounding,
               "None, 'up' or 'nearest'")  # fmt: skip
        _check(_whole(self.levels) and self.levels >= 1, "levels", self.levels,
               "a whole number ≥ 1")  # fmt: skip
        _check(self.sums in ("float64", "float32"), "sums", self.sums, "'float64' or 'float32'")
        _check(self.norm_storage in ("float64", "uint16"), "norm_storage", self.norm_storage,
               "'float64' or 'uint16'")  # fmt: skip
        if self.norm_storage == "uint16":
            _check(self.levels <= MOST_LEVELS_UINT16, "levels", self.levels,
                   f"at most {MOST_LEVELS_UINT16} with norm_storage='uint16'")  # fmt: skip
        most = self.max_records_per_owner
        _check(most is None or (_whole(most) and most >= 1), "max_records_per_owner", most,
               "a whole number ≥ 1, or None")  # fmt: skip
        _check(self.unit in ("record", "owner"), "unit", self.unit, "'record' or 'owner'")
        _check(self.unit == "record" or most is not None, "max_records_per_owner", most,
               "with unit='owner', the most records that anyone may have: all passes have room "
               "for so many")  # fmt: skip
        for name in ("clip_bound_mu", "clip_bound_distance", "reserve_mu", "reserve_distance"):
            value = getattr(self, name)
            _check(_finite(value) and value >= 0, name, value, "a finite number ≥ 0")
        self._fill_sampling()
        self._fill_length()
        self._fill_refreshes()
        self._check_refreshes()
        self._check_phases()
        self._check_budgets()

    def _fill_adaptive(self) -> None:
        if isinstance(self.adaptive, Mapping):
            object.__setattr__(self, "adaptive", AdaptiveClipping(**self.adaptive))
        given: object = self.max_grad_norm
        if self.adaptive is None:
            _check(given != "adaptive", "max_grad_norm", given,
                   "beside it adaptive=AdaptiveClipping(…): how the bound moves")  # fmt: skip
            return
        first = self.adaptive.initial_clipbound
        _check(given in ("adaptive", first), "max_grad_norm", given,
               f"'adaptive', or the initial_clipbound of adaptive, {first}")  # fmt: skip
        object.__setattr__(self, "max_grad_norm", first)
        _check(self.clipping != "none", "clipping", self.clipping,
               "'max' or 'individual' with a bound that adapts")  # fmt: skip

    def _fill_sampling(self) -> None:
        if self.batch_size is None and self.sample_rate is None:
            raise ValueError("a plan needs batch_size (the expected one) or sample_rate")
        if self.sample_rate is None:
            _check(_positive(self.batch_size), "batch_size", self.batch_size, "a number > 0")
            if self.batch_size > self.n:
                raise ValueError(
                    f"batch_size={self.batch_size} exceeds n={self.n}; "
                    "the expected batch can't be larger than the data set"
                )
            object.__setattr__(self, "sample_rate", self.batch_size / self.n)
        elif self.batch_size is None:
            if not (_positive(self.sample_rate) and self.sample_rate <= 1):
                raise ValueError(
                    f"sample_rate={self.sample_rate} is not a probability; expected (0, 1]. "
                    "Did you pass a batch size? Use batch_size."
                )
            object.__setattr__(self, "batch_size", self.sample_rate * self.n)
        elif self.batch_size / self.n != self.sample_rate and (
            self.batch_size != self.sample_rate * self.n
        ):
            raise ValueError(
                f"batch_size={self.batch_size} of n={self.n} is a rate of "
                f"{self.batch_size / self.n}, not sample_rate={self.sample_rate}; give one of them"
            )

    def _fill_refreshes(self) -> None:
        if self.refreshes_per_epoch is not None or self.refresh_every is not None or self.endless:
            return
        per_epoch = 0.0
        if self.clipping == "max" and self.steps:
            times = max(1, int(self.epochs * _REFRESH_SHARE / (1 - _REFRESH_SHARE) + 1e-9))
            per_epoch = times / self.epochs
        object.__setattr__(self, "refreshes_per_epoch", per_epoch)

    def _fill_length(self) -> None:
        if self.steps is None and self.epochs is None:
            if self.refresh_every is None or self.phases:
                raise ValueError(
                    "a plan needs steps or epochs; for a loop of unknown length give refresh_every"
                )
        elif self.steps is None:
            _check(_finite(self.epochs) and self.epochs >= 0, "epochs", self.epochs, "≥ 0")
            object.__setattr__(self, "steps", int(self.epochs * self.n // self.batch_size))
        elif self.epochs is None:
            _check(_whole(self.steps) and self.steps >= 0, "steps", self.steps,
                   "a whole number ≥ 0")  # fmt: skip
            object.__setattr__(self, "epochs", self.steps * self.sample_rate)
        elif self.steps not in (
            int(self.epochs * self.n // self.batch_size),
            round(self.epochs / self.sample_rate),
        ):
            raise ValueError(
                f"steps={self.steps} and epochs={self.epochs} disagree; give one of them"
            )

    def _check_refreshes(self) -> None:
        if self.refresh_every is not None and self.refreshes_per_epoch is not None:
            raise ValueError(
                f"refresh_every={self.refresh_every} and "
                f"refreshes_per_epoch={self.refreshes_per_epoch} both given; give one of them"
            )
        if self.refresh_every is not None:
            _check(_whole(self.refresh_every) and self.refresh_every >= 1,
                   "refresh_every", self.refresh_every, "a whole number of steps ≥ 1")  # fmt: skip
        if self.refreshes_per_epoch is not None:
            _check(_finite(self.refreshes_per_epoch) and self.refreshes_per_epoch >= 0,
                   "refreshes_per_epoch", self.refreshes_per_epoch, "a number ≥ 0")  # fmt: skip
        _check(self.refresh_schedule in ("early", "uniform"), "refresh_schedule",
               self.refresh_schedule, "'early' or 'uniform'")  # fmt: skip
        adapts = self.clipping in ("individual", "filtered")
        if adapts and not self.refresh_due(0) and self.steps != 0:
            raise ValueError(
                f"clipping={self.clipping!r} takes its thresholds from refreshed norms; "
                "give refreshes_per_epoch or refresh_every"
            )

    def _check_phases(self) -> None:
        try:
            phases = tuple((_plain(first), _plain_values(c)) for first, c in self.phases)
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"phases={self.phases!r}; expected pairs of a first step and what changes, "
                "e.g. ((100, {'noise_multiplier': 2.0}),)"
            ) from None
        object.__setattr__(self, "phases", phases)
        last = 0
        for first, changes in phases:
            _check(_whole(first) and last < first, "first step of a phase", first,
                   f"a step after {last}")  # fmt: skip
            _check(first < self.steps, "first step of a phase", first,
                   f"a step of the plan, which has {self.steps}")  # fmt: skip
            last = first
            for name, value in changes.items():
                if name not in _PHASE_CONSTANTS:
                    raise ValueError(
                        f"a phase can't change {name!r}; expected {', '.join(_PHASE_CONSTANTS)}"
                    )
                if name == "max_grad_norm":
                    _check(self.adaptive is None, "max_grad_norm of a phase", value,
                           "none where the bound adapts")  # fmt: skip
                    _check(_bound(value), name, value, _A_BOUND)
                _check(_positive(value), name, value, "a finite number > 0")
            if changes.get("batch_size", 0) > self.n:
                raise ValueError(f"batch_size={changes['batch_size']} exceeds n={self.n}")

    def _check_budgets(self) -> None:
        given = self.budgets
        budgets = tuple(map(_plain, given)) if isinstance(given, Sequence | np.ndarray) else (None,)
        if isinstance(given, str) or not all(map(_positive, budgets)):
            raise ValueError(f"budgets={given!r}; expected finite ε's > 0, e.g. (1, 2, 4)")
        if len(set(budgets)) != len(budgets) or len(budgets) > _MOST_BUDGETS:
            raise ValueError(f"budgets={given!r}; expected at most {_MOST_BUDGETS}, all different")
        object.__setattr__(self, "budgets", tuple(sorted(map(float, budgets))))
        _check(_finite(self.pace) and 0 <= self.pace <= 1, "pace", self.pace, "a number in [0, 1]")
        _check(_positive(self.slack), "slack", self.slack, "a finite number > 0")
        _check(self.order is None or (_finite(self.order) and self.order > 1), "order", self.order,
               "a Rényi order > 1, or None")  # fmt: skip
        if self.clipping != "filtered":
            for name, default in (("pace", 0.0), ("slack", 1.0), ("order", None)):
                _check(getattr(self, name) == default, name, getattr(self, name),
                       f"none with clipping={self.clipping!r}: it is of 'filtered'")  # fmt: skip
        if not budgets:
            _check(self.clipping != "filtered", "clipping", self.clipping,
                   "budgets with it, e.g. budgets=(1, 2, 4)")  # fmt: skip
            _check(not (self.reserve_mu or self.reserve_distance), "reserve_mu", self.reserve_mu,
                   "0 without budgets: it is a part of what is promised")  # fmt: skip
            return
        _check(self.clipping != "none", "budgets", given, "none with clipping='none'")
        _check(self.adaptive is None, "budgets", given,
               "none with adaptive: they are promised shares of a bound that stays")  # fmt: skip
        if self.clipping == "filtered":
            _check(self.rounding != "nearest", "rounding", self.rounding,
                   "None or 'up': a filter charges the levels that it clips to")  # fmt: skip
            if self.endless and (self.pace != 1 or (self.order is None and self.sample_rate < 1)):
                raise ValueError(
                    "a filter of unknown length needs pace=1 and its Rényi order, e.g. order=8"
                )
        elif self.endless:
            raise ValueError(
                "budgets need steps or epochs: shares of the clip bound depend on the length. "
                "For a loop of unknown length use clipping='filtered'"
            )

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the clipped sum, in units of the gradient."""
        return self.noise_multiplier * self.max_grad_norm

    @property
    def per(self) -> Literal["record", "person"]:
        """Whom each ε is about: the neighbours differ by one record, or by all of one person."""
        return "person" if self.unit == "owner" else "record"

    @property
    def records_at_once(self) -> int:
        """How many records one example of the run may have: 1, or those of an owner."""
        return (self.max_records_per_owner or 1) if self.unit == "owner" else 1

    @property
    def max_batch(self) -> int:
        """The most examples that one step takes, in any phase."""
        return max(phase.max_batch for phase in self.all_phases)

    @property
    def clip_bound(self) -> Releases:
        """What choosing the clip bound has let out; nothing if it was not taken from the data."""
        return Releases(self.clip_bound_mu, self.clip_bound_distance)

    @property
    def releases(self) -> Releases:
        """What is paid beside the training whatever it does: clip bound, and reserve."""
        return self.clip_bound + Releases(self.reserve_mu, self.reserve_distance)

    @cached_property
    def promises(self) -> tuple[Promise, ...]:
        """What each of the `budgets` is promised before training, in their order; public.

        ValueError for a budget that can't be promised: clip bound and reserve cost it all, or no
        Rényi order leaves anything.
        """
        steps = self.promised_steps
        if self.clipping != "filtered":
            return tuple(
                scaled_promise(budget, self.delta, steps, self.releases) for budget in self.budgets
            )
        return tuple(
            filtered_promise(budget, self.delta, self._allowance(budget), steps, self.releases)
            for budget in self.budgets
        )

    @property
    def promised_steps(self) -> tuple[Steps, ...]:
        """What promises and prices take of each of the `all_phases`."""
        return tuple(
            Steps(
                count=None if self.endless else phase.count(0, self.steps),
                sample_rate=phase.sample_rate,
                noise_multiplier=phase.step_multiplier,
            )
            for phase in self.all_phases
        )

    def _allowance(self, budget: float) -> Allowance:
        steps, order = self.promised_steps, self.order
        if order is None and all(one.sample_rate == 1 for one in steps):
            return gaussian_allowance(budget, self.delta, self.releases)
        if order is None:
            order = choose_order(budget, self.delta, steps, self.releases)
        return rdp_allowance(budget, self.delta, order, self.releases)

    @property
    def largest_share(self) -> float:
        """The largest share of the clip bound that anyone is clipped to: 1, or less with Scale."""
        if not self.budgets or self.clipping == "filtered":
            return 1.0
        return max(promise.share or 0.0 for promise in self.promises)

    @cached_property
    def all_phases(self) -> tuple[Phase, ...]:
        """The phases of the run, first to last, from step 0 on; one if `phases` is empty."""
        now = {name: getattr(self, name) for name in _PHASE_CONSTANTS}
        found = []
        ends = [*(first for first, _ in self.phases), _ENDLESS if self.endless else self.steps]
        for first, end, changes in zip(
            [0, *ends[:-1]], ends, [{}, *(c for _, c in self.phases)], strict=True
        ):
            now |= changes
            # the exact rate of the plan, even where batch_size was computed from it
            same = now["batch_size"] == self.batch_size
            rate = self.sample_rate if same else now["batch_size"] / self.n
            constants = dict(now, sample_rate=rate, max_batch=batch_cap(self.n, rate))
            phase = Phase(first=first, end=max(first, end), sums=self.sums, **constants)
            if self.adaptive is not None:
                phase = dataclasses.replace(phase, update_every=self.adaptive.update_every)
                noise = self.adaptive.unclipped_num_std
                found.append(dataclasses.replace(phase, unclipped_num_std=noise))
            found.append(phase)
        return tuple(found)

    def phase(self, step: int) -> Phase:
        """The phase that `step`, counted from 0, belongs to."""
        return next(
            phase
            for phase in reversed(self.all_phases)
            if phase.first <= step and bool(phase.beside) == self._counts(step)
        )

    def _counts(self, step: int) -> bool:
        """Whether `step` releases a count of unclipped examples."""
        return self.adaptive is not None and self.adaptive.updates(step)

    @cached_property
    def refresh_steps(self) -> tuple[int, ...]:
        """Steps before which the norms of all examples are computed anew, ascending from 0.

        `"uniform"` spaces m = ⌈γ · epochs⌉ refreshes evenly (the paper's); `"early"` puts them at
        t_j = max(t_{j−1} + 1, ⌊T (j/m)²⌋), where norms move fastest.
        """
        if self.endless:
            raise ValueError("a plan of unknown length has no last refresh; ask refresh_due(step)")
        if self.refresh_every is not None:
            return tuple(range(0, self.steps, self.refresh_every))
        if not self.refreshes_per_epoch or self.steps == 0:
            return ()
        m = min(self.steps, math.ceil(self.refreshes_per_epoch * self.epochs - 1e-9))
        chosen = [0]
        for j in range(1, m):
            if self.refresh_schedule == "uniform":
                step = j * self.steps // m
            else:
                step = max(chosen[-1] + 1, self.steps * j * j // (m * m))
            chosen.append(step)
        return tuple(chosen)

    @property
    def refresh_share(self) -> float:
        """The share of the run's time that refreshes take, at most.

        A pass that computes the norms of all examples counts as an epoch of private steps, and
        takes less: two fifths to all but a twentieth of it, for the networks that were measured.
        """
        refreshes = len(self.refresh_steps)
        return refreshes / (refreshes + self.epochs) if refreshes else 0.0

    @property
    def endless(self) -> bool:
        """Whether the length of the run is unknown."""
        return self.steps is None

    def refresh_due(self, step: int) -> bool:
        """Whether the norms of all examples are to be computed before `step`."""
        if self.refresh_every is not None:
            return step % self.refresh_every == 0
        return step in self._refresh_set

    @cached_property
    def _refresh_set(self) -> frozenset[int]:
        return frozenset(self.refresh_steps)

    @property
    def kind(self) -> Kind:
        """What an individual ε of this run is worth: `exact`, `bound` or `estimate`."""
        if self.clipping == "none":
            return "none"
        if self.clipping in ("individual", "filtered"):
            return "exact"
        if self.refresh_every is None and not self.refreshes_per_epoch:
            return "bound"
        every_step = self.refresh_every == 1 or (
            not self.endless and len(self.refresh_steps) == self.steps
        )
        if every_step and self.rounding is None:
            return "exact"
        return "bound" if every_step and self.rounding == "up" else "estimate"

    def worst_case(
        self,
        method: Method = "tight",
        *,
        steps: int | Sequence[int] | None = None,
        delta: float | None = None,
        releases: Releases | None = None,
    ) -> float:
        """ε of clip bound and training for an example at `max_grad_norm` in every step.

        This is the run's DP guarantee. With `budgets` it is the largest promise: with Scale of an
        example at the largest share of the bound; a filter's, which covers the whole run, after any
        number of steps and by any `method`. `steps` asks for it after so many steps instead of all
        of them; a number for each of the `all_phases` also counts those that were taken again
        (`Journal.charged`). `method`: the accountant, `"tight"` (the default), `"rdp"` or
        `"rdp-classic"`. `delta`: by default the plan's. `releases`: everything let out beside the
        training; by default clip bound and reserve, with `NOTHING` the training alone. ∞ where
        nothing is private; ValueError for a plan of unknown length, unless `steps` are given.
        """
        if self.clipping == "none":
            return math.inf
        at, beside = self.delta if delta is None else delta, releases
        if beside is None:
            beside = self.releases
        if self.clipping == "filtered" and (steps is None or np.any(steps)):
            return max(promise.at(at, releases=beside) for promise in self.promises)
        if steps is None and self.endless:
            raise ValueError("a plan of unknown length has a worst case only after given steps")
        taken = self.steps if steps is None else steps
        if isinstance(taken, int | np.integer):
            taken = [p.count(0, int(taken)) for p in self.all_phases]
        counted = [
            dataclasses.replace(one, count=int(count))
            for one, count in zip(self.promised_steps, taken, strict=True)
        ]
        return composed(counted, self.largest_share, at, method, beside)

    @classmethod
    def for_epsilon(cls, epsilon: float, *, method: Method = "tight", **constants: Any) -> Self:
        """The plan with the least noise whose worst case meets `epsilon`, never above it.

        The target is for clip bound and training together, by the accountant `method`: `"tight"`
        (the default), `"rdp"` or `"rdp-classic"`. `constants`: everything else that `Plan` takes,
        but `noise_multiplier` and `phases`. ValueError if no noise meets it.

        >>> plan = Plan.for_epsilon(4.0, delta=1e-4, n=1500, batch_size=300, epochs=20,
        ...                         max_grad_norm=1.0)
        >>> 3.99 < plan.worst_case() <= 4.0
        True
        """
        if constants.get("clipping") == "none":
            raise ValueError("clipping='none' is not private and meets no target")
        if len(constants.get("budgets", ())):
            raise ValueError(
                "the worst case of a plan with budgets is its largest promise; "
                "Plan.for_budgets finds the noise for them"
            )
        if "noise_multiplier" in constants:
            raise TypeError("for_epsilon finds noise_multiplier; use Plan(...) to give it")
        draft = cls(noise_multiplier=1.0, **constants)
        draft._expect_one_length("for_epsilon")
        noise = least_noise(
            epsilon,
            sample_rate=draft.sample_rate,
            steps=draft.steps,
            delta=draft.delta,
            method=method,
            releases=draft.releases,
            counts=sum(p.count(0, draft.steps) for p in draft.all_phases if p.beside),
            beside=max(p.beside for p in draft.all_phases),
        )
        return dataclasses.replace(draft, noise_multiplier=noise) if noise else draft

    @classmethod
    def for_budgets(
        cls, budgets: Sequence[float], *, method: Method | None = None, **constants: Any
    ) -> Self:
        """The plan with the least noise that keeps the largest of `budgets` at the full clip bound.

        Who has a smaller one is clipped to a share of it (Scale), or to what they can pay for
        (`clipping="filtered"`; there the least noise is that with which the clip bound lasts for
        all steps: half of it allows norms up to twice the paced bound). `method`: None, the tight
        accountant for Scale and the one Rényi order for a filter; any other raises ValueError, for
        a filter with the reason. `constants`: everything else that `Plan` takes, but
        `noise_multiplier` and `phases`. ValueError if a budget can't be promised.

        >>> plan = Plan.for_budgets((1, 2, 4), delta=1e-5, n=10_000, batch_size=500, steps=500,
        ...                         max_grad_norm=1.0)
        >>> [round(promise.share, 4) for promise in plan.promises]
        [0.3363, 0.6017, 1.0]
        """
        filtered = constants.get("clipping") == "filtered"
        if filtered and method == "tight":
            raise ValueError(f"method='tight': {NO_TIGHT}")
        if method not in (None, "tight"):
            raise ValueError(
                f"method={method!r}; promises have the method of their kind: tight for Scale, one "
                "Rényi order for a filter. Leave it out"
            )
        if "noise_multiplier" in constants:
            raise TypeError("for_budgets finds noise_multiplier; use Plan(budgets=…) to give it")
        draft = cls(noise_multiplier=1.0, budgets=tuple(budgets), **constants)
        _check(bool(draft.budgets), "budgets", budgets, "one or more ε's, e.g. (1, 2, 4)")
        draft._expect_one_length("for_budgets")
        most = draft.budgets[-1]
        if filtered:
            noise = 1 / draft._allowance(most).share(draft.promised_steps) * (1 + 2**-50)
        else:
            noise = least_noise(
                most,
                sample_rate=draft.sample_rate,
                steps=draft.steps,
                delta=draft.delta,
                releases=draft.releases,
            )
        plan = dataclasses.replace(draft, noise_multiplier=noise) if noise else draft
        return plan if plan.promises else draft  # a budget that can't be promised raises

    def _expect_one_length(self, who: str) -> None:
        if self.endless:
            raise ValueError(f"{who} needs steps or epochs: noise depends on the length")
        if self.phases:
            raise ValueError(
                f"{who} finds one noise for the whole run; "
                "with phases, give noise_multiplier and look at worst_case()"
            )

    def dp_event(self) -> dp_accounting.DpEvent:
        """The run as a `DpEvent` of Google's dp-accounting, for the accountants there.

        Per phase a `SelfComposedDpEvent` of as many `PoissonSampledDpEvent`s of a
        `GaussianDpEvent`; phases, and the release that `clip_bound` was, in a `ComposedDpEvent`.
        With `budgets`, of an example with the largest share; ValueError for a filter.
        Its accountants must take neighbours that differ by adding or removing one record
        (`NeighboringRelation.ADD_OR_REMOVE_ONE`, their default), which is what all ε's here are
        about. Noise is taken as exactly Gaussian and batches as unlimited; `worst_case` sets a
        little of δ aside for both, and so may be higher in the last digits.

        ValueError for a plan of unknown length; ImportError if dp-accounting is not installed.
        """
        try:
            import dp_accounting as dp
        except ImportError as missing:
            raise ImportError("a DpEvent needs dp-accounting: pip install dp-accounting") from (
                missing
            )
        if self.endless:
            raise ValueError("a plan of unknown length is no event; give steps or epochs")
        if self.clipping == "none":
            return dp.NonPrivateDpEvent()
        if self.clipping == "filtered":
            raise ValueError(f"a filter is no event of fixed steps; {NO_TIGHT}")
        events = [
            dp.SelfComposedDpEvent(
                dp.PoissonSampledDpEvent(
                    phase.sample_rate,
                    dp.GaussianDpEvent(phase.step_multiplier / self.largest_share),
                ),
                phase.count(0, self.steps),
            )
            for phase in self.all_phases
            if phase.count(0, self.steps)
        ]
        if self.releases.mu:
            events.append(dp.GaussianDpEvent(1 / self.releases.mu))
        return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; `Plan.from_dict` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """The plan whose `to_dict` gave `fields`, with what `json` makes of tuples."""
        phases = tuple((first, changes) for first, changes in fields.get("phases", ()))
        # a plan from before there was a choice
        known = {"sums": "float32", **fields, "phases": phases}
        if known.get("refresh_every") is None and known.get("refreshes_per_epoch") is None:
            known["refreshes_per_epoch"] = 0  # what is left out is no default of a written plan
        return cls(**known)


def _check(claim: bool, name: str, value: object, expected: str) -> None:
    if not claim:
        raise ValueError(f"{name}={value!r}; expected {expected}")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _plain_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in changes.items()}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: object) -> bool:
    return _finite(value) and value > 0  # type: ignore[operator]


def _bound(value: object) -> bool:
    return _positive(value) and 1e-300 <= value <= 1e300  # type: ignore[operator]
