"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def logistic_regression(features: int, classes: int) -> nn.Sequential:
    """One linear layer on the flattened input (logistic regression under cross-entropy).

    `features`: how many numbers an input has. `classes`: how many outputs.
    """
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


def mlp(features: int, classes: int, hidden: Sequence[int] = (512, 512)) -> nn.Sequential:
    """A multi-layer perceptron with ReLU between its layers, on the flattened input.

    `features`: how many numbers an input has. `classes`: how many outputs. `hidden`: the widths of
    the layers between.

    >>> sum(p.numel() for p in mlp(784, 10).parameters())
    669706
    """
    layers: list[nn.Module] = [nn.Flatten()]
    width = features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))
