"""Weights standardised before use: the norm of the pulled-back gradient in closed form.

Weight standardisation (Qiao et al. 2019; De et al. 2022; timm's StdConv2d) uses Ŵ_o = k_o·ŵ_o with
ŵ_o the row w_o less its mean, over its deviation. With R_o an example's gradient of Ŵ_o, F its
length, r_o the reciprocal deviation and q_o = ‖ŵ_o‖²/F, the chain rule gives

    ∂/∂w_o = k_o r_o (R_o − mean(R_o) − ŵ_o mean(ŵ_o·R_o)),   ∂/∂k_o = ⟨ŵ_o, R_o⟩
    ‖∂/∂w_o‖² = k_o² r_o² (‖R_o‖² − ⟨1, R_o⟩²/F − (2 − q_o)⟨ŵ_o, R_o⟩²/F)

so three sums over R_o stand for a pass of the derivative per example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.contractions import CANCELLATION
from epsilons.gradients.rules.conv import Conv
from epsilons.gradients.rules.registry import GradientRule, chunks, square_norms

if TYPE_CHECKING:
    from epsilons.gradients.weights import Weight


Products = tuple[Tensor, Tensor, Tensor]
_LARGEST = 20.0  # times the gradient: terms of sums whose rounding doesn't show in its norm


@dataclass(frozen=True)
class ClosedForm:
    """What was found about the gradients of a standardised weight, by example."""

    derivation: Standardised
    squares: Tensor  # of the pulled-back gradients: (B,)
    cancelled: Tensor  # where they aren't to be trusted: (B,)
    along: Tensor  # ⟨ŵ_o, R_o⟩: (B, o)
    totals: Tensor  # ⟨1, R_o⟩: (B, o)

    def rows(self, chosen: Tensor) -> ClosedForm:
        """The same for some of the examples."""
        columns = (self.squares, self.cancelled, self.along, self.totals)
        return ClosedForm(self.derivation, *(column[chosen] for column in columns))

    def pulled_back(self, total: Tensor, factors: Tensor) -> Iterator[tuple[Weight, Tensor]]:
        """Sums for w and the gain, from `total` Σ_i factors_i R_i; in the factors' dtype.

        Both are linear in R, so that the sums of ⟨ŵ, R⟩ and ⟨1, R⟩ stand for those of R.
        """
        its = self.derivation
        along, ones = (
            (factors @ column.to(factors.dtype)).unsqueeze(1)
            for column in (self.along, self.totals)
        )
        rows, length = its.rows.to(factors.dtype), its.rows.shape[1]
        scale = its.factor.to(factors.dtype) * its.rstd.to(factors.dtype)
        centred = total.reshape(rows.shape) - ones / length - rows * (along / length)
        yield its.source, centred.mul_(scale)
        if its.gain_source is not None:
            gain = its.gain.to(factors.dtype) * along
            yield its.gain_source, gain.view(its.gain_source.tensor.shape)


@dataclass(frozen=True)
class Standardised:
    """Ŵ = factor·ŵ by rows; `gain` is ∂factor/∂(trained gain), 0 if there is none."""

    source: Weight  # w: (o, F)
    rows: Tensor  # ŵ: (o, F)
    rstd: Tensor  # (o, 1)
    factor: Tensor  # (o, 1)
    gain: Tensor  # (o, 1)
    gain_source: Weight | None = None

    def products(self, rule: GradientRule, g: Tensor) -> Products | None:
        """⟨ŵ_o, R_o⟩, ⟨1, R_o⟩ and what their rounding is relative to, without R: (B, o) each.

        None where R is materialized anyway.
        """
        factor = self.factor.squeeze(1)
        lengths = factor.abs() * self.rows.shape[1] ** 0.5
        found = rule.filter_products(g, lengths) if isinstance(rule, Conv) else None
        return None if found is None else (found[0] / factor, *found[1:])

    def closed_form(self, rule: GradientRule, g: Tensor, products: Products | None) -> ClosedForm:
        """Squared norms of a rule's pulled-back gradients, and where they cancelled."""
        scale = (self.factor * self.rstd).squeeze(1)
        if products is not None and isinstance(rule, Conv):
            along, totals, size = products
            squares = rule.square_norms(g * scale.view(-1, *[1] * (g.dim() - 3)))
        else:
            each = [
                self._by_filter(rule.rows(part).gradients(g[part]))
                for part in chunks(len(g), 8 * self.rows.numel())
            ]
            by_filter, along, totals = (torch.cat(columns) for columns in zip(*each, strict=True))
            squares = (by_filter * scale.square()).sum(1)
            size = torch.zeros_like(along)
        share, mean = 2 - self.rows.square().mean(1), self.rows.mean(1)
        lost = totals.square() + share * along.square() - 2 * mean * along * totals
        lost = lost * scale.square()
        kept = squares - lost.sum(1) / self.rows.shape[1]
        gain = (self.gain.squeeze(1) * along).square().sum(1)
        rounded = (size * scale).square().sum(1) > _LARGEST**2 * kept
        cancelled = ~(kept >= CANCELLATION * squares) | rounded
        return ClosedForm(self, kept + gain, cancelled, along, totals)

    def _by_filter(self, r: Tensor) -> tuple[Tensor, ...]:
        """‖R_o‖², ⟨ŵ_o, R_o⟩ and ⟨1, R_o⟩, (B, o) each."""
        squares = square_norms(r.flatten(0, 1)).view(r.shape[:2])
        entries = tuple(range(2, r.dim()))
        return squares, (r * self.rows.view(r.shape[1:])).sum(entries), r.sum(entries)


