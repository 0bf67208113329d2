"""What makes two calls the same run: plan, data set and model."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

from epsilons.accounting.plan import Plan
from epsilons.examples import Examples

_PROBES = 32  # examples of a data set that are looked at where it is not made of tensors


def identity(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, examples: Examples
) -> dict[str, str]:
    """Plain values by name, such that another plan, data set or model differs in one of them."""
    parameters = {
        f"model {name}": f"{tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    }
    constants = {f"plan {name}": json.dumps(value) for name, value in plan.to_dict().items()}
    return {
        **constants,
        "model": type(model).__name__,
        **parameters,
        "optimizer": type(optimizer).__name__,
        "data set": data_digest(data),
        "ids": _digest([np.asarray(examples.ids).tobytes()]),
    }


def difference(then: dict[str, str], now: dict[str, str]) -> str:
    """The first few differences in words; empty if there are none."""
    changed = [
        f"{name} was {then.get(name, 'not there')} and is {now.get(name, 'not there')}"
        for name in sorted(then.keys() | now.keys())
        if then.get(name) != now.get(name)
    ]
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    return ", ".join(changed[:3]) + more


def data_digest(data: Dataset[Any]) -> str:
    """SHA-256 of all tensors of a data set, or of some of its examples if it is of other kinds.

    A data set that gives an example differently each time it is asked is known by its length.
    """
    if isinstance(data, TensorDataset):
        return _digest(_bytes(tensor) for tensor in data.tensors)
    n = len(data)  # type: ignore[arg-type]
    first, second = _probed(data, n), _probed(data, n)
    return first if first == second else f"{n} examples, drawn anew at each look"


def _probed(data: Dataset[Any], n: int) -> str:
    probes = np.unique(np.linspace(0, n - 1, min(n, _PROBES)).astype(int))
    leaves = (leaf for index in probes for leaf in tree_leaves(data[int(index)]))
    return _digest([str(n).encode(), *(_bytes(leaf) for leaf in leaves)])


def _bytes(leaf: object) -> bytes:
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    return leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode()


def _digest(parts: Any) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.hexdigest()
