"""The way back through layer norm by a compiled loop, in host memory.

Torch's own kernel adds up what γ and β receive from all examples, and doesn't give it by example.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from epsilons.training.compiled import reordered
from epsilons.training.threads import go_through, share_out

_Floats = NDArray[Any]


def layer_norm_back(
    x: Tensor, g: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """∂/∂x (B, T, d), and ∂/∂γ = Σ_t x̂_t g_t and ∂/∂β = Σ_t g_t by example (B, d).

        ∂/∂x_t = r_t (γg_t − mean(γg_t) − x̂_t · mean(γg_t x̂_t)),      x̂_t = r_t (x_t − μ_t)

    x and g (B, T, d), μ and r (B, T), in single precision, T ≤ `outer.MOST_PLACES`.
    """
    n, _, d = x.shape
    dx, scale, shift = x.new_empty(x.shape), x.new_empty(n, d), x.new_empty(n, d)
    gamma = x.new_ones(d) if weight is None else weight
    share_out(n, _some, _at_once, x, g, mean, rstd, gamma, dx, scale, shift)
    return dx, scale, shift


@reordered()
def _at_once(threads: int, count: int, *operands: Any) -> Any:
    return go_through(_some, threads, count, operands)


@reordered()
def _some(
    first: int,
    last: int,
    x: _Floats,
    g: _Floats,
    mean: _Floats,
    rstd: _Floats,
    gamma: _Floats,
    dx: _Floats,
    scale: _Floats,
    shift: _Floats,
) -> None:
    places, width = x.shape[1:]
    share = x.dtype.type(1.0 / width)
    for i in range(first, last):
        for j in range(width):
            scale[i, j] = shift[i, j] = 0
        for t in range(places):
            m, r = mean[i, t], rstd[i, t]
            total = product = x.dtype.type(0)
            for j in range(width):
                standard = (x[i, t, j] - m) * r
                total += gamma[j] * g[i, t, j]
                product += gamma[j] * g[i, t, j] * standard
                scale[i, j] += standard * g[i, t, j]
                shift[i, j] += g[i, t, j]
            total, product = total * share, product * share
            for j in range(width):
                standard = (x[i, t, j] - m) * r
                dx[i, t, j] = r * (gamma[j] * g[i, t, j] - total - standard * product)
