"""What is tested before training and at every refresh: random draws, mixing, batch invariance.

Some examples are fetched twice: where they differ (augmentation), norms of a refresh are not those
of the step. The losses of some are compared between groupings of their batch: where they differ,
clipping does not bound what an example adds. Their bits are compared between positions in passes of
the step's size: where they differ, floating-point effects of the sum are not covered. Other
examples are taken each time; what was not tested is not known.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.gradients.batch_invariance import batch_invariant
from epsilons.gradients.isolation import items, undisturbed
from epsilons.gradients.model_checks import (
    GROUPED,
    check_model,
    expect_equal_losses,
    expect_separate,
)
from epsilons.gradients.norms import LossFn, trainable
from epsilons.gradients.trees import tensors_in
from epsilons.training.evaluation import to_device
from epsilons.training.sampling import Collate, batch_of
from epsilons.training.step import pass_sizes

FETCHED = 32  # examples that are fetched twice
COMPARED = 256  # examples whose bits are compared before training
# In a trained network all losses may be near 0, where rounding is larger than a thousandth of them.
_LEAST = 1e-4
QUICKLY = {"arrangements": 2, "probes": 0}  # at a refresh: each is as dear as a pass
_STRIDE = 7919  # from one refresh to the next other examples are looked at


class Inspection(NamedTuple):
    """What was found among the tested examples: is the loss random, are the data?

    `batch_invariant`: whether an example's bits are the same in any batch; False if not tested.
    """

    random_loss: bool
    random_data: bool
    batch_invariant: bool


def inspect_start(
    model: nn.Module,
    loss_fn: LossFn,
    data: Dataset[Any],
    *,
    most: int | None = None,
    sizes: Collection[int] = (),
    collate_fn: Collate = default_collate,
) -> Inspection:
    """Before training: `check_model` on some examples of `data`, and what `Inspection` says.

    `most`: about so many examples in memory at a time, if that is given. `sizes`: of the steps'
    passes, if what they sum is to be covered.
    """
    batch, random_data = _fetched(model, data, 0, _grouped(most), collate_fn)
    learned = check_model(model, loss_fn, batch)
    if not random_data:
        _expect_padding_ignored(model, loss_fn, data, _grouped(most), collate_fn)
    invariant = bits_agree(model, loss_fn, data, sizes, collate_fn=collate_fn)
    return Inspection(bool(learned.random_loss), random_data, invariant)


def bits_agree(
    model: nn.Module,
    loss_fn: LossFn,
    data: Dataset[Any],
    sizes: Collection[int],
    *,
    collate_fn: Collate = default_collate,
) -> bool:
    """Whether passes of these sizes give an example the same bits in any batch; False if no sizes.

    False too if batches have other shapes by who is in them, padded to their longest, say.
    """
    if not sizes:
        return False
    n = len(data)  # type: ignore[arg-type]
    batch = _batch(model, data, _spread(n, COMPARED), 0, collate_fn)
    apart = _one_by_one(model, data, _spread(n, FETCHED), collate_fn)
    return _of_one_shape([batch, *apart]) and _invariant(model, loss_fn, batch, sizes)


def some_examples(
    model: nn.Module, data: Dataset[Any], most: int, *, collate_fn: Collate = default_collate
) -> Any:
    """A batch of at most so many examples, evenly spread over the data, on the model's device."""
    return _batch(model, data, _spread(len(data), most), 0, collate_fn)  # type: ignore[arg-type]


def inspect_refresh(
    model: nn.Module,
    loss_fn: LossFn,
    data: Dataset[Any],
    step: int,
    *,
    most: int = GROUPED,
    sizes: Collection[int] = (),
    collate_fn: Collate = default_collate,
) -> Inspection:
    """The same at a refresh; `UnsupportedLayer` if a loss depends on others.

    At most about `most` examples, or those of a pass, are in memory at a time, at least two. The
    model is left as it was, and so are the random generators of torch, NumPy and Python.
    """
    batch, random_data = _fetched(model, data, step + 1, _grouped(most), collate_fn)
    random_loss = expect_separate(model, loss_fn, batch, least=_LEAST)
    if not random_data:
        _expect_padding_ignored(model, loss_fn, data, _grouped(most), collate_fn, least=_LEAST)
    invariant = _invariant(model, loss_fn, batch, sizes, **QUICKLY)
    return Inspection(random_loss, random_data, invariant)


