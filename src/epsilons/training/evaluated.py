"""Training whose run has the outcome of every example: loss, and whether the model is right."""

from __future__ import annotations

from typing import Any

import numpy as np
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
        """Losses and correctness of every record of `data` now.

        To be called on all ranks: each goes through its share, and rank 0 has them all.
        """
        ranks, n = self._ranks, len(data)  # type: ignore[arg-type]
        shards = self._shards if n == self._plan.n else self._shards.of(n)
        _, loss_fn, collate_fn = self._unit.given
        at_a_time = min(AT_A_TIME, self._unit.micro_batch or AT_A_TIME)

        def evaluated(shard: tuple[int, int, int]) -> Outcomes:
            return outcomes(
                self._model, loss_fn, self.correct_fn, data, self._where, collate_fn,
                at_a_time=at_a_time, part=shard[1:], beat=ranks.beat,
            )  # fmt: skip

        found = list[Outcomes]()
        ranks.together(lambda: found.extend(map(evaluated, shards.parts())))
        losses = np.concatenate([losses for losses, _ in found])
        whole = ranks.to_first(losses, shards.rank_edges)
        if self.correct_fn is None:
            return (losses if whole is None else whole), None
        correct = np.concatenate([right for _, right in found if right is not None])
        right = ranks.to_first(correct, shards.rank_edges)
        return (losses if whole is None else whole), (correct if right is None else right)

    def _before_sealing(self) -> None:
        held_out = None if self.test is None else self.outcomes(self.test)
        found = self.outcomes(self._unit.given[0])

        def record() -> None:
            test = None
            if held_out is not None and self.test is not None:
                names = self.test_examples or Examples.numbered(len(self.test))  # type: ignore[arg-type]
                test = names.with_outcomes(*held_out)
            self.run.record_outcomes(*self._unit.outcomes(*found), test)

        self._ranks.first(record)
