"""Filters that walk over images in any way, and their gradients tap by tap."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from epsilons.gradients.rules.contractions import Geometry

SAME = Geometry((3, 3), (1, 1), (1, 1), (1, 1), 1)


@st.composite
def walks(draw, stride=3, groups=2):
    """Geometry, input size and output size: padding in front, and any padding behind."""
    kernel, stride, before, after, dilation = (
        (draw(st.integers(low, high)), draw(st.integers(low, high)))
        for low, high in ((1, 5), (1, stride), (0, 4), (0, 4), (1, 3))
    )
    size = (draw(st.integers(1, 13)), draw(st.integers(1, 13)))
    out = tuple(
        (n + b + a - d * (k - 1) - 1) // s + 1
        for n, k, s, b, a, d in zip(size, kernel, stride, before, after, dilation, strict=True)
    )
    geometry = Geometry(kernel, stride, before, dilation, draw(st.integers(1, groups)))
    return geometry, size, out


def slowly(source, grads, geometry):
    """Σ_t g_t p_tᵀ in float64, tap by tap."""
    (tall, wide), (down, across), (above, left), (dy, dx), groups = geometry
    rows, columns = grads.shape[2:]
    below = (rows - 1) * down + (tall - 1) * dy + 1 - above - source.shape[2]
    right = (columns - 1) * across + (wide - 1) * dx + 1 - left - source.shape[3]
    padded = F.pad(source.double(), (left, max(0, right), above, max(0, below)))
    n, c, o = len(source), source.shape[1] // groups, grads.shape[1] // groups
    g = grads.double().reshape(n, groups, o, -1)
    found = torch.empty(n, groups, o, c, tall, wide, dtype=torch.float64)
    for i in range(tall):
        for j in range(wide):
            y, x = i * dy, j * dx
            seen = padded[:, :, y : y + (rows - 1) * down + 1 : down]
            seen = seen[..., x : x + (columns - 1) * across + 1 : across]
            found[..., i, j] = g @ seen.reshape(n, groups, c, -1).mT
    return found.view(n, groups * o, c, tall, wide)
