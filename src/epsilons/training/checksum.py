"""A checksum of a tensor's bits, made where the tensor is: whether anything has changed it."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by bytes of a number; else 64-bit words


def checksum(tensor: Tensor) -> Tensor:
    """The sum of its numbers taken as integers, modulo 2⁶⁴; a tensor, so that nobody waits."""
    numbers = tensor.detach().reshape(-1)
    if numbers.dtype == torch.bool:
        numbers = numbers.byte()
    return numbers.view(_BITS.get(numbers.element_size(), torch.int64)).sum(dtype=torch.int64)
