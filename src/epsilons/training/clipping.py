"""From squared norms to the factors that clip: in host memory by one short compiled loop.

Between large kernels every call of torch's costs more than this arithmetic does.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import addressable, singles_at

NORM_ERROR = 2e-5  # twice the relative error that a norm may carry
_TINY = sys.float_info.min

_Doubles = NDArray[np.float64]


def clip_factors(squares: Tensor, bounds: float | Tensor) -> tuple[Tensor, Tensor, bool]:
    """Norms, and min(1, C_i / (‖g_i‖ · (1 + 2e-5))): (B,) float64, like the squares.

    0 where the norm is no number, or where norm and bound are both infinite. Whether nobody has 0
    comes last.
    """
    if not squares.is_cpu:
        norms = squares.sqrt()
        lengths = (norms * (1 + NORM_ERROR)).clamp_(min=_TINY)
        factors = (bounds / lengths).clamp_(max=1.0).nan_to_num_(nan=0.0)
        return norms, factors, bool((factors > 0).all())
    limits = np.array([bounds]) if isinstance(bounds, float) else bounds.numpy()
    norms, factors = torch.empty_like(squares), torch.empty_like(squares)
    everyone = _clip(squares.numpy(), limits, norms.numpy(), factors.numpy())
    return norms, factors, everyone


def add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """Add several (B,) to a total in double precision."""
    if any(part.shape != total.shape for part in parts):  # one each, never one for all
        shapes = {tuple(part.shape) for part in parts}
        raise RuntimeError(f"squared norms of shapes {shapes}; expected {tuple(total.shape)}")
    if not parts:
        return
    if all(addressable(part) and part.is_contiguous() for part in parts):
        places = np.array([part.data_ptr() for part in parts], np.int64)
        _add_singles(places, total.numpy())
    else:
        total += torch.stack(list(parts)).sum(0, dtype=total.dtype)


@njit(cache=True, nogil=True, error_model="numpy")
def _clip(squares: _Doubles, limits: _Doubles, norms: _Doubles, factors: _Doubles) -> bool:
    everyone = True
    for i in range(squares.size):
        norms[i] = math.sqrt(squares[i])
        length = norms[i] * (1 + NORM_ERROR)
        length = _TINY if length < _TINY else length
        factor = limits[i if limits.size > 1 else 0] / length
        factor = 1.0 if factor > 1.0 else factor
        factors[i] = factor if factor == factor else 0.0
        everyone = everyone and factors[i] > 0
    return everyone


@njit(cache=True, nogil=True, error_model="numpy")
def _add_singles(places: NDArray[np.int64], total: _Doubles) -> None:
    for place in places:
        part = singles_at(place, total.size)
        for i in range(total.size):
            total[i] += part[i]
