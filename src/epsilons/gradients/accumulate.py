"""From parameter uses to every example's squared gradient norm, and to the clipped sum.

Uses that reach the same parameters form a group. A parameter used once is done the moment its
output gradient arrives; gradients of several uses are added before the norm is taken.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from epsilons.gradients.clip_factors import add_up, widest_dtype
from epsilons.gradients.compile import is_traced
from epsilons.gradients.parameter_use import ParameterUse
from epsilons.gradients.rules.derived import ClosedForm, Standardised
from epsilons.gradients.rules.registry import (
    LOW_PRECISION,
    GradientRule,
    Materialized,
    UnsupportedLayer,
    chunks,
    precise,
    square_norms,
    weighted,
    without_autocast,
)
from epsilons.gradients.rules.shared import combined
from epsilons.gradients.weights import Weight, roots_of

_KEEP_MATERIALIZED = 3.0  # times the operands' bytes
_HALF = 2**20
_CONTIGUOUS = torch.contiguous_format
_NARROW = 1024  # gradients of fewer numbers are put side by side, since every call costs
_Key = TypeVar("_Key")


class Group:
    """Uses whose parameters overlap, and must therefore be settled together."""

    def __init__(self, uses: list[ParameterUse]) -> None:
        self.uses = uses
        self.waiting = len(uses)
        self.direct = False  # whether there is nothing to pull back; known once it is settled
        self.closed_form: ClosedForm | None = None

    @property
    def weights(self) -> list[Weight]:
        return list(dict.fromkeys(u.weight for u in self.uses))

    @property
    def coarse(self) -> bool:
        """Whether sums can't be pulled back in float32: of bfloat16, float16 or complex weights."""
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
        self.squares = torch.zeros(count, dtype=widest_dtype(device), device=device)
        self.groups = _groups(uses)
        self._group_of = {id(u): group for group in self.groups for u in group.uses}
        self._kept: list[Group] = []
        self._found: list[Tensor] = []
        self._narrow: list[Weight] = []
        self._side_by_side: list[Tensor] = []  # their gradients (B, numbers); one tensor in the end

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
            self._side_by_side = [torch.cat(self._side_by_side, 1)]
            self._found.append(square_norms(self._side_by_side[0]))
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
        group.direct = _is_parameter(group) and _combine(group)
        if group.direct:
            (use,) = group.uses
            assert use.g is not None
            width = use.weight.tensor.numel()
            if width < _NARROW and use.rule.materializes(use.g):
                self._narrow.append(use.weight)
                gradients = precise(use.rule.gradients(use.g))
                self._side_by_side.append(gradients.reshape(len(use.g), width))
                use.g = None
                return
            self._materialize_if_small(use)
            self._found.append(use.rule.square_norms(use.g))
        else:
            self._standardised(group)
            for rows in self._by_example(group):
                for gradient in self._pulled_back(group, rows).values():
                    self.squares[rows] += square_norms(gradient)

    def _standardised(self, group: Group) -> None:
        """Take the norms of a standardised weight's gradients, where they don't cancel."""
        use = group.uses[0]
        derivation = use.weight.derivation
        if not isinstance(derivation, Standardised) or len(group.uses) > 1 or self.coarse:
            return
        assert use.g is not None
        products = derivation.products(use.rule, use.g)
        self._materialize_if_small(use)
        group.closed_form = derivation.closed_form(use.rule, use.g, products)
        squares, cancelled = group.closed_form.squares, group.closed_form.cancelled
        self.squares += squares.where(~cancelled, math.nan if is_traced(cancelled) else 0.0)

    def _by_example(self, group: Group) -> list[slice]:
        """The examples whose gradients are pulled back one by one, in ranges of one shape."""
        if group.closed_form is None:
            return chunks(len(self.squares), self._bytes(group))
        if is_traced(group.closed_form.cancelled):
            return []  # their norms are NaN, and they are done again
        cancelled = group.closed_form.cancelled.nonzero().flatten().tolist()
        return [slice(i, i + 1) for i in cancelled]

    def _materialize_if_small(self, use: ParameterUse) -> None:
        """Materialize what is kept for the clipped sum, if that takes little more memory: then the
        sum is one product, where the operands would have to be contracted a second time."""
        if not self.keep:
            return
        assert use.g is not None
        held = use.rule.data.nbytes if use.rule.data is not None else 0
        materialized = 4 * use.g.shape[0] * use.weight.tensor.numel()
        if materialized <= _KEEP_MATERIALIZED * (held + use.g.nbytes):
            use.rule, use.g = Materialized(), use.rule.gradients(use.g)

    def _bytes(self, group: Group) -> int:
        return 8 * sum(w.tensor.numel() for w in group.weights)

    def _pulled_back(self, group: Group, rows: slice) -> dict[str, Tensor]:
        """Some examples' gradients of every parameter of a group."""
        totals: dict[Weight, Tensor] = {}
        for use in group.uses:
            assert use.g is not None
            _add(totals, use.weight, use.rule.rows(rows).gradients(use.g[rows]))
        return self._to_parameters(totals, batched=True)

    def _to_parameters(self, totals: dict[Weight, Tensor], *, batched: bool) -> dict[str, Tensor]:
        """Gradients of parameters from those of weights; `batched`: by example, (B, …)."""
        result: dict[str, Tensor] = {}
        derived: list[Weight] = []
        for weight, total in totals.items():
            if weight.tensor.is_leaf or (weight.rearranged and not batched):
                (name,) = weight.roots
                _add(result, name, _in_parameter_order(weight.tensor, self.parameters[name], total))
            else:
                derived.append(weight)
        if derived:
            names = roots_of(derived)
            gradients = [totals[w].to(w.tensor.dtype) for w in derived]
            pulled = _vjp(
                [w.tensor for w in derived], [self.parameters[n] for n in names], gradients, batched
            )
            for name, gradient in zip(names, pulled, strict=True):
                if gradient is not None:  # autograd may return views, and sums are changed in place
                    own = gradient if batched else gradient.clone(memory_format=_CONTIGUOUS)
                    _add(result, name, precise(own))
        return result

    def clipped_sum(self, factors: Tensor, finite: Tensor | None) -> dict[str, Tensor]:
        """Σ_i factors_i · gradient_i by parameter, in the factors' dtype; factors: (B,).

        `finite` (B,) says whose gradients are; None: all. The others contribute nothing.
        """
        sums: dict[str, Tensor] = {}
        totals: dict[Weight, Tensor] = {}
        if finite is None or bool(finite.any()):
            if finite is not None:
                self._leave_out(~finite)
            with without_autocast(factors.device.type):
                for gradients in self._side_by_side:
                    widths = [weight.tensor.numel() for weight in self._narrow]
                    parts = torch.split(weighted(gradients, factors), widths)
                    for weight, part in zip(self._narrow, parts, strict=True):
                        totals[weight] = part.view(weight.tensor.shape)
                for group in self._kept:
                    self._add_clipped(group, factors, totals, sums)
                for name, part in self._to_parameters(totals, batched=False).items():
                    _add(sums, name, part)
        for name, p in self.parameters.items():
            if name not in sums:
                sums[name] = factors.new_zeros(p.shape)
        return {name: sums[name] for name in self.parameters}

    def _leave_out(self, excluded: Tensor) -> None:
        """Put another example's rows in the place of those that aren't finite: 0 · ∞ is no 0.

        The shapes stay as they are, and with them everyone else's bits.
        """
        rows = torch.arange(len(excluded), device=excluded.device)
        rows = rows.where(~excluded, rows[~excluded][0])
        self._side_by_side = [gradients[rows] for gradients in self._side_by_side]
        for use in (use for group in self._kept for use in group.uses):
            assert use.g is not None
            use.rule, use.g = use.rule.rows(rows), use.g[rows]
        for group in self._kept:
            if group.closed_form is not None:
                group.closed_form = group.closed_form.rows(rows)

    def _add_clipped(
        self, group: Group, factors: Tensor, totals: dict[Weight, Tensor], sums: dict[str, Tensor]
    ) -> None:
        """Add a group's weighted sum to those by weight or, where pulled back, by parameter."""
        exact = factors.dtype == torch.float64
        if group.closed_form is not None and exact:
            self._add_closed_form(group, group.closed_form, factors, totals, sums)
        elif group.coarse or ((exact or self.coarse) and not group.direct):
            # Pulling back rounds, so what is summed must be what was measured.
            for rows in chunks(len(factors), self._bytes(group)):
                self._add_pulled_back(group, rows, factors, sums)
        else:
            for use in group.uses:
                _add(totals, use.weight, _weighted_sum(use, factors))
        group.uses = []

    def _add_pulled_back(
        self, group: Group, rows: slice, factors: Tensor, sums: dict[str, Tensor]
    ) -> None:
        for name, gradient in self._pulled_back(group, rows).items():
            _add(sums, name, weighted(gradient, factors[rows]))

    def _add_closed_form(
        self,
        group: Group,
        found: ClosedForm,
        factors: Tensor,
        totals: dict[Weight, Tensor],
        sums: dict[str, Tensor],
    ) -> None:
        """Sum first and pull back then, in float64; what cancels is pulled back by itself."""
        for rows in self._by_example(group):
            self._add_pulled_back(group, rows, factors, sums)
        (use,) = group.uses
        kept = factors.where(~found.cancelled, 0.0)
        for weight, part in found.pulled_back(_weighted_sum(use, kept), kept):
            _add(totals, weight, part)


