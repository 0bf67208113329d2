"""From the uses of weights to every example's squared gradient norm, and to the clipped sum.

Uses that reach the same parameters form a group. A parameter used once is settled the moment its
output gradient arrives; gradients of several uses are added before the norm is taken.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from epsilons.gradients.clip_factors import add_up
from epsilons.gradients.parameter_use import ParameterUse, Weight
from epsilons.gradients.rules.derived import Standardised
from epsilons.gradients.rules.registry import (
    LOW_PRECISION,
    Materialized,
    UnsupportedLayer,
    chunks,
    precise,
    square_norms,
    weighted,
    without_autocast,
)
from epsilons.gradients.rules.shared import joined

_KEEP_MATERIALIZED = 3.0  # times the operands' bytes
_NARROW = 1024  # gradients of fewer numbers are put side by side, since every call costs
_Key = TypeVar("_Key")


class Group:
    """Uses whose parameters overlap, and must therefore be settled together."""

    def __init__(self, uses: list[ParameterUse]) -> None:
        self.uses = uses
        self.waiting = len(uses)
        self.direct = False  # whether there is nothing to pull back; known once it is settled

    @property
    def weights(self) -> list[Weight]:
        return list(dict.fromkeys(u.weight for u in self.uses))

    @property
    def coarse(self) -> bool:
        """Whether pulling back to the parameters would round to bfloat16 or float16."""
        return any(_coarse(u.weight) for u in self.uses)


class Accumulator:
    """Receives uses during one backward pass; `squares` (B,) is complete when it ends."""

    def __init__(
        self,
        uses: Sequence[ParameterUse],
        parameters: dict[str, Tensor],
        count: int,
        *,
        keep: bool,
        coarse: bool,
    ) -> None:
        device = next(iter(parameters.values())).device
        self.parameters = parameters
        self.keep, self.coarse = keep, coarse
        self.squares = torch.zeros(count, dtype=torch.float64, device=device)
        self.groups = _groups(uses)
        self._group_of = {id(u): group for group in self.groups for u in group.uses}
        self._kept: list[Group] = []
        self._found: list[Tensor] = []
        self._narrow: list[Weight] = []
        self._side_by_side: list[Tensor] = []  # their gradients; one tensor in the end

    def receive(self, use: ParameterUse) -> None:
        group = self._group_of[id(use)]
        group.waiting -= 1
        if group.waiting == 0:
            self._settle(group)

    def finish(self) -> None:
        """Settle what waits for uses that the loss doesn't depend on, and add everything up."""
        for group in self.groups:
            if group.waiting:
                group.uses = [u for u in group.uses if u.g is not None]
                if group.uses:
                    self._settle(group)
        if self._narrow:
            together = torch.cat(self._side_by_side, 1)
            self._found.append(square_norms(together))
            self._side_by_side = [together] if self.keep else []
        add_up(self._found, self.squares)
        self._found.clear()

    def _settle(self, group: Group) -> None:
        try:
            self._take_norms(group)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError, TypeError) as error:
            raise _no_gradients(group, error) from error
        if self.keep and group.uses[0].g is not None:
            self._kept.append(group)
        else:
            group.uses = []

    def _take_norms(self, group: Group) -> None:
        group.direct = _is_parameter(group) and _join(group)
        if group.direct:
            self._settle_directly(group.uses[0])
        else:
            chosen = self._standardised(group)
            for rows in chunks(len(chosen), self._bytes(group)):
                some = chosen[rows]
                for gradient in self._pulled_back(group, some).values():
                    self.squares[some] += square_norms(gradient)

    def _settle_directly(self, use: ParameterUse) -> None:
        assert use.g is not None
        width, known = use.weight.tensor.numel(), use.rule.squares
        if known is None and width < _NARROW and use.rule.materializes(use.g):
            self._narrow.append(use.weight)
            gradients = precise(use.rule.gradients(use.g))
            if gradients.dim() != 2:
                gradients = gradients.reshape(use.g.shape[0], width)
            self._side_by_side.append(gradients)
            use.g = None
            return
        self._materialize_if_small(use)
        self._found.append(use.rule.square_norms(use.g) if known is None else known)

    def _standardised(self, group: Group) -> Tensor:
        """Settle by the closed form what can be; the indices of the examples that remain."""
        everyone = torch.arange(len(self.squares), device=self.squares.device)
        use = group.uses[0]
        derivation = use.weight.derivation
        if not isinstance(derivation, Standardised) or len(group.uses) > 1 or self.coarse:
            return everyone
        assert use.g is not None
        products = derivation.products(use.rule, use.g)
        self._materialize_if_small(use)
        squares, cancelled = derivation.square_norms(use.rule, use.g, products)
        self.squares += squares.where(~cancelled, 0.0)
        return everyone[cancelled]

    def _materialize_if_small(self, use: ParameterUse) -> None:
        """Form what is kept for the clipped sum, if it takes little more memory: then the sum is
        one product, where the operands would have to be contracted a second time."""
        if not self.keep:
            return
        assert use.g is not None
        held = use.rule.data.nbytes if use.rule.data is not None else 0
        materialized = 4 * use.g.shape[0] * use.weight.tensor.numel()
        if materialized <= _KEEP_MATERIALIZED * (held + use.g.nbytes):
            use.rule, use.g = Materialized(), use.rule.gradients(use.g)

    def _bytes(self, group: Group) -> int:
        return 8 * sum(w.tensor.numel() for w in group.weights)

    def _pulled_back(self, group: Group, rows: slice | Tensor) -> dict[str, Tensor]:
        """Some examples' gradients of every parameter of a group."""
        totals: dict[int, Tensor] = {}
        for use in group.uses:
            assert use.g is not None
            _add(totals, id(use.weight), use.rule.rows(rows).gradients(use.g[rows]))
        return self._to_parameters(group.weights, totals, batched=True)

    def _to_parameters(
        self, weights: Sequence[Weight], totals: dict[int, Tensor], *, batched: bool
    ) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        derived: list[Weight] = []
        for weight in weights:
            if id(weight) not in totals:
                continue
            if weight.tensor.is_leaf:
                (name,) = weight.roots
                result[name] = totals[id(weight)]
            else:
                derived.append(weight)
        if derived:
            names = sorted(set[str]().union(*(w.roots for w in derived)))
            gradients = [totals[id(w)].to(w.tensor.dtype) for w in derived]
            pulled = _vjp(
                [w.tensor for w in derived], [self.parameters[n] for n in names], gradients, batched
            )
            own = pulled if batched else _apart(pulled)
            for name, gradient in zip(names, own, strict=True):
                if gradient is not None:
                    _add(result, name, precise(gradient))
        return result

    def clipped_sum(self, factors: Tensor, everyone: bool) -> dict[str, Tensor]:
        """Σ_i factors_i · gradient_i by parameter; factors (B,), where 0 leaves an example out.

        Unless `everyone` is in, there may be such.
        """
        sums: dict[str, Tensor] = {}
        totals: dict[int, Tensor] = {}
        chosen = None if everyone else factors > 0
        if all(p.dtype != torch.float64 for p in self.parameters.values()):
            factors = factors.float()  # once for all
        with without_autocast(factors.device.type):
            weights = [*self._narrow, *(w for group in self._kept for w in group.weights)]
            if chosen is None or bool(chosen.any()):
                self._add_narrow(factors, chosen, totals)
                for group in self._kept:
                    self._add_clipped(group, factors, chosen, totals, sums)
            for name, part in self._to_parameters(weights, totals, batched=False).items():
                _add(sums, name, part)
        for name, p in self.parameters.items():
            if name not in sums:
                sums[name] = precise(torch.zeros_like(p, requires_grad=False))
        return {name: sums[name] for name in self.parameters}

    def _add_narrow(
        self, factors: Tensor, chosen: Tensor | None, totals: dict[int, Tensor]
    ) -> None:
        if not self._narrow:
            return
        (gradients,) = self._side_by_side
        if chosen is not None:
            gradients, factors = gradients[chosen], factors[chosen]
        total = weighted(gradients, factors)
        parts = torch.split(total, [w.tensor.numel() for w in self._narrow])
        for weight, part in zip(self._narrow, parts, strict=True):
            totals[id(weight)] = part.view(weight.tensor.shape)

    def _add_clipped(
        self,
        group: Group,
        factors: Tensor,
        chosen: Tensor | None,
        totals: dict[int, Tensor],
        sums: dict[str, Tensor],
    ) -> None:
        """Add a group's weighted sum to those by weight or, where pulled back, by parameter."""
        if group.coarse or (self.coarse and not group.direct):
            # Pulling back rounds, so what is summed must be what was measured.
            for rows in chunks(len(factors), self._bytes(group)):
                some = _where(chosen, rows, factors.device)
                for name, gradient in self._pulled_back(group, some).items():
                    _add(sums, name, weighted(gradient, factors[some]))
            return
        for use in group.uses:
            assert use.g is not None
            rule, g, its_factors = use.rule, use.g, factors
            if chosen is not None:
                rule, g, its_factors = rule.rows(chosen), g[chosen], factors[chosen]
            _add(totals, id(use.weight), rule.weighted_sum(g, its_factors))
        group.uses = []


