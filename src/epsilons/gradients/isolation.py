"""A pass over the data that leaves no trace: order, random generators and buffers.

Accounting on or off must not change a weight, so a pass that only measures draws from generators
of its own and puts back what the model's buffers held.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from epsilons.gradients.trees import swapped, tensors_in


@contextmanager
def undisturbed(model: nn.Module, device: torch.device, seed: int) -> Iterator[Callable[[], None]]:
    """Everything random starts from `seed` inside and goes on from where it was outside.

    Yields a function that puts the model's buffers back; it is also called on the way out.
    """
    known = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [
        (held, name, buffer, buffer.clone())
        for held, before in known
        for name, buffer in before.items()
        if buffer is not None
    ]
    versions = [buffer._version for _, _, buffer, _ in buffers]

    def restore() -> None:
        for i, (held, name, buffer, copy) in enumerate(buffers):
            if buffer._version != versions[i]:
                with torch.no_grad():
                    buffer.copy_(copy)
                versions[i] = buffer._version
            held[name] = buffer
        for held, before in known:
            for name in [name for name in held if before.get(name) is None]:
                if name in before:
                    held[name] = None
                else:
                    del held[name]

    with own_generators(device, seed):
        try:
            yield restore
        finally:
            restore()


@contextmanager
def own_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Torch, NumPy and Python draw from `seed` inside and go on from where they were outside."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 (other people's)
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        seed_generators(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (takes 32 bits)
    random.seed(seed)


def in_order(
    data: Any, batch_size: int, collate_fn: Callable[[list[Any]], Any]
) -> tuple[int, Iterator[Any]]:
    """How many examples there are, and their batches in dataset order."""
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} is not a number of examples; expected ≥ 1.")
    if isinstance(data, DataLoader):
        return len(_sequential(data).dataset), iter(data)  # type: ignore[arg-type]
    if isinstance(data, TensorDataset):
        data = data.tensors
    if _is_tensors(data):
        count = len(tensors_in(data)[0])
        if any(t.dim() == 0 or len(t) != count for t in tensors_in(data)):
            shapes = [tuple(t.shape) for t in tensors_in(data)]
            raise ValueError(
                f"data holds tensors of shapes {shapes}; expected equal first dimensions."
            )
        return count, (
            swapped(data, {id(t): t[start : start + batch_size] for t in tensors_in(data)})
            for start in range(0, count, batch_size)
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise TypeError(
            f"data is {type(data).__name__}; expected a map-style Dataset (with __len__ and "
            "__getitem__) or tensors. An iterable data set has no order to report norms in."
        )
    return len(data), (
        collate_fn(items(data, range(start, min(start + batch_size, len(data)))))
        for start in range(0, len(data), batch_size)
    )


def _is_tensors(data: Any) -> bool:
    leaves = list(data.values()) if isinstance(data, dict) else data
    if isinstance(data, Tensor):
        return True
    if not isinstance(leaves, (list, tuple)) or not leaves:
        return False
    return all(_is_tensors(leaf) for leaf in leaves) and not _is_pairs(data)


def _is_pairs(data: Any) -> bool:
    # A list of examples, such as [(x, y), …]: a data set by itself.
    return isinstance(data, list) and not isinstance(data[0], Tensor)


def items(data: Any, indices: Sequence[int]) -> list[Any]:
    """Examples as a pass over the data fetches them."""
    if hasattr(data, "__getitems__"):
        return list(data.__getitems__(list(indices)))
    return [data[i] for i in indices]


def _sequential(loader: DataLoader[Any]) -> DataLoader[Any]:
    in_sequence = (
        isinstance(loader.sampler, SequentialSampler)
        and (loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler)
        and not loader.drop_last
    )
    if not in_sequence:
        raise ValueError(
            "the DataLoader shuffles, samples or drops examples, so its norms could not be put in "
            "dataset order. Pass the data set itself, or a loader with shuffle=False and "
            "drop_last=False."
        )
    return loader
