"""Owners as the examples of a run: one coin draws a person with all their records.

With `Plan(unit="owner")` sampling, norms, clipping and journal see owners where they saw records,
and do the same with them: an owner's gradient is that of the sum of their records' losses. So
everything that is proved of an example holds of an owner.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.gradients.groups import group_loss, grouped
from epsilons.gradients.norms import LossFn
from epsilons.runs import expect_few_records
from epsilons.training.sampling import Collate, batch_of

SEVERAL = "several"  # the group of an owner whose records are of more than one


class OwnedRecords(Dataset[int]):
    """The owners of `records`, by number; `collate` fetches what is theirs.

    `owner` (records,): the number of each record's owner, from 0.
    """

    def __init__(self, records: Dataset[Any], owner: NDArray[np.int64], most: int) -> None:
        self.records, self.owner = records, owner
        order = np.argsort(owner, kind="stable")
        counts = np.bincount(owner)
        self.present = torch.arange(most) < torch.from_numpy(counts)[:, None]
        self._rows = torch.zeros(self.present.shape, dtype=torch.int64)
        self._rows[self.present] = torch.from_numpy(order)

    def __len__(self) -> int:
        return len(self.present)

    def __getitem__(self, index: int) -> int:
        return range(len(self))[index]

    def collate(self, collate_fn: Collate, owners: list[int]) -> Any:
        """The batch of these owners, for a `group_loss`."""
        present = self.present[owners]
        rows = self._rows[owners][present]
        return grouped(batch_of(self.records, rows, collate_fn), present)

    def combined_digests(self, digests: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
        """(owners,): what each owner's records are known by together, in any order."""
        order = np.lexsort((digests, self.owner))
        parts = np.split(digests[order], np.cumsum(np.bincount(self.owner))[:-1])
        found = (hashlib.sha256(b"".join(part.tolist())).hexdigest() for part in parts)
        return np.array([digest.encode() for digest in found], dtype=digests.dtype)


class Unit(NamedTuple):
    """What one coin draws, as a loop sees it: data set, loss, collate function, names.

    `given`: data set, loss and collate function of the records. `micro_batch`: the most examples in
    a pass. `owner` (records,): the number of each record's owner, if examples are owners.
    """

    train: Dataset[Any]
    loss_fn: LossFn
    collate_fn: Collate
    examples: Examples | None
    micro_batch: int | None
    given: tuple[Dataset[Any], LossFn, Collate]
    owner: NDArray[np.int64] | None = None

    def outcomes(
        self, losses: NDArray[np.float64], correct: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.bool_] | None]:
        """Those of records, by example: the mean loss of an owner, and what most are right about.

        `correct`: about at least half of an owner's records.
        """
        if self.owner is None:
            return losses, correct
        counts = np.bincount(self.owner)
        mean = np.bincount(self.owner, weights=losses) / counts
        if correct is None:
            return mean, None
        return mean, np.bincount(self.owner, weights=correct) >= counts / 2


def unit_of(
    plan: Plan,
    train: Dataset[Any],
    loss_fn: LossFn,
    examples: Examples | None,
    collate_fn: Collate = default_collate,
    micro_batch: int | None = None,
) -> Unit:
    """What the plan's `unit` makes of data set, loss and names; of records, what they are.

    `micro_batch`: the most records in a pass, in which there is room for one owner's at least.
    ValueError if owners are wanted and not given, or not those that the plan speaks of.
    """
    given = train, loss_fn, collate_fn
    if plan.unit == "record":
        return Unit(*given, examples, micro_batch, given)
    most = plan.records_at_once
    n = len(train)  # type: ignore[arg-type]
    if examples is None or examples.owners is None:
        raise ValueError(
            "unit='owner' needs to know whose each record is: give Examples(ids=…, owners=…), or a "
            "column of owners in the settings"
        )
    if len(examples) != n:
        raise ValueError(f"the data set has {n} records, and {len(examples)} are named")
    names, owner = numbered_owners(examples)
    if len(names) != plan.n:
        raise ValueError(
            f"the records have {len(names)} owners; the plan says n={plan.n}, which counts owners "
            "with unit='owner'"
        )
    expect_few_records(examples, most)
    owned = OwnedRecords(train, owner, most)
    digests = examples.digests
    persons = Examples(
        ids=names,
        groups={column: _of_owners(labels, owned) for column, labels in examples.groups.items()},
        digests=None if digests is None else owned.combined_digests(digests),
        budgets=_of_first(examples.budgets, owned),
    )
    if most == 1:
        return Unit(*given, persons, micro_batch, given, owner)
    fewer = None if micro_batch is None else max(1, micro_batch // most)
    collate = partial(owned.collate, collate_fn)
    return Unit(owned, group_loss(loss_fn), collate, persons, fewer, given, owner)


def numbered_owners(examples: Examples) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The owners in the order of their first records, and the number (n,) of each record's."""
    owners = np.asarray(examples.owners)
    names, first, inverse = np.unique(owners, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty(len(order), dtype=np.int64)
    number[order] = np.arange(len(order))
    return names[order], number[inverse]


def _of_first(
    column: NDArray[np.float64] | None, owned: OwnedRecords
) -> NDArray[np.float64] | None:
    """(owners,): what the first record of each owner has, as all of them do."""
    return None if column is None else column[owned._rows[:, 0].numpy()]


def _of_owners(labels: NDArray[Any], owned: OwnedRecords) -> NDArray[Any]:
    """(owners,): the label that all records of an owner have, or `SEVERAL`."""
    first = owned._rows[:, 0].numpy()
    of_owner = labels[first]
    differs = np.zeros(len(owned), dtype=bool)
    np.logical_or.at(differs, owned.owner, labels != of_owner[owned.owner])
    return np.where(differs, SEVERAL, of_owner.astype(str)) if differs.any() else of_owner
