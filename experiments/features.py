"""Handcrafted features of small photographs: oriented gradients and colour, with no parameter.

Every constant is fixed here, none is learned or taken from the data: the features of one picture
are a function of that picture alone, so that they cost no privacy and a linear model on them
trains privately at full n on a CPU.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

DIRECTIONS = 8
CELL = 4  # pixels
ENERGY = 0.05  # a flat patch stays flat: contrast below it is not blown up
WIDTH = 1088


def features(pictures: Tensor) -> Tensor:
    """(n, 1088) features of pictures (n, 3, 32, 32) in [−1, 1]; of Euclidean norm 1.

    Half-wave rectified derivatives in eight directions, summed over overlapping cells and divided
    by the local contrast (Lowe 2004, Dalal and Triggs 2005), of brightness at two scales and of
    two colour contrasts at one; and the mean colour of each cell.
    """
    red, green, blue = pictures.unbind(1)
    brightness = (red + green + blue) / 3
    contrasts = [(red - green) / 2, (red + green) / 4 - blue / 2]
    parts = [_oriented(brightness), _oriented(_half(brightness))]
    parts += [_oriented(_half(contrast)) for contrast in contrasts]
    colours = torch.stack([brightness, *contrasts], 1)
    parts.append(F.avg_pool2d(colours, 2 * CELL, CELL, padding=CELL // 2).flatten(1))
    return F.normalize(torch.cat(parts, 1), dim=1)


def _oriented(plane: Tensor) -> Tensor:
    """(n, directions · cells) of planes (n, size, size)."""
    padded = F.pad(plane[:, None], (1, 1, 1, 1), mode="replicate")
    across = (padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]) / 2
    down = (padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]) / 2
    angles = [2 * math.pi * k / DIRECTIONS for k in range(DIRECTIONS)]
    rectified = torch.cat([F.relu(across * math.cos(a) + down * math.sin(a)) for a in angles], 1)
    cells = F.avg_pool2d(rectified, 2 * CELL, CELL, padding=CELL // 2)
    energy = F.avg_pool2d(cells.square().sum(1, keepdim=True), 3, 1, padding=1)
    return (cells / (energy + ENERGY**2).sqrt()).sqrt().flatten(1)


def _half(plane: Tensor) -> Tensor:
    return F.avg_pool2d(plane[:, None], 2)[:, 0]
