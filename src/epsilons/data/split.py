"""Data: training and held-out examples, as tensors and by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from epsilons.examples import Examples


@dataclass(frozen=True)
class Data:
    """A data set with what travels with it, split into training and held-out examples.

    `classes` are the names of the labels 0, 1, …; `checksums` maps each file that was read to the
    SHA-256 of its content (private); `skipped` counts files that were left out.
    """

    train: Dataset[Any]
    examples: Examples
    test: Dataset[Any] | None = None
    test_examples: Examples | None = None
    classes: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict, repr=False)
    skipped: int = 0


def labelled(x: Tensor, y: NDArray[Any]) -> TensorDataset:
    """Pairs of an input and its label."""
    return TensorDataset(x, torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64)))


def held_out(n: int, share: float, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions of training and of held-out examples, each ascending, drawn by `seed`.

    >>> [len(part) for part in held_out(10, 0.2, seed=0)]
    [8, 2]
    """
    if not 0 <= share < 1:
        raise ValueError(f"test_share={share}; expected a share of the examples in [0, 1)")
    order = np.random.default_rng(seed).permutation(n)
    cut = round(n * share)
    return np.sort(order[cut:]), np.sort(order[:cut])
