"""What to do when a pass does not fit into memory: take fewer examples at a time."""

from __future__ import annotations

import gc
import warnings

import torch

_OF_THE_CPU = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory")


def halved(error: Exception, size: int, when: str) -> int:
    """Half of `size` examples, for another try, and a warning.

    The error itself is raised if it is no lack of memory, or nothing is left to halve.
    """
    if not _out_of_memory(error) or size == 1:
        raise error
    _free_memory()
    warnings.warn(
        f"out of memory {when}: passes take at most {size // 2} examples from here on",
        RuntimeWarning,
        stacklevel=3,
    )
    return size // 2


def _out_of_memory(error: Exception) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_THE_CPU)


def _free_memory() -> None:
    """Give back what a failed pass still holds."""
    gc.collect()
    device = torch.get_device_module()
    if hasattr(device, "empty_cache"):
        device.empty_cache()