def _add(totals: dict[_Key, Tensor], key: _Key, part: Tensor) -> None:
    totals[key] = totals[key] + part if key in totals else part


def _weighted_sum(use: ParameterUse, factors: Tensor) -> Tensor:
    assert use.g is not None
    found = use.rule.weighted_sum(use.g, factors)
    if found.dtype != factors.dtype:  # a rule of the user's own, with a sum of its own
        return GradientRule.weighted_sum(use.rule, use.g, factors)
    return found


def _in_parameter_order(derived: Tensor, parameter: Tensor, total: Tensor) -> Tensor:
    """A sum for a parameter's entries in another order, in the parameter's order.

    The derivative of a permutation, applied to the numbers of the entries, gives where each went;
    in two halves, since float32 counts to 2²⁴ only.
    """
    if derived.is_leaf:
        return total
    numbers = torch.arange(total.numel(), device=total.device).view(total.shape)
    halves = [numbers // _HALF, numbers % _HALF]
    high, low = (
        _vjp([derived], [parameter], [half.to(derived.dtype)], batched=False)[0] for half in halves
    )
    assert high is not None
    assert low is not None
    return total.flatten()[high.long() * _HALF + low.long()]


def _no_gradients(group: Group, error: Exception) -> UnsupportedLayer:
    roots = roots_of(u.weight for u in group.uses)
    operations = sorted({u.operation for u in group.uses})
    reason = textwrap.shorten(str(error), 200, placeholder=" …")
    return UnsupportedLayer(
        f"{', '.join(roots)}: no gradients by example could be had from {', '.join(operations)} "
        f"({type(error).__name__}: {reason}). Write it with dense tensors and operations that "
        "torch.vmap knows, or register a rule for it (norm_rule)."
    )


def _coarse(weight: Weight) -> bool:
    low = weight.tensor.dtype in LOW_PRECISION or weight.tensor.is_complex()
    return low and not weight.tensor.is_leaf


def _is_parameter(group: Group) -> bool:
    """Whether there is one weight, and its gradient has the norm of the parameter's."""
    weight = group.uses[0].weight
    if not weight.rearranged or _coarse(weight):
        return False
    return len(group.uses) == 1 or all(u.weight is weight for u in group.uses)


def _combine(group: Group) -> bool:
    """Replace all uses of the group's only weight by one; say if that was possible."""
    if len(group.uses) == 1:
        return True
    pair = combined([(u.rule, u.g) for u in group.uses if u.g is not None])
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