def _add(totals: dict[_Key, Tensor], key: _Key, part: Tensor) -> None:
    totals[key] = totals[key] + part if key in totals else part


def _where(chosen: Tensor | None, rows: slice, device: torch.device) -> Tensor:
    indices = torch.arange(rows.start, rows.stop, device=device)
    return indices if chosen is None else indices[chosen[rows]]


def _no_gradients(group: Group, error: Exception) -> UnsupportedLayer:
    roots = sorted(set[str]().union(*(u.weight.roots for u in group.uses)))
    operations = sorted({u.operation for u in group.uses})
    reason = textwrap.shorten(str(error), 200, placeholder=" …")
    return UnsupportedLayer(
        f"{', '.join(roots)}: no gradients by example could be had from {', '.join(operations)} "
        f"({type(error).__name__}: {reason}). Write it with dense tensors and operations that "
        "torch.vmap knows, or register a rule for it (norm_rule)."
    )


def _coarse(weight: Weight) -> bool:
    return weight.tensor.dtype in LOW_PRECISION and not weight.tensor.is_leaf


def _is_parameter(group: Group) -> bool:
    """Whether there is one weight, and its gradient has the norm of the parameter's."""
    weight = group.uses[0].weight
    if not weight.rearranged or _coarse(weight):
        return False
    return len(group.uses) == 1 or all(u.weight is weight for u in group.uses)


