"""Whether what an example adds to a sum depends, in its last bits, on the batch around it.

Kernels may compute a row in other ways at other positions or in batches of another shape, and an
activation that comes out one bit higher can switch a ReLU. Passes of one shape prevent it with all
kernels known to us; here it is tried with the model at hand (`docs/sums.md`, assumption R).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from epsilons.gradients.clip_factors import clip_factors
from epsilons.gradients.isolation import undisturbed
from epsilons.gradients.norms import LossFn, backward_pass, example_count, examples, trainable
from epsilons.gradients.random_loss import SEED, NoDropout, is_random

ARRANGEMENTS = 4


def batch_invariant(
    model: nn.Module, loss_fn: LossFn, batch: Any, size: int, arrangements: int = ARRANGEMENTS
) -> bool:
    """Whether passes of `size` examples give each of them the same bits wherever it stands.

    The examples of `batch` fill passes in several arrangements: other positions, other companions.
    Losses and norms of every one, and what the first adds to a sum, are compared bit for bit, with
    dropout left out. False also if the loss is random in another way: then nothing can be compared.
    """
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    batch = examples(batch, slice(0, size))
    count = example_count(batch)
    if not count:
        return True
    found: list[_Bits] = []
    with undisturbed(model, device, SEED) as restore, NoDropout(device.type):
        if is_random(model, loss_fn, batch, restore):
            return False
        for chosen in _arranged(count, size)[:arrangements]:
            part = examples(batch, chosen.to(device))
            accumulated, losses = backward_pass(model, loss_fn, part, parameters, keep=True)
            norms, factors, finite = clip_factors(accumulated.squares, torch.ones_like(losses))
            alone = torch.arange(size, device=device) == _last_of_first(chosen)
            added = accumulated.clipped_sum(factors.where(alone, 0.0), finite)
            found.append(_Bits(chosen, losses.cpu(), norms.cpu(), added))
            restore()
    return all(_agree(found[0], other) for other in found)


class _Bits(NamedTuple):
    """What came out of one pass over `chosen` (size,); `added` by the first example alone."""

    chosen: Tensor
    losses: Tensor
    norms: Tensor
    added: dict[str, Tensor]


def _arranged(count: int, size: int) -> list[Tensor]:
    """Ways to fill `size` rows with examples; all of them occur in the first."""
    rows = torch.arange(size)
    alone = torch.full((size,), count - 1)
    alone[-1] = 0
    return [rows % count, rows.flip(0) % count, alone, rows // 2 % count]


def _last_of_first(chosen: Tensor) -> int:
    """The last row of example 0: another one in each arrangement."""
    return int((chosen == 0).nonzero()[-1])


def _agree(reference: _Bits, other: _Bits) -> bool:
    rows = zip((reference.losses, reference.norms), (other.losses, other.norms), strict=True)
    same = all(_same_bits(known[other.chosen], found) for known, found in rows)
    sums = zip(reference.added.values(), other.added.values(), strict=True)
    return same and all(_same_bits(*pair) for pair in sums)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int64), other.view(torch.int64))
