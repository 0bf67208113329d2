"""Data: training and held-out examples, as tensors and by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from epsilons.examples import Examples


@dataclass(frozen=True)
class Data:
    """A data set with what travels with it, split into training and held-out examples.

    `classes` are the names of the labels 0, 1, …; `checksums` maps each file that was read to the
    SHA-256 of its content (private); `skipped` counts files that were left out. `train` and `test`:
    data sets of pairs (input, label). `examples` and `test_examples`: who they are, in the same
    order. Without held-out examples `test` is None.
    """

    train: Dataset[Any]
    examples: Examples
    test: Dataset[Any] | None = None
    test_examples: Examples | None = None
    classes: tuple[str, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict, repr=False)
    skipped: int = 0


class Part(NamedTuple):
    """Inputs (n, …) with their labels (n,) and what travels with them."""

    x: Tensor
    y: NDArray[np.int64]
    examples: Examples

    def chosen(self, rows: NDArray[np.int64]) -> Part:
        return Part(self.x[torch.from_numpy(rows)], self.y[rows], _chosen(self.examples, rows))


def labelled(x: Tensor, y: NDArray[Any]) -> TensorDataset:
    """Pairs of an input and its label."""
    return TensorDataset(x, torch.from_numpy(np.ascontiguousarray(y, dtype=np.int64)))


def split(
    train: Part,
    test: Part | None,
    *,
    classes: tuple[str, ...],
    checksums: Mapping[str, str],
    test_share: float,
    seed: int,
) -> Data:
    """The data set of two parts; without a second one, a share of the first is held out."""
    if test is None:
        keep, rest = held_out(len(train.y), test_share, seed)
        train, test = train.chosen(keep), train.chosen(rest)
    tested = len(test.y) > 0
    return Data(
        labelled(train.x, train.y),
        train.examples,
        labelled(test.x, test.y) if tested else None,
        test.examples if tested else None,
        classes,
        checksums,
    )


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


def fewer(data: Data, n: int, seed: int = 0) -> Data:
    """The same `data` with `n` of the training examples, chosen by `seed`, in their order."""
    total = len(data.examples)
    if not 1 <= n <= total:
        raise ValueError(f"{n} training examples asked for; expected 1 to {total}")
    rows = np.sort(np.random.default_rng(seed).permutation(total)[:n])
    train: Dataset[Any]
    if isinstance(data.train, TensorDataset):
        train = TensorDataset(*(tensor[torch.from_numpy(rows)] for tensor in data.train.tensors))
    else:
        train = Subset(data.train, rows.tolist())
    return replace(data, train=train, examples=_chosen(data.examples, rows))


def _chosen(examples: Examples, rows: NDArray[np.int64]) -> Examples:
    owners, digests = (
        None if column is None else column[rows] for column in (examples.owners, examples.digests)
    )
    groups = {name: column[rows] for name, column in examples.groups.items()}
    budgets = None if examples.budgets is None else examples.budgets[rows]
    return Examples(
        ids=examples.ids[rows], owners=owners, groups=groups, digests=digests, budgets=budgets
    )
