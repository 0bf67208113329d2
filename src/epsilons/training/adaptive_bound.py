"""A clip bound that adapts, in a step: the count of unclipped examples, beside the gradient's sum.

The journal is in units in which the bound stays where it began, so that norms and thresholds are
fractions of the bound of their step.
"""

from __future__ import annotations

from torch import Tensor

from epsilons.accounting.plan import Phase, Plan
from epsilons.gradients.clip_factors import widest_dtype

UNCLIPPED = "number of unclipped examples"  # beside the parameters in the sums of a step


def journal_unit(plan: Plan, phase: Phase, step: int) -> float:
    """What the journal's unit is in units of the gradient at `step`; 1 for a bound that stays.

    `phase`: that of the step, with the clip bound that it has.
    """
    return phase.max_grad_norm / plan.phase(step).max_grad_norm


def with_count(sums: dict[str, Tensor], norms: Tensor, phase: Phase) -> dict[str, Tensor]:
    """The sums of a step, and Σ(b − ½) of its examples where the phase has it released.

    b: whether an example's norm is at most the clip bound. In units in which the noise of the
    gradient is the count's: together they are one Gaussian release.
    """
    if phase.unclipped_num_std is None:
        return sums
    unclipped = (norms <= phase.max_grad_norm).to(widest_dtype(norms.device)) - 0.5
    return {**sums, UNCLIPPED: unclipped.sum() * (phase.noise_std / phase.unclipped_num_std)}


def released_count(released: dict[str, Tensor], phase: Phase) -> float | None:
    """The noisy Σ(b − ½) in what a step of the phase has released; None if it has none."""
    if phase.unclipped_num_std is None:
        return None
    return float(released[UNCLIPPED]) / (
        phase.noise_std / phase.unclipped_num_std / phase.batch_size
    )
