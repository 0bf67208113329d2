"""Training whose run has the outcome of every example: loss, and whether the model is right."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from epsilons.examples import Examples
from epsilons.training.evaluation import CorrectFn, Outcomes, outcomes
from epsilons.training.private_training import PrivateTraining

AT_A_TIME = 256  # examples, where memory has room for as many in training


class EvaluatedTraining(PrivateTraining):
    """`PrivateTraining` that records the outcomes of all examples before the run is sealed."""

    correct_fn: CorrectFn | None = None
    test: Dataset[Any] | None = None
    test_examples: Examples | None = None

    def outcomes(self, data: Dataset[Any]) -> Outcomes:
        """Losses and correctness of every record of `data` now."""
        _, loss_fn, collate_fn = self._unit.given
        return outcomes(
            self._model, loss_fn, self.correct_fn, data, self._where, collate_fn,
            at_a_time=min(AT_A_TIME, self._unit.micro_batch or AT_A_TIME),
        )  # fmt: skip

    def _before_sealing(self) -> None:
        held_out = None
        if self.test is not None:
            names = self.test_examples or Examples.numbered(len(self.test))  # type: ignore[arg-type]
            held_out = names.with_outcomes(*self.outcomes(self.test))
        losses, correct = self._unit.outcomes(*self.outcomes(self._unit.given[0]))
        self.run.record_outcomes(losses, correct, held_out)
