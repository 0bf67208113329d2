"""Weight and Use: what a forward pass leaves behind of every weight."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epsilons.gradients.rules import Term
from epsilons.gradients.rules.derived import Shape


@dataclass(eq=False)
class Weight:
    """A tensor that depends on trainable parameters (`roots`) and not on the data."""

    tensor: Tensor
    roots: frozenset[str]
    rearranged: bool  # a parameter, or its entries in another order: gradients have equal norms
    shape: Shape | None = None  # what is known about how it was derived


@dataclass(eq=False)
class Use:
    """One weight in one operation."""

    weight: Weight
    term: Term
    operation: str
    g: Tensor | None = None
