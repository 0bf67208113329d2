"""ParameterUse: one weight in one operation on data, and the rule for its gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from epsilons.gradients.batch_dim.dims import BatchDim, examples_first
from epsilons.gradients.operations import ELEMENTWISE
from epsilons.gradients.rules import RULES, GradientRule
from epsilons.gradients.rules.conv import Conv
from epsilons.gradients.rules.derived import Standardised
from epsilons.gradients.rules.fallback import fallback
from epsilons.gradients.trees import swapped, tensors_in
from epsilons.gradients.weights import Weight


@dataclass(eq=False)
class ParameterUse:
    """One weight in one operation."""

    weight: Weight
    rule: GradientRule
    operation: str
    g: Tensor | None = None  # the output gradient, examples first; known in the backward pass


def parameter_uses(
    func: Any,
    args: Any,
    kwargs: Any,
    data: Sequence[tuple[Tensor, BatchDim]],
    weights: Mapping[int, Weight],
    out: Tensor,
    batch_dim: BatchDim,
    count: int,
) -> list[ParameterUse]:
    """The uses of an operation that ran with its weights detached.

    `weights` are those of the detached tensors, by id; `batch_dim` is the output's.
    """
    detached = [t.detach() for t, _ in data]
    rows = [examples_first(t, at, count) for t, (_, at) in zip(detached, data, strict=True)]
    rules = None
    if not any(t.is_complex() for t in (*detached, out)):
        rules = _registered(func, args, kwargs, data, weights, rows)
    if rules is None:
        # The operation is kept to be run again: without the graph of its data.
        ungraphed = {id(t): d for (t, _), d in zip(data, detached, strict=True)}
        args, kwargs = swapped(args, ungraphed), swapped(kwargs, ungraphed)
        used = {id(t): t for t in tensors_in((args, kwargs)) if id(t) in weights}
        pairs = list(zip(detached, rows, strict=True))
        rules = [
            (tensor, fallback(func, args, kwargs, pairs, tensor, batch_dim, out, count))
            for tensor in used.values()
        ]
    name = getattr(func, "__name__", str(func))
    uses = [ParameterUse(weights[id(tensor)], rule, name) for tensor, rule in rules]
    for use in uses:
        if isinstance(use.rule, Conv) and isinstance(use.weight.derivation, Standardised):
            use.rule.keep(examples_first(out.detach(), batch_dim, count))
    return uses


def _registered(
    func: Any,
    args: Any,
    kwargs: Any,
    data: Sequence[tuple[Tensor, BatchDim]],
    weights: Mapping[int, Weight],
    rows: Sequence[Tensor],
) -> list[tuple[Tensor, GradientRule]] | None:
    """What a registered rule says of each weight; None if there is none for all of them."""
    if func not in RULES:
        return None
    build, argument = RULES[func]
    subject = args[0] if args else kwargs.get(argument)
    if argument is not None and (len(data) > 1 or data[0][0] is not subject):
        return None
    if getattr(func, "__name__", "") in ELEMENTWISE:
        along = data[0][1].dim - data[0][0].dim()  # from behind, as shapes are broadcast
        if any(_varies(weight.tensor, along) for weight in weights.values()):
            return None
    replacements = {id(t): row for (t, _), row in zip(data, rows, strict=True)}
    found = list(build(*swapped(args, replacements), **swapped(kwargs, replacements)))
    rules = [(tensor, rule) for tensor, rule in found if id(tensor) in weights]
    return rules if {id(tensor) for tensor, _ in rules} >= set(weights) else None


def _varies(weight: Tensor, along: int) -> bool:
    return weight.dim() >= -along and weight.shape[along] != 1
