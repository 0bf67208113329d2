"""Wide residual networks with group normalisation and weight standardisation (De et al. 2022)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StandardisedConv2d(nn.Conv2d):
    """A convolution whose filters have mean 0 and square sum gain² (Qiao et al. 2019).

        Ŵ_o = gain_o · (W_o − mean W_o) / √(fan_in · var W_o + 1e-4)

    De et al. 2022 take the maximum with 1e-4 where this adds it.
    """

    def __init__(
        self, width_in: int, width: int, kernel: int, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(width_in, width, kernel, stride, padding)
        self.gain = nn.Parameter(torch.ones(width, 1))

    def forward(self, input: Tensor) -> Tensor:
        flat = self.weight.flatten(1)
        fan_in = flat.shape[1]
        scaled = F.layer_norm(flat, (fan_in,), eps=1e-4 / fan_in) * (self.gain * fan_in**-0.5)
        return F.conv2d(input, scaled.view_as(self.weight), self.bias, self.stride, self.padding)


class PreActivationBlock(nn.Module):
    """Normalise, activate, convolve, twice; a 1 × 1 convolution as shortcut where shapes differ."""

    def __init__(self, width_in: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width_in)
        self.conv1 = StandardisedConv2d(width_in, width, 3, stride, padding=1)
        self.norm2 = nn.GroupNorm(groups, width)
        self.conv2 = StandardisedConv2d(width, width, 3, padding=1)
        self.shortcut: nn.Module | None = None
        if stride != 1 or width_in != width:
            self.shortcut = StandardisedConv2d(width_in, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(active)
        out: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return out + shortcut


class WideResNet(nn.Module):
    """Depth 6·blocks + 4, `factor` times as wide as a ResNet.

    `blocks` per stage. `channels` of the images, `classes` to tell apart, `groups` of each
    GroupNorm.
    """

    def __init__(self, blocks: int, factor: int, channels: int, classes: int, groups: int) -> None:
        super().__init__()
        self.conv = StandardisedConv2d(channels, 16, 3, padding=1)
        stages: list[nn.Module] = []
        width_in = 16
        for width, first_stride in ((16 * factor, 1), (32 * factor, 2), (64 * factor, 2)):
            for number in range(blocks):
                stride = first_stride if number == 0 else 1
                stages.append(PreActivationBlock(width_in, width, stride, groups))
                width_in = width
        self.stages = nn.Sequential(*stages)
        self.norm = nn.GroupNorm(groups, width_in)
        self.head = nn.Linear(width_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(self.stages(self.conv(x))))
        logits: Tensor = self.head(out.mean((2, 3)))
        return logits


def wide_resnet(
    depth: int = 16, factor: int = 4, channels: int = 3, classes: int = 10, groups: int = 16
) -> WideResNet:
    """WRN-depth-factor as De et al. 2022 train it privately; the default is WRN16-4.

    `depth`: 6·blocks + 4, else ValueError. `factor`: how many times as wide as a ResNet. `channels`
    of the images, `classes` to tell apart; `groups` of each GroupNorm.

    >>> sum(p.numel() for p in wide_resnet().parameters())
    2753402
    """
    if (depth - 4) % 6:
        raise ValueError(f"depth={depth} has no whole number of blocks; expected 6·blocks + 4.")
    return WideResNet((depth - 4) // 6, factor, channels, classes, groups)
