"""Whether what an example adds to a sum depends, in its last bits, on the batch around it.

Kernels may compute a row in other ways at other positions or in batches of another shape, and an
activation that comes out one bit higher can switch a ReLU. Passes of one shape prevent much of it;
the rest is looked for with the model at hand (`docs/sums.md`, assumption R).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from epsilons.gradients.clip_factors import clip_factors
from epsilons.gradients.groups import records_of
from epsilons.gradients.isolation import undisturbed
from epsilons.gradients.norms import (
    LossFn,
    backward_pass,
    clipped_pass,
    example_count,
    examples,
    trainable,
)
from epsilons.gradients.random_loss import SEED, NoDropout, is_random
from epsilons.gradients.trees import tensors_in

ARRANGEMENTS = 4
PROBES = 32  # forward passes more, in search of what differs for few records
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number
_PRIME = 1_000_003


def batch_invariant(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    size: int,
    *,
    arrangements: int = ARRANGEMENTS,
    probes: int = PROBES,
) -> bool:
    """Whether passes of `size` examples give each of them the same bits wherever it stands.

    The examples of `batch` fill passes in several arrangements: other positions, other companions.
    Activations, output gradients and norms of every one, and what the first adds to a sum, are
    compared bit for bit, with dropout left out. In `probes` more passes activations alone are.
    False also if the loss is random in another way: then nothing can be compared.
    """
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    count = example_count(batch)
    if not count:
        return True
    chosen = _arranged(count, size)[:arrangements]
    rows, norms, sums = [], [], []
    lengths = {size, size * records_of(loss_fn, batch)}
    with undisturbed(model, device, SEED) as restore, NoDropout(device.type, lengths):
        if is_random(model, loss_fn, examples(batch, chosen[0].to(device)), restore):
            return False
        for its in chosen:
            part = examples(batch, its.to(device))
            with _RowBits(part, size, lengths) as bits:
                accumulated, _ = backward_pass(model, loss_fn, part, parameters, keep=True)
            squares = accumulated.squares
            found, factors, finite = clip_factors(squares, torch.ones_like(squares))
            alone = torch.arange(size, device=device) == _last_of_first(its)
            sums.append(accumulated.clipped_sum(factors.where(alone, 0.0), finite))
            rows.append(bits.rows.cpu())
            norms.append(found.cpu())
            restore()
        probed, seen = _probed(model, loss_fn, batch, size, probes, restore)
    return (
        _agree(torch.cat(chosen), torch.cat(rows))
        and _agree(torch.cat(chosen), torch.cat(norms).view(torch.int64))
        and _agree(probed, seen)
        and all(_same_bits(sums[0][name], other[name]) for other in sums for name in other)
    )


def compiled_batch_invariant(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    size: int,
    *,
    arrangements: int = ARRANGEMENTS,
    probes: int = PROBES // 2,
) -> bool:
    """The same of compiled passes, as far as these let one see.

    Norms and losses of all examples and what the first adds to a sum, also at random positions.
    """
    parameters = trainable(model)
    device = next(iter(parameters.values())).device
    count = example_count(batch)
    rows, sums = [], []
    with undisturbed(model, device, SEED):
        chosen = _arranged(count, size)[:arrangements]
        for _ in range(probes):
            its = torch.randint(count, (size,))
            its[torch.randint(size, ())] = 0
            chosen.append(its)
        for its in chosen:
            part = examples(batch, its.to(device))
            alone = (torch.arange(size) == _last_of_first(its)).double()
            found = clipped_pass(parameters, model, loss_fn, part, alone, compile=True)
            sums.append(found.sums)
            rows.append(torch.stack([found.norms.cpu(), found.losses.cpu()], 1).view(torch.int64))
    return _agree(torch.cat(chosen), torch.cat(rows)) and all(
        _same_bits(sums[0][name], other[name]) for other in sums for name in other
    )


def _arranged(count: int, size: int) -> list[Tensor]:
    """Ways to fill `size` rows with examples."""
    rows = torch.arange(size)
    alone = torch.full((size,), count - 1)
    alone[-1] = 0
    backwards = rows.flip(0) % min(count, size)
    return [rows % count, backwards, alone, rows // 2 % count]


def _probed(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    size: int,
    probes: int,
    restore: Callable[[], None],
) -> tuple[Tensor, Tensor]:
    """Examples in random order, and the checksums of their activations."""
    count = example_count(batch)
    device = tensors_in(batch)[0].device
    lengths = {size, size * records_of(loss_fn, batch)}
    chosen, rows = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for _ in range(probes):
        chosen.append(torch.randint(count, (size,)))
        part = examples(batch, chosen[-1].to(device))
        with torch.enable_grad(), _RowBits(part, size, lengths) as bits:
            loss_fn(model, part)
        rows.append(bits.rows.cpu())
        restore()
    return torch.cat(chosen), torch.cat(rows)


def _last_of_first(chosen: Tensor) -> int:
    """The last row of example 0: another one in each arrangement."""
    return int((chosen == 0).nonzero()[-1])


def _agree(chosen: Tensor, bits: Tensor) -> bool:
    """Whether an example that was chosen several times always had the same bits."""
    order = chosen.argsort(stable=True)
    again = chosen[order][1:] == chosen[order][:-1]
    return torch.equal(bits[order][1:][again], bits[order][:-1][again])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.int64), other.view(torch.int64))


class _RowBits(TorchFunctionMode):
    """A checksum by example (size,) of what a model computes from a batch, forward and backward.

    Of all floating-point results that have the examples along a dimension of their own, alone or
    with their records: it has one of the `lengths`.
    """

    def __init__(self, batch: Any, size: int, lengths: Collection[int]) -> None:
        super().__init__()
        self.size, self.lengths = size, lengths
        self._data = {id(t): weakref.ref(t) for t in tensors_in(batch)}
        self.rows = torch.zeros(size, dtype=torch.int64, device=tensors_in(batch)[0].device)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(self._is_data(t) for t in tensors_in((args, kwargs))):
            for tensor in tensors_in(out):
                self._data[id(tensor)] = weakref.ref(tensor)
                if tensor.is_floating_point() and self._dim(tensor) is not None:
                    self._add(tensor)
                    if tensor.requires_grad:
                        tensor.register_hook(self._add)  # type: ignore[no-untyped-call]
        return out

    def _is_data(self, tensor: Tensor) -> bool:
        known = self._data.get(id(tensor))
        return known is not None and known() is tensor

    def _dim(self, tensor: Tensor) -> int | None:
        """The dimension of the examples: the first, or the second behind positions."""
        if tensor.dim() > 0 and tensor.shape[0] in self.lengths:
            return 0
        return 1 if tensor.dim() > 2 and tensor.shape[1] in self.lengths else None

    def _add(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            rows = tensor.detach().movedim(self._dim(tensor) or 0, 0)
            numbers = rows.reshape(self.size, -1).contiguous()
            bits = numbers.view(_BITS[tensor.element_size()]).long()
            weights = torch.arange(1, bits.shape[1] + 1, device=bits.device)
            self.rows = self.rows * _PRIME + (bits * weights).sum(1)
