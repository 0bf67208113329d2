"""Weights standardised before use: the norm of the pulled-back gradient in closed form.

Weight standardisation (Qiao et al. 2019; De et al. 2022; timm's StdConv2d) uses Ŵ_o = k_o·ŵ_o with
ŵ_o the row w_o less its mean, over its deviation. With R_o an example's gradient of Ŵ_o, F its
length, r_o the reciprocal deviation and q_o = ‖ŵ_o‖²/F, the chain rule gives

    ∂/∂w_o = k_o r_o (R_o − mean(R_o) − ŵ_o mean(ŵ_o·R_o)),   ∂/∂k_o = ⟨ŵ_o, R_o⟩
    ‖∂/∂w_o‖² = k_o² r_o² (‖R_o‖² − ⟨1, R_o⟩²/F − (2 − q_o)⟨ŵ_o, R_o⟩²/F)

so three sums over R_o stand for a pass of the derivative per example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.conv import Conv
from epsilons.gradients.rules.linear import CANCELLATION
from epsilons.gradients.rules.registry import GradientRule, chunks, square_norms


@dataclass(frozen=True)
class Standardised:
    """Ŵ = factor·ŵ by rows; `gain` is ∂factor/∂(trained gain), 0 if there is none."""

    rows: Tensor  # ŵ: (o, F)
    rstd: Tensor  # (o, 1)
    factor: Tensor  # (o, 1)
    gain: Tensor  # (o, 1)

    def products(self, rule: GradientRule, g: Tensor) -> tuple[Tensor, Tensor] | None:
        """⟨ŵ_o, R_o⟩ and ⟨1, R_o⟩ without R, (B, o) each; None where R is materialized anyway."""
        found = rule.filter_products(g) if isinstance(rule, Conv) else None
        return None if found is None else (found[0] / self.factor.squeeze(1), found[1])

    def square_norms(
        self, rule: GradientRule, g: Tensor, products: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Squared norms (B,) of a rule's pulled-back gradients, and where they cancelled."""
        scale = (self.factor * self.rstd).squeeze(1)
        if products is not None and isinstance(rule, Conv):
            squares = rule.square_norms(g * scale.view(-1, *[1] * (g.dim() - 3)))
        else:
            each = [
                self._by_filter(rule.rows(part).gradients(g[part]), products is None)
                for part in chunks(len(g), 8 * self.rows.numel())
            ]
            by_filter, *sums = (torch.cat(columns) for columns in zip(*each, strict=True))
            squares = (by_filter * scale.square()).sum(1)
            products = products or (sums[0], sums[1])
        along, totals = products
        share = 2 - self.rows.square().mean(1)
        lost = (totals.square() + share * along.square()) * scale.square()
        kept = squares - lost.sum(1) / self.rows.shape[1]
        gain = (self.gain.squeeze(1) * along).square().sum(1)
        return kept + gain, ~(kept >= CANCELLATION * squares)

    def _by_filter(self, r: Tensor, with_sums: bool) -> tuple[Tensor, ...]:
        """‖R_o‖², and if asked ⟨ŵ_o, R_o⟩ and ⟨1, R_o⟩, (B, o) each."""
        like = self.rows.view(r.shape[1:])
        each = tuple(range(2, r.dim()))
        squares = square_norms(r.flatten(0, 1)).view(r.shape[:2])
        if not with_sums:
            return (squares,)
        like = torch.empty_like(r[0]).copy_(like)  # as r lies in memory
        return squares, (r * like).sum(each), r.sum(each)


@dataclass(frozen=True)
class Scalar:
    """A trained factor per row: a parameter times a number."""

    scale: float


Derivation = Standardised | Scalar
Known = Callable[[Any], tuple[bool, Derivation | None]]


def derivation(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Tensor,
    known: Known,
) -> Derivation | None:
    """What is known about the result of an operation on weights; None if nothing special.

    `known(tensor)` says whether a tensor is a parameter (or its entries in another order), and
    what derivation it has otherwise.
    """
    name = getattr(function, "__name__", "")
    if function is F.layer_norm:
        return _layer_norm(*args, out=out, known=known, **kwargs)
    if name in ("view", "view_as", "reshape", "reshape_as", "unflatten", "contiguous"):
        shape = known(args[0])[1]
        kept = isinstance(shape, Standardised) and out.shape[0] == len(shape.rows)
        return shape if kept else None
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
    whole_rows = input.dim() == 2 and len(normalized_shape) == 1
    if not (known(input)[0] and whole_rows and weight is None and bias is None):
        return None
    rstd = (input.detach().var(1, correction=0, keepdim=True) + eps).rsqrt()
    return Standardised(out.detach(), rstd, torch.ones_like(rstd), torch.zeros_like(rstd))


def _product(left: Any, right: Any, known: Known) -> Derivation | None:
    parameter, shape = known(left)
    if isinstance(shape, Standardised):
        return _scaled(shape, right, known)
    if isinstance(right, (int, float)) and (parameter or isinstance(shape, Scalar)):
        return Scalar(right * (shape.scale if isinstance(shape, Scalar) else 1.0))
    return None


def _scaled(shape: Standardised, by: Any, known: Known) -> Standardised | None:
    if isinstance(by, Tensor) and by.shape != shape.factor.shape:
        return None
    if isinstance(by, (int, float)) or not by.requires_grad:
        return replace(shape, factor=shape.factor * by, gain=shape.gain * by)
    parameter, factor = known(by)
    scale = factor.scale if isinstance(factor, Scalar) else float(parameter)
    if not scale or bool(shape.gain.any()):
        return None
    return replace(shape, factor=shape.factor * by.detach(), gain=shape.factor * scale)
