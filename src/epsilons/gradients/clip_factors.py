"""From squared norms to the factors that clip."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import threshold

from epsilons.accounting.sums import NORM_ERROR
from epsilons.gradients.compile import is_traced

_TINY = sys.float_info.min


@functools.cache
def widest_dtype(device: torch.device) -> torch.dtype:
    """float64; float32 on a device without it."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def clip_factors(squares: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Norms, and min(1, C_i / (‖g_i‖ · (1 + 1e-4))): (B,), of the widest dtype, like the squares.

    0 where the norm is not finite. Which norms are comes last, (B,); None if all, and in a graph.
    """
    norms = squares.sqrt()
    upper = (norms * (1 + NORM_ERROR)).clamp_(min=_TINY)
    factors = (bounds / upper).clamp_(max=1.0).nan_to_num_(nan=0.0)
    # a subnormal factor has few digits, and may be larger than it should be
    factors = threshold(factors, torch.finfo(factors.dtype).tiny, 0.0)
    finite = norms.isfinite()
    if is_traced(finite) or bool(finite.all()):
        return norms, factors, None
    return norms, factors.where(finite, 0.0), finite


def add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """Add several (B,) to a total in float64."""
    if any(part.shape != total.shape for part in parts):  # one each, never one for all
        shapes = {tuple(part.shape) for part in parts}
        raise RuntimeError(f"squared norms of shapes {shapes}; expected {tuple(total.shape)}")
    if parts:
        total += torch.stack(list(parts)).sum(0, dtype=total.dtype)
