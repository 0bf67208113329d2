"""Weights: the parameters and what the model derives from them alone, such as a transposed matrix.

Models cast, reshape, standardise and add parameters before these meet the data. Autograd keeps that
part of the graph, so that a weight's gradient can be pulled back to its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epsilons.gradients.autograd_nodes import unpacked
from epsilons.gradients.operations import CASTING, REARRANGING, changes
from epsilons.gradients.rules.derived import Derivation, derivation
from epsilons.gradients.rules.registry import LOW_PRECISION, UnsupportedLayer
from epsilons.gradients.trees import tensors_in


@dataclass(eq=False)
class Weight:
    """A tensor that depends on trainable parameters (`roots`) and not on the data."""

    tensor: Tensor
    roots: frozenset[str]
    rearranged: bool  # a parameter, or its entries in another order: gradients have equal norms
    derivation: Derivation | None = None  # how it was derived, where a closed form is known


def roots_of(weights: Iterable[Weight]) -> list[str]:
    """The names of all parameters that some weights depend on."""
    return sorted(set[str]().union(*(weight.roots for weight in weights)))


class TracedWeights:
    """The weights of one forward pass."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._found = {id(p): Weight(p, frozenset([name]), True) for name, p in parameters.items()}
        self._derived: list[Tensor] = []  # kept, so that no other tensor gets one of their ids
        self.rounds = False  # whether weights were derived in bfloat16 or float16

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self._found

    def find(self, tensor: Any) -> Weight | None:
        """The weight that a tensor is; None if it is no weight."""
        return self._found.get(id(tensor))

    def has_closed_form(self, tensor: Tensor) -> bool:
        """Whether something is known about how a weight was derived from parameters."""
        weight = self.find(tensor)
        return weight is not None and weight.derivation is not None

    def derive(self, func: Any, args: Any, kwargs: Any, weights: list[Weight]) -> Any:
        """Run an operation on weights alone; its results are weights."""
        name = getattr(func, "__name__", "")
        if torch.is_grad_enabled() and changes(name) and args[0] in self:
            raise UnsupportedLayer(
                f"{', '.join(roots_of(weights))}: {name} changes a weight in place while the model "
                "runs. Use the out-of-place operation."
            )
        with unpacked():
            out = func(*args, **kwargs)
        first = weights[0]
        for part in tensors_in(out):
            if not part.requires_grad or part in self:
                continue
            self._derived.append(part)
            if name in CASTING and part.shape == first.tensor.shape:
                self._found[id(part)] = first
                continue
            self.rounds = self.rounds or part.dtype in LOW_PRECISION
            roots = frozenset(roots_of(weights))
            rearranged = (
                len(weights) == 1
                and first.rearranged
                and name in REARRANGING
                and part.numel() == first.tensor.numel()
            )
            closed_form = None
            if len(roots) == len(weights) and not rearranged:
                closed_form = derivation(func, args, kwargs, part, self.find)
            self._found[id(part)] = Weight(part, roots, rearranged, closed_form)
        return out