def _join(group: Group) -> bool:
    """Leave one use that stands for all uses of the group's only weight, if that can be."""
    if len(group.uses) == 1:
        return True
    pair = joined([(u.rule, u.g) for u in group.uses if u.g is not None])
    if pair is None:
        return False
    group.uses = [ParameterUse(group.uses[0].weight, pair[0], group.uses[0].operation, pair[1])]
    return True


def _vjp(
    outputs: list[Tensor], inputs: list[Tensor], gradients: list[Tensor], batched: bool
) -> Sequence[Tensor | None]:
    if not batched:
        return torch.autograd.grad(outputs, inputs, gradients, retain_graph=True, allow_unused=True)
    try:
        return torch.autograd.grad(
            outputs, inputs, gradients, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except RuntimeError:  # a derivation that vmap can't follow: example by example
        each = [_vjp(outputs, inputs, list(row), False) for row in zip(*gradients, strict=True)]
        return [
            None if column[0] is None else torch.stack([c for c in column if c is not None])
            for column in zip(*each, strict=True)
        ]


def _apart(gradients: Sequence[Tensor | None]) -> Iterator[Tensor | None]:
    """Each in memory of its own, to be changed in place: autograd may give one for several."""
    taken = set[int]()
    for gradient in gradients:
        if gradient is None:
            yield None
            continue
        memory = gradient.untyped_storage()
        whole = memory.nbytes() == gradient.nbytes and memory.data_ptr() not in taken
        taken.add(memory.data_ptr())
        yield gradient if whole else gradient.clone(memory_format=torch.contiguous_format)


def _groups(uses: Sequence[ParameterUse]) -> list[Group]:
    by_root: dict[str, list[ParameterUse]] = {}
    for use in uses:
        if by_root.keys().isdisjoint(use.weight.roots):
            alone = [use]
            by_root.update(dict.fromkeys(use.weight.roots, alone))
            continue
        met = {id(by_root[r]): by_root[r] for r in use.weight.roots if r in by_root}
        group, *others = met.values()
        group += [use, *(u for members in others for u in members)]
        roots = use.weight.roots.union(*(u.weight.roots for members in others for u in members))
        by_root.update(dict.fromkeys(roots, group))
    distinct = {id(members): members for members in by_root.values()}
    return [Group(members) for members in distinct.values()]
