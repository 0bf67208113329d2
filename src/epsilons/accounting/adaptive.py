"""A clip bound that follows a quantile of the gradient norms, and what it costs.

Every so many steps the number of drawn examples that were not clipped is released with noise, and
the bound C_t moves (Andrew, Thakkar, McMahan & Ramaswamy 2021). Gradient and count share a coin, so
together they are one sampled-Gaussian step: an example whose clipped gradient is z moves them by

    s² = (z/σ_t)² + 1/(2σ_b)²,      σ_t = noise multiplier · C_t,  σ_b = `unclipped_num_std`

standard deviations, since Σ(b − ½) over drawn examples moves by ½. Noise and thresholds are in
proportion to C_t, so that s does not depend on the course of C_t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from epsilons.accounting import checks

_MOST_LOG = 700.0  # e to this is finite


@dataclass(frozen=True, kw_only=True)
class AdaptiveClipping:
    """How a clip bound moves: constants of a plan, by the names of Opacus.

        C ← C · exp(−η·(f − γ)), kept between the least and the most bound

    f: the share of unclipped examples as released; γ `target_unclipped_quantile`, in (0, 1), by
    default 0.5; η `clipbound_learning_rate`, > 0, by default 0.2. `initial_clipbound`: C of the
    first steps. `min_clipbound` and `max_clipbound`: by default 1e-4 and 1e4. `unclipped_num_std`:
    σ_b, the standard deviation of the noise on the count, in examples. `update_every`: the bound
    moves after so many steps, by default 32. ValueError for values out of range.

    >>> adaptive = AdaptiveClipping(initial_clipbound=1.0, unclipped_num_std=10.0)
    >>> round(adaptive.next_bound(1.0, released=50.0, batch_size=100.0), 4)
    0.9048
    """

    initial_clipbound: float
    unclipped_num_std: float
    target_unclipped_quantile: float = 0.5
    clipbound_learning_rate: float = 0.2
    min_clipbound: float = 1e-4
    max_clipbound: float = 1e4
    update_every: int = 32

    def __post_init__(self) -> None:
        checks.open_unit("target_unclipped_quantile", self.target_unclipped_quantile)
        for name in ("clipbound_learning_rate", "unclipped_num_std", "min_clipbound"):
            checks.positive(name, getattr(self, name))
        checks.whole("update_every", self.update_every, least=1)
        low, high = self.min_clipbound, self.max_clipbound
        if not low < high < math.inf:
            raise ValueError(f"max_clipbound={high}; expected more than min_clipbound={low}")
        if not low <= self.initial_clipbound <= high:
            raise ValueError(
                f"initial_clipbound={self.initial_clipbound}; expected min_clipbound={low} to "
                f"max_clipbound={high}"
            )

    @property
    def beside(self) -> float:
        """How far one example moves the released count, in standard deviations of its noise."""
        return count_charge(self.unclipped_num_std)

    def updates(self, step: int) -> bool:
        """Whether the count of `step` is released, and the bound moves after it."""
        return (step + 1) % self.update_every == 0

    def next_bound(self, bound: float, released: float, batch_size: float) -> float:
        """The bound after `bound`: `released` is the noisy Σ(b − ½), `batch_size` the expected."""
        unclipped = released / batch_size + 0.5
        move = self.clipbound_learning_rate * (self.target_unclipped_quantile - unclipped)
        moved = bound * math.exp(min(move, _MOST_LOG))
        return min(max(moved, self.min_clipbound), self.max_clipbound)


def count_charge(unclipped_num_std: float) -> float:
    """By how many standard deviations of its noise one example moves a released count Σ(b − ½).

        1/(2σ_b) + 2⁻³¹

    `unclipped_num_std`: σ_b. The second term covers the noise's grid, which is at most 2⁻³² of it.
    """
    return 1 / (2 * unclipped_num_std) + 2.0**-31


def step_multiplier(noise_multiplier: float, beside: float) -> float:
    """The noise multiplier of a step that releases a count beside its gradient.

        (z⁻² + beside²)^(−½)

    `noise_multiplier`: z of the gradient; `beside`: how far an example moves the count, in standard
    deviations of its noise; 0 without a count.

    >>> step_multiplier(1.0, 0.0), round(step_multiplier(1.25, 0.6), 6)
    (1.0, 1.0)
    """
    return noise_multiplier if beside == 0 else 1 / math.hypot(1 / noise_multiplier, beside)


def gradient_multiplier(noise_multiplier: float, unclipped_num_std: float) -> float:
    """The gradient's noise multiplier of a step that costs as much as one with `noise_multiplier`.

        (z⁻² − (2σ_b)⁻²)^(−½)          (Andrew et al. 2021, Theorem 1; Opacus 1.6)

    `unclipped_num_std`: σ_b. ValueError unless the count leaves something for the gradient.

    >>> round(gradient_multiplier(1.0, unclipped_num_std=5.0), 6)
    1.005038
    """
    z = float(checks.positive("noise_multiplier", noise_multiplier))
    deviation = float(checks.positive("unclipped_num_std", unclipped_num_std))
    if z >= 2 * deviation:
        raise ValueError(
            f"noise_multiplier={z:g}; expected less than 2 · unclipped_num_std = {2 * deviation:g},"
            " else the count alone costs more"
        )
    return float((z**-2 - (2 * deviation) ** -2) ** -0.5)
