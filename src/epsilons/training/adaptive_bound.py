"""A clip bound that adapts, in a loop: the bound of each step, and its move after some.

The journal is in units in which the bound stays where it began, so that norms and thresholds are
fractions of the bound of their step. Here they are turned into units of the gradient, and back.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from epsilons.accounting.plan import Phase
from epsilons.gradients.clip_factors import widest_dtype
from epsilons.journal import Journal
from epsilons.journal.run_entries import clip_bound, record_move

UNCLIPPED = "number of unclipped examples"  # beside the parameters in the sums of a step


class ClipBound:
    """The clip bound of the steps of a run, which the journal has."""

    def __init__(self, journal: Journal) -> None:
        self._journal, self._adaptive = journal, journal.plan.adaptive
        self._known = -1, self._journal.plan.max_grad_norm  # of the step that was asked for last

    def unit(self, step: int) -> float:
        """What the journal's unit is in units of the gradient at `step`; 1 for a fixed bound."""
        if self._adaptive is None:
            return 1.0
        before, bound = self._known
        if before == step - 1 and not self._adaptive.updates(before):
            self._known = step, bound
        elif before != step:
            self._known = step, clip_bound(self._journal, step)
        return self._known[1] / self._journal.plan.max_grad_norm

    def phase(self, step: int) -> Phase:
        """The phase of `step`, with its clip bound."""
        phase = self._journal.plan.phase(step)
        if self._adaptive is None:
            return phase
        return replace(phase, max_grad_norm=phase.max_grad_norm * self.unit(step))

    def move(self, step: int, released: dict[str, Tensor]) -> None:
        """Note what `step` has released of the number of unclipped examples, if it has."""
        phase = self._journal.plan.phase(step)
        if phase.unclipped_num_std is not None:
            scale = self.phase(step).noise_std / phase.unclipped_num_std / phase.batch_size
            record_move(self._journal, step, float(released[UNCLIPPED]) / scale)


def with_count(sums: dict[str, Tensor], norms: Tensor, phase: Phase) -> dict[str, Tensor]:
    """The sums of a step, and Σ(b − ½) of its examples where the phase has it released.

    b: whether an example's norm is at most the clip bound. In units in which the noise of the
    gradient is the count's: together they are one Gaussian release.
    """
    if phase.unclipped_num_std is None:
        return sums
    unclipped = (norms <= phase.max_grad_norm).to(widest_dtype(norms.device)) - 0.5
    return {**sums, UNCLIPPED: unclipped.sum() * (phase.noise_std / phase.unclipped_num_std)}
