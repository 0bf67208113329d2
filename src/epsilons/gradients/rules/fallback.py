"""Operations without a rule: the operation's own derivative, example by example, with `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.batch_dim.dims import BatchDim, examples_back
from epsilons.gradients.rules.registry import GradientRule, UnsupportedLayer, chunks, precise
from epsilons.gradients.trees import swapped, tensors_in


class PerExample(GradientRule):
    """The operation called on each example by itself.

    `sources` are the operation's data arguments and `examples` the same, examples first.
    """

    def __init__(
        self,
        call: Callable[[dict[int, Tensor]], Tensor],
        sources: Sequence[Tensor],
        examples: Sequence[Tensor],
        weight: Tensor,
    ) -> None:
        super().__init__(None)
        self.call = call
        self.keys = [id(source) for source in sources]
        self.sources = sources
        self.examples = examples
        self.weight = weight

    def saved(self) -> Sequence[Tensor]:
        return self.sources

    def rows(self, chosen: slice | Tensor) -> Self:
        part = super().rows(chosen)
        part.examples = [example[chosen] for example in self.examples]
        return part

    def output(self, weight: Tensor, *row: Tensor) -> Tensor:
        """What the operation gives for one example."""
        replacements = dict(zip(self.keys, row, strict=True))
        return self.call(replacements | {id(self.weight): weight})

    def gradients(self, g: Tensor) -> Tensor:
        def gradient(g: Tensor, *row: Tensor) -> Tensor:
            pull = torch.func.vjp(lambda weight: self.output(weight, *row), self.weight)[1]
            (gradient,) = pull(g)
            return cast(Tensor, gradient)

        each = torch.vmap(gradient, chunk_size=_chunk(len(g), self.weight.numel()))
        return precise(each(g, *self.examples))


class Masked(GradientRule):
    """The operation called on the whole batch, with the output gradient of one example at a time.

    Right for any operation whose output separates the examples, at B times the work: for weights
    that were expanded to the size of the batch before they met the data.
    """

    def __init__(
        self,
        call: Callable[[dict[int, Tensor]], Tensor],
        sources: Sequence[Tensor],
        weight: Tensor,
        batch_dim: BatchDim,
        out: Tensor,
        count: int,
    ) -> None:
        super().__init__(torch.arange(count, device=out.device))
        self.call = call
        self.sources = sources
        self.weight = weight
        self.batch_dim = batch_dim
        self.shape = out.shape
        self.count = count

    def saved(self) -> Sequence[Tensor]:
        return self.sources

    def gradients(self, g: Tensor) -> Tensor:
        assert self.data is not None
        # What isn't finite would reach everybody's gradient, as 0 · ∞; g has kept it for its own.
        finite = {id(t): torch.where(t.isfinite(), t, 1) for t in self.sources}
        pull = torch.func.vjp(lambda w: self.call(finite | {id(self.weight): w}), self.weight)[1]

        def gradient(row: Tensor, place: Tensor) -> Tensor:
            chosen = torch.arange(self.count, device=row.device) == place
            chosen = chosen.view(-1, *[1] * row.dim())
            spread = torch.where(chosen, row, row.new_zeros(()))
            (gradient,) = pull(examples_back(spread, self.batch_dim, self.shape))
            return cast(Tensor, gradient)

        each = torch.vmap(gradient, chunk_size=_chunk(len(g), self.shape.numel()))
        return precise(each(g, self.data))


def _chunk(count: int, numbers: int) -> int:
    """How many examples go together: a divisor of their count, so that all chunks are alike."""
    return chunks(count, 8 * numbers)[0].stop if count else 1


def bound(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> Callable[[dict[int, Tensor]], Tensor]:
    """The operation as a function of replacements for its tensors, by id; autocast as it is now."""
    device = tensors_in((args, kwargs))[0].device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def call(replacements: dict[int, Tensor]) -> Tensor:
        # without modes of a caller, which would be shown what vmap makes of the tensors
        with torch.autocast(device, dtype, enabled), torch._C.DisableTorchFunction():
            out: Tensor = function(*swapped(args, replacements), **swapped(kwargs, replacements))
        return out

    return call


def fallback(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    data: Sequence[tuple[Tensor, Tensor]],
    weight: Tensor,
    batch_dim: BatchDim,
    out: Tensor,
    count: int,
) -> GradientRule:
    """The rule of one weight of any operation; data: (argument, the same examples first)."""
    if function is F.scaled_dot_product_attention:
        _refuse_dropout(*args, **kwargs)
    call = bound(function, args, kwargs)
    sources = [source for source, _ in data]
    rule = PerExample(call, sources, [examples for _, examples in data], weight)
    row = list(out.shape)
    row[batch_dim.dim] //= count
    if count > 0 and _row_shape(rule) == row:
        return rule
    return Masked(call, sources, weight, batch_dim, out, count)


def _refuse_dropout(
    query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> None:
    if dropout_p > 0:
        raise UnsupportedLayer(
            "scaled_dot_product_attention: a parameter is its query, key or value, and dropout "
            "would be drawn again for the gradient. Use dropout_p=0 there."
        )


def _row_shape(rule: PerExample) -> list[int] | None:
    try:
        with torch.no_grad():
            row = rule.output(rule.weight, *(example[0] for example in rule.examples))
    except (RuntimeError, IndexError, ValueError):
        return None
    return list(row.shape) if isinstance(row, Tensor) else None
