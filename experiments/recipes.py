"""Recipe: everything that fixes a training, except what is drawn from the data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from epsilons import Plan

DELTA = 1e-5
METHOD = "rdp-classic"  # Mironov 2017, the paper's conversion


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training, repeated for each seed.

    `n`, `n_test`: so many of the training and of the held-out examples, None for all. `epsilon`:
    the worst case, None for a training without privacy. `bound`: the clip bound, None for `factor`
    times the private median of the norms at initialisation. The learning rate is `rate` divided by
    the clip bound, so that a bound does not change the length of a clipped step; of language models
    it is that of AdamW, which makes up for the bound itself. `follow`: so many random examples have
    their norms recorded at every step.
    """

    data: str
    network: str
    n: int | None = None
    n_test: int | None = None
    batch: float
    epochs: float
    epsilon: float | None
    bound: float | None = None
    factor: float = 1.0
    rate: float
    momentum: float = 0.0
    loss: str = "cross_entropy"
    clipping: str = "max"
    refreshes_per_epoch: float | None = 3.0
    refresh_every: int | None = None
    schedule: str = "uniform"
    rounding: str | None = "nearest"
    levels: int = 100
    follow: int = 0
    micro_batch: int | None = 512
    verified: bool = True
    seeds: tuple[int, ...] = (1,)

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with other values."""
        return dataclasses.replace(self, **changes)

    def plan(self, n: int, bound: float) -> Plan:
        """The plan for n examples and a clip bound; the worst case is met by the paper's method."""
        constants: dict[str, Any] = dict(
            n=n, batch_size=self.batch, epochs=self.epochs, max_grad_norm=bound, delta=DELTA,
            refreshes_per_epoch=self._refreshes_per_epoch, refresh_every=self.refresh_every,
            refresh_schedule=self.schedule, clipping=self.clipping,
            # thresholds of individual clipping are norms rounded up, whatever else is rounded
            rounding="up" if self.clipping == "individual" else self.rounding, levels=self.levels,
        )  # fmt: skip
        if self.epsilon is None:
            return Plan(noise_multiplier=0.0, **constants)
        return Plan.for_epsilon(self.epsilon, method=METHOD, **constants)

    @property
    def _refreshes_per_epoch(self) -> float | None:
        """None for `refresh_every`; without either there are no refreshes."""
        none = self.refreshes_per_epoch is None and self.refresh_every is None
        return 0 if none else self.refreshes_per_epoch

    def settings(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {**dataclasses.asdict(self), "seeds": list(self.seeds)}
