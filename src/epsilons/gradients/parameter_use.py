"""Weight and ParameterUse: what a traced forward pass records."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from epsilons.gradients.rules import GradientRule
from epsilons.gradients.rules.derived import Derivation


@dataclass(eq=False)
class Weight:
    """A tensor that depends on trainable parameters (`roots`) and not on the data."""

    tensor: Tensor
    roots: frozenset[str]
    rearranged: bool  # a parameter, or its entries in another order: gradients have equal norms
    derivation: Derivation | None = None  # how it was derived, where a closed form is known


@dataclass(eq=False)
class ParameterUse:
    """One weight in one operation."""

    weight: Weight
    rule: GradientRule
    operation: str
    g: Tensor | None = None
