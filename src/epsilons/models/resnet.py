"""The small residual networks of He et al. 2016 for 32 × 32 images, with group normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions around a shortcut without parameters (He et al. 2016, option A)."""

    def __init__(self, width_in: int, width: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(groups, width)
        self.stride, self.extra = stride, width - width_in

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if self.extra:
            half = self.extra // 2
            shortcut = F.pad(shortcut, (0, 0, 0, 0, half, self.extra - half))
        return F.relu(out + shortcut)


class ResNet(nn.Module):
    """Three stages of `blocks` blocks each, of 16, 32 and 64 channels.

    `channels` of the images, `classes` to tell apart, `groups` of each GroupNorm.
    """

    def __init__(self, blocks: int, channels: int, classes: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(groups, 16)
        stages: list[nn.Module] = []
        width_in = 16
        for width, first_stride in ((16, 1), (32, 2), (64, 2)):
            for number in range(blocks):
                stride = first_stride if number == 0 else 1
                stages.append(BasicBlock(width_in, width, stride, groups))
                width_in = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(width_in, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.stages(F.relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(out.mean((2, 3)))
        return logits


def resnet20(channels: int = 3, classes: int = 10, groups: int = 8) -> ResNet:
    """ResNet20 (He et al. 2016, Section 4.2) with GroupNorm where it had BatchNorm.

    `channels` of the images, `classes` to tell apart; `groups` of each GroupNorm.

    >>> sum(p.numel() for p in resnet20().parameters())
    269722
    """
    return ResNet(3, channels, classes, groups)
