"""GradientRule: how an operation's output gradient becomes each example's weight gradient.

The builder that `norm_rule` registers has the signature of its operation. It is called with the
data examples first (see `examples_first`: one more dimension in front) and yields a `GradientRule`
for every weight.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor

from epsilons.gradients.compile import is_traced

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})
SCRATCH_BYTES = 2**23  # what one operation may hold beside its operands
PIECE = 4096  # numbers whose squares are summed in float32


class UnsupportedLayer(ValueError):
    """An operation for which no per-example gradient exists or can be had; says what to use."""


class GradientRule(ABC):
    """What one weight receives from one operation, as a function of the output gradient g.

    `data` is the operation's other input (its activations), g the output gradient: both have the
    examples first, (B, …). A rule of your own needs `gradients` only.
    """

    def __init__(self, data: Tensor | None) -> None:
        self.data = data

    @abstractmethod
    def gradients(self, g: Tensor) -> Tensor:
        """Every example's gradient, (B, *weight.shape), from the output gradients `g` (B, …)."""

    def square_norms(self, g: Tensor) -> Tensor:
        """Every example's squared gradient norm, (B,), from the output gradients `g` (B, …)."""
        return square_norms(self.gradients(g))

    def weighted_sum(self, g: Tensor, factors: Tensor) -> Tensor:
        """The sum of gradients weighted by `factors` (B,), from the output gradients `g` (B, …).

        Σ_i factors_i · gradient_i, of the weight's shape and the factors' dtype. In float64, what
        one example adds must be a function of its own rows of `data` and g, to the last bit:
        contract over examples only what is exact in float64, else `materialized_sum`.
        """
        return weighted(self.gradients(g), factors)

    def materializes(self, g: Tensor) -> bool:
        """Whether `square_norms` materializes the gradients in full, given `g`."""
        return True

    def saved(self) -> Sequence[Tensor]:
        """What must not be modified in place before the gradient comes back."""
        return [] if self.data is None else [self.data]

    def rows(self, chosen: slice | Tensor) -> Self:
        """The same rule for the examples `chosen`, a slice or their indices."""
        part = object.__new__(type(self))
        part.__dict__.update(self.__dict__)
        if self.data is not None:
            part.data = self.data[chosen]
        return part


class Materialized(GradientRule):
    """A rule whose g already is every example's gradient."""

    def __init__(self) -> None:
        super().__init__(None)

    def gradients(self, g: Tensor) -> Tensor:
        return g


RuleBuilder = Callable[..., Iterable[tuple[Any, GradientRule]]]
RULES: dict[Any, tuple[RuleBuilder, str | None]] = {}


def norm_rule(
    *operations: Callable[..., Any], data: str | None = "input"
) -> Callable[[RuleBuilder], RuleBuilder]:
    """Register the rule of one or more `operations`, by decorating its builder.

    The builder is called with what an operation is called with, and yields a `GradientRule` for
    every weight that it uses. `data` names the one argument (the first) that may depend on the
    data; None leaves it to the rule, which may yield nothing to decline.
    """

    def register(build: RuleBuilder) -> RuleBuilder:
        for operation in operations:
            RULES[operation] = (build, data)
        return build

    return register


def precise(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better: bfloat16 or float16 is too coarse to sum in."""
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Have operations run in the types of their operands; costs nothing where they do anyway."""
    on = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def square_norms(gradients: Tensor) -> Tensor:
    """Squared norms of the rows, (B,), from pieces of them.

    Torch takes a norm by one long sum, which in float32 comes out too small: by 1e-5 for
    a million numbers, by 1e-3 for twenty million.
    """
    rows = gradients
    if rows.dim() != 2:
        rows = rows.reshape(rows.shape[0], rows.shape[1:].numel())
    if rows.shape[1] <= PIECE:
        return _short_squares(rows)
    whole = rows.shape[1] - rows.shape[1] % PIECE
    pieces = torch.unflatten(rows[:, :whole], 1, (-1, PIECE))
    return _short_squares(rows[:, whole:]) + _short_squares(pieces).sum(1)


def _short_squares(rows: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(rows, dim=-1).square()
    return squares


def weighted(gradients: Tensor, factors: Tensor) -> Tensor:
    """Σ_i factors_i · gradients_i, multiplied and added in the factors' precision."""
    if gradients.is_complex():
        parts = weighted(torch.view_as_real(gradients), factors)
        return torch.view_as_complex(parts.contiguous())
    count, *shape = gradients.shape
    flat = gradients.reshape(count, math.prod(shape))
    if flat.dtype == factors.dtype:
        total = factors @ flat
    else:
        total = factors.new_empty(flat.shape[1])
        width = max(1, SCRATCH_BYTES // max(1, factors.element_size() * count))
        for start in range(0, flat.shape[1], width):
            part = slice(start, start + width)
            torch.mv(flat[:, part].to(factors.dtype).mT, factors, out=total[part])
    return total.view(shape)


def materialized_sum(rule: GradientRule, g: Tensor, factors: Tensor, size: int) -> Tensor:
    """Σ_i factors_i · gradient_i from gradients materialized some at a time; `size` numbers each.

    Every part has the same shape, so that a gradient's bits don't depend on where it stands.
    """
    first, *others = chunks(len(g), 4 * size)
    total = weighted(rule.rows(first).gradients(g[first]), factors[first])
    for part in others:
        total += weighted(rule.rows(part).gradients(g[part]), factors[part])
    return total


def replace_cancelled(squares: Tensor, cancelled: Tensor, rule: GradientRule, g: Tensor) -> None:
    """Take the squared norms that cancelled from materialized gradients, in place.

    One example at a time, so that its norm doesn't depend on how many others there are. In a graph
    they become NaN, which has the example done again.
    """
    if is_traced(cancelled):
        squares.masked_fill_(cancelled, math.nan)
    elif bool(cancelled.any()):
        for i in cancelled.nonzero().flatten().tolist():
            squares[i] = square_norms(rule.rows(slice(i, i + 1)).gradients(g[i : i + 1]))[0]


def chunks(count: int, bytes_each: int) -> list[slice]:
    """Equal ranges of examples that keep scratch below `SCRATCH_BYTES` (one example at least)."""
    size = min(count, max(1, SCRATCH_BYTES // max(1, bytes_each)))
    while size > 1 and count % size:
        size -= 1
    return [slice(start, start + size) for start in range(0, count, size)] if count else []
