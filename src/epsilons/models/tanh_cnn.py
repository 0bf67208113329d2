"""The small convolutional network with tanh of Papernot et al. 2020 (Tempered Sigmoids)."""

from __future__ import annotations

import torch
from torch import nn


def tanh_cnn(channels: int = 1, size: int = 28, classes: int = 10) -> nn.Sequential:
    """Two convolutions and two linear layers with tanh (Papernot et al. 2020, Table 1).

    `channels` and `size` (width and height) of the images, `classes` to tell apart.

    Written for 28 × 28 images of one channel; other sizes only change the first linear layer.

    >>> sum(p.numel() for p in tanh_cnn().parameters())
    26010
    """
    features = nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
    )
    with torch.no_grad():
        width = features(torch.zeros(1, channels, size, size)).shape[1]
    return nn.Sequential(features, nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, classes))
