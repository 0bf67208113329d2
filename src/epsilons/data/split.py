"""Data: training and held-out examples, as tensors and by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from epsilons.examples import Examples


@dataclass(frozen=True)
class Data:
    """A data set with what travels with it, split into training and held-out examples."""

    train: Dataset[Any]
    examples: Examples
    test: Dataset[Any]
    test_examples: Examples