@dataclass(frozen=True)
class Scalar:
    """A trained factor per row: a parameter times a number."""

    source: Weight
    scale: float


Derivation = Standardised | Scalar
Known = Callable[[Any], "Weight | None"]


def derivation(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Tensor,
    known: Known,
) -> Derivation | None:
    """What is known about the result of an operation on weights; None if nothing special.

    `known(tensor)` gives a tensor's `Weight`, if it is one.
    """
    name = getattr(function, "__name__", "")
    if function is F.layer_norm:
        return _layer_norm(*args, out=out, known=known, **kwargs)
    if name in ("view", "view_as", "reshape", "reshape_as", "unflatten", "contiguous"):
        weight = known(args[0])
        found = None if weight is None else weight.derivation
        kept = isinstance(found, Standardised) and out.shape[0] == len(found.rows)
        return found if kept else None
    if name in ("mul", "__mul__", "__rmul__") and len(args) == 2:
        return _product(args[0], args[1], known) or _product(args[1], args[0], known)
    return None


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    out: Tensor,
    known: Known,
) -> Standardised | None:
    source = known(input)
    whole_rows = input.dim() == 2 and len(normalized_shape) == 1 and weight is None and bias is None
    if source is None or not source.rearranged or not whole_rows:
        return None
    rstd = (input.detach().var(1, correction=0, keepdim=True) + eps).rsqrt()
    return Standardised(source, out.detach(), rstd, torch.ones_like(rstd), torch.zeros_like(rstd))


def _product(left: Any, right: Any, known: Known) -> Derivation | None:
    weight = known(left)
    if weight is None:
        return None
    if isinstance(weight.derivation, Standardised):
        return _scaled(weight.derivation, right, known)
    if isinstance(right, (int, float)):
        if isinstance(weight.derivation, Scalar):
            return replace(weight.derivation, scale=right * weight.derivation.scale)
        return Scalar(weight, right) if weight.rearranged else None
    return None


def _scaled(standardised: Standardised, by: Any, known: Known) -> Standardised | None:
    if isinstance(by, Tensor) and by.shape != standardised.factor.shape:
        return None
    if isinstance(by, (int, float)) or not by.requires_grad:
        factor, gain = standardised.factor * by, standardised.gain * by
        return replace(standardised, factor=factor, gain=gain)
    weight = known(by)
    if weight is None or standardised.gain_source is not None:
        return None
    found = weight.derivation
    scalar = found if isinstance(found, Scalar) else Scalar(weight, float(weight.rearranged))
    if not scalar.scale:
        return None
    return replace(
        standardised,
        factor=standardised.factor * by.detach(),
        gain=standardised.factor * scalar.scale,
        gain_source=scalar.source,
    )
