"""Buffers that keep something of the data: running means, last inputs, codebooks.

They are saved with the weights, and no noise protects them. Buffers that merely change, such as the
vectors of spectral norm, counters and caches by shape, are no harm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from epsilons.gradients.isolation import undisturbed
from epsilons.gradients.norms import LossFn, example_count, examples
from epsilons.gradients.rules import UnsupportedLayer

_SEED = 20


def check_buffers(model: nn.Module, loss_fn: LossFn, batch: Any, device: torch.device) -> None:
    """Raise `UnsupportedLayer` with the buffers that a forward pass leaves depending on its data.

    Each example of `batch` takes the places of all of them in turn, from the same buffers and the
    same random draws: what comes out different is of the data. The model is left as it was.
    """
    count = example_count(batch)
    kept: set[str] = set()
    first: dict[str, Tensor] = {}
    with undisturbed(model, device, _SEED) as restore:
        before = _bytes(model)
        for i in range(count):
            torch.manual_seed(_SEED)
            loss_fn(model, examples(batch, torch.full((count,), i)))
            found = _bytes(model)
            first = first or found
            kept |= {
                name
                for name in found.keys() | first.keys()
                if name not in found
                or name not in first
                or not torch.equal(found[name], first[name])
            }
            restore()
            _put_back(model, before)
    if kept:
        raise UnsupportedLayer(
            f"{', '.join(sorted(kept))}: the model keeps something of its data here, which no "
            "noise protects and which is saved with the weights. Keep no statistics of the data "
            "in buffers while training, or compute them of public data beforehand."
        )


def _bytes(model: nn.Module) -> dict[str, Tensor]:
    # as bytes, so that what is not a number equals itself
    return {
        name: buffer.detach().to_dense().flatten().view(torch.uint8).clone()
        for name, buffer in model.named_buffers()
    }


def _put_back(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Undo writes through `.data`, which `undisturbed` can't see."""
    for name, buffer in model.named_buffers():
        if buffer.layout is torch.strided:
            buffer.data.copy_(before[name].view(buffer.dtype).view_as(buffer))
