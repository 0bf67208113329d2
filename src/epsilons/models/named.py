"""Networks by name, made for the shape of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import nn

from epsilons.models.dense import logistic_regression, mlp
from epsilons.models.resnet import resnet20
from epsilons.models.tanh_cnn import tanh_cnn
from epsilons.models.wide_resnet import wide_resnet

_PICTURE_NETWORKS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "tanh_cnn": lambda channels, size, classes: tanh_cnn(channels, size, classes),
    "resnet20": lambda channels, size, classes: resnet20(channels, classes),
    "wrn16_4": lambda channels, size, classes: wide_resnet(16, 4, channels, classes),
}
NAMES = ("logistic", "mlp", *_PICTURE_NETWORKS)


def network(
    name: str, shape: Sequence[int], classes: int, *, hidden: Sequence[int] | None = None
) -> nn.Module:
    """A new network for inputs of `shape` and so many `classes`; `hidden` are the widths of an mlp.

    `name`: one of `logistic`, `mlp`, `tanh_cnn`, `resnet20` and `wrn16_4`, as in a settings file.
    `shape`: of one example. ValueError for a name that is not known, and inputs or widths that
    don't fit.

    >>> network("mlp", (64,), 10, hidden=[32])
    Sequential(
      (0): Flatten(start_dim=1, end_dim=-1)
      (1): Linear(in_features=64, out_features=32, bias=True)
      (2): ReLU()
      (3): Linear(in_features=32, out_features=10, bias=True)
    )
    """
    if name not in NAMES:
        raise ValueError(
            f"model={name!r} is not known; expected {', '.join(NAMES)} or python:module:function"
        )
    if hidden is not None and name != "mlp":
        raise ValueError(f"hidden={list(hidden)} are the widths of an mlp; model={name!r} has none")
    if name == "logistic":
        return logistic_regression(math.prod(shape), classes)
    if name == "mlp":
        return mlp(math.prod(shape), classes, *([] if hidden is None else [hidden]))
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ValueError(
            f"model={name!r} is for square pictures (channels, size, size); the inputs have shape "
            f"{tuple(shape)}. Use logistic or mlp."
        )
    return _PICTURE_NETWORKS[name](shape[0], shape[1], classes)