def steps_are_batch_invariant(
    model: nn.Module, loss_fn: LossFn, batch: Any, plan: Plan, micro_batch: int | None = None
) -> bool:
    """Whether `private_step` gives an example the same bits in any batch: tried on some examples.

    For `Journal.create(…, batch_invariant=)` in a loop of your own; `micro_batch` as for the steps.
    All batches must have one shape beside the number of examples: pad to a fixed length. False if
    the plan's sums are float32, or the loss is random in another way than by dropout. `model`,
    `loss_fn` and `plan`: of the training. `batch`: some examples of it, such as the first 256.
    """
    return _invariant(model, loss_fn, batch, pass_sizes(plan, micro_batch))


def _invariant(
    model: nn.Module, loss_fn: LossFn, batch: Any, sizes: Collection[int], **extent: int
) -> bool:
    tested = (batch_invariant(model, loss_fn, batch, size, **extent) for size in sizes)
    return len(sizes) > 0 and all(tested)


def _grouped(most: int | None) -> int:
    """How many examples to group, half of which are in one batch twice."""
    return GROUPED if most is None else max(2, min(GROUPED, most * 2 // 3))


def _fetched(
    model: nn.Module, data: Dataset[Any], test: int, grouped: int, collate_fn: Collate
) -> tuple[Any, bool]:
    """A batch of `grouped` examples, and whether some come out differently a second time."""
    n = len(data)  # type: ignore[arg-type]
    chosen = (_spread(n, FETCHED) + test * _STRIDE) % n
    few = chosen[:: max(1, len(chosen) // grouped)][:grouped]
    batch = _batch(model, data, few, test, collate_fn)
    if isinstance(data, TensorDataset) and collate_fn is default_collate:
        return batch, False
    with undisturbed(model, _device(model), test):
        # as a step fetches them, and as a pass over all does
        first = batch_of(data, chosen, collate_fn)
        second = collate_fn(items(data, chosen.tolist()))
    return batch, not _same(first, second)


def _batch(
    model: nn.Module, data: Dataset[Any], chosen: Tensor, test: int, collate_fn: Collate
) -> Any:
    with undisturbed(model, _device(model), test):
        return to_device(batch_of(data, chosen, collate_fn), _device(model))


def _expect_padding_ignored(
    model: nn.Module,
    loss_fn: LossFn,
    data: Dataset[Any],
    grouped: int,
    collate_fn: Collate,
    **least: float,
) -> None:
    """`MixedExamples` if an example's loss depends on how far others make it be padded."""
    chosen = _spread(len(data), grouped)  # type: ignore[arg-type]
    apart = _one_by_one(model, data, chosen, collate_fn)
    if not _of_one_shape(apart):
        together = _batch(model, data, chosen, 0, collate_fn)
        expect_equal_losses(model, loss_fn, together, apart, **least)


def _one_by_one(
    model: nn.Module, data: Dataset[Any], chosen: Tensor, collate_fn: Collate
) -> list[Any]:
    """The chosen examples, each as a batch; none of a data set whose batches have one shape."""
    if isinstance(data, TensorDataset) and collate_fn is default_collate:
        return []
    return [_batch(model, data, chosen[k : k + 1], 0, collate_fn) for k in range(len(chosen))]


def _of_one_shape(batches: list[Any]) -> bool:
    """Whether batches have the same shapes beside the number of their examples."""
    return len({tuple(t.shape[1:] for t in tensors_in(batch)) for batch in batches}) < 2


def _device(model: nn.Module) -> torch.device:
    return next(iter(trainable(model).values())).device


def _spread(n: int, count: int) -> Tensor:
    """At most `count` of n indices, evenly spread."""
    return torch.from_numpy(np.linspace(0, n, min(n, count), endpoint=False).astype(int))


def _same(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        equal = one == other
        if one.is_floating_point():
            equal |= one.isnan() & other.isnan()
        return bool(equal.all())
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))
