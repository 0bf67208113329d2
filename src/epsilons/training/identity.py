"""What makes two calls the same run: plan, data set and model; and two records the same record.

Another loss is no other run, and is warned of.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, TensorDataset

from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.training.distributed import ALONE, Ranks
from epsilons.training.owners import OwnedRecords

LOSS = "loss_fn"  # a change of it is warned of, the others are refused
_BUDGETS = "budgets of examples"
# Constants of a plan that runs of an earlier version don't have, and which were as by default.
_LATER = {
    "unit", "norm_storage", "adaptive",
    "budgets", "pace", "slack", "order", "reserve_mu", "reserve_distance",
}  # fmt: skip
_HEX = 32  # hexadecimal digits of a record's digest
_PROBES = 32  # examples compared of a data set that is not made of tensors


def identity(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, examples: Examples
) -> dict[str, str]:
    """Plain values by name, such that another plan, data set or model differs in one of them."""
    parameters = {
        f"model {name}": f"{tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in model.named_parameters()
    }
    as_before = {f.name: f.default for f in dataclasses.fields(plan) if f.name in _LATER}
    constants = {
        f"plan {name}": json.dumps(value)
        for name, value in plan.to_dict().items()
        if name not in as_before or value != as_before[name]
    }
    return {
        **constants,
        "model": type(model).__name__,
        **parameters,
        "optimizer": type(optimizer).__name__,
        "data set": data_digest(data),
        "ids": _digest([np.asarray(examples.ids).tobytes()]),
        **_choices(plan, examples),
    }


def _choices(plan: Plan, examples: Examples) -> dict[str, str]:
    """Who has which budget: fixed before the first step, since one chosen later is no promise."""
    if len(plan.budgets) < 2:
        return {}
    return {_BUDGETS: _digest([np.asarray(examples.budgets, dtype=np.float64).tobytes()])}


def loss_identity(loss_fn: Callable[..., Any]) -> str:
    """Qualified name of a loss, and a digest of its source and of what it was made with."""
    return f"{_kind(loss_fn)} {_digest(_sources(loss_fn))[:16]}"


def _sources(part: Any, depth: int = 3) -> Iterator[bytes]:
    """Names and sources of functions and objects, and the constants that they hold."""
    if isinstance(part, bool | int | float | str | None):
        yield repr(part).encode()
    elif callable(part) and depth:
        yield _kind(part).encode()
        with suppress(OSError, TypeError):  # typed in, or written in C
            yield inspect.getsource(part if inspect.isfunction(part) else type(part)).encode()
        with suppress(ValueError):  # a variable of the closure that has no value yet
            for constant in _constants(part):
                yield from _sources(constant, depth - 1)


def _constants(part: Any) -> list[Any]:
    """What a partial, a closure or an object was made with."""
    if isinstance(part, functools.partial):
        return [part.func, *part.args, *part.keywords, *part.keywords.values()]
    if inspect.isfunction(part):
        return list(inspect.getclosurevars(part).nonlocals.values())
    settings = getattr(part, "__dict__", {})
    return [settings[name] for name in sorted(settings) if name[0] != "_" and name != "training"]


def _kind(part: Any) -> str:
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}.{named.__qualname__}"


def difference(then: dict[str, str], now: dict[str, str], besides: str) -> str:
    """The first few differences in words, besides one; empty if there are none."""
    changed = [
        "examples have other budgets now"  # a digest of them is no one's to see
        if name == _BUDGETS
        else f"{name} was {then.get(name, 'not there')} and is {now.get(name, 'not there')}"
        for name in sorted((then.keys() | now.keys()) - {besides})
        if then.get(name) != now.get(name)
    ]
    more = f", and {len(changed) - 3} more" if len(changed) > 3 else ""
    return ", ".join(changed[:3]) + more


def expect_one_call(ranks: Ranks, me: dict[str, str], given: dict[str, Any]) -> None:
    """ValueError unless all processes train the same, by the same call."""
    every = ranks.together(lambda: me | {name: repr(value) for name, value in given.items()})
    for rank, its in enumerate(every):
        if changed := difference(every[0], its, besides=LOSS):
            raise ValueError(
                f"rank {rank} trains something else than rank 0, so that they can't share a run: "
                f"{changed}. All ranks make the same call, with the whole data set"
            )


def data_digest(data: Dataset[Any]) -> str:
    """SHA-256 of all tensors of a data set, or of some of its examples if it is of other kinds.

    A data set that gives an example differently at each access is known by its length.
    """
    if isinstance(data, TensorDataset):
        return _digest(_bytes(tensor) for tensor in data.tensors)
    if isinstance(data, OwnedRecords):
        return _digest([data_digest(data.records).encode(), data.owner.tobytes()])
    n = len(data)  # type: ignore[arg-type]
    first, second = _probed(data, n), _probed(data, n)
    return first if first == second else f"{n} examples, drawn anew at each look"


def with_digests(examples: Examples, data: Dataset[Any], ranks: Ranks = ALONE) -> Examples:
    """The examples with the digests of their records, on rank 0; given ones stay.

    Each process goes through its share of the data.
    """
    if examples.digests is not None:
        return examples
    n = len(data)  # type: ignore[arg-type]
    edges = np.array([n * rank // ranks.count for rank in range(ranks.count + 1)])
    found: NDArray[np.bytes_] | None = None

    def digested() -> bool:
        nonlocal found
        found = record_digests(data, int(edges[ranks.rank]), int(edges[ranks.rank + 1]))
        return found is not None

    if not all(ranks.together(digested)) or found is None:
        return examples
    return replace(examples, digests=ranks.to_first(found, edges))


def record_digests(
    data: Dataset[Any], first: int = 0, last: int | None = None
) -> NDArray[np.bytes_] | None:
    """(n,) what each record is known by, whatever its id: 128 bits of SHA-256 in hexadecimal.

    Over type, shape and content of the record's tensors in order, so that a record has the same
    digest in every data set that gives it as the same tensors. An owner's is made of those of their
    records. None for a data set that gives an
    example differently at each access. To be kept private: who can guess a record can
    compute its digest. `first`, `last`: of the records from `first` to before `last` alone.
    """
    if isinstance(data, OwnedRecords):
        single = record_digests(data.records)
        return None if single is None else data.combined_digests(single)[first:last]
    n = len(data)  # type: ignore[arg-type]
    last = n if last is None else last
    if not isinstance(data, TensorDataset) and _probed(data, n) != _probed(data, n):
        return None
    found = (
        hashlib.sha256(b"".join(parts)).hexdigest()[:_HEX] for parts in _records(data, first, last)
    )
    return np.fromiter((digest.encode() for digest in found), f"S{_HEX}", count=last - first)


def _records(data: Dataset[Any], first: int, last: int) -> Iterator[list[bytes]]:
    """What identifies each record: kind, length and bytes of each of its tensors."""
    if isinstance(data, TensorDataset):  # without n little tensors
        heads = [_head(str(t.dtype), tuple(t.shape[1:])) for t in data.tensors]
        rows = [
            t[first:last].detach().cpu().contiguous()
            .reshape(last - first, t.shape[1:].numel()).view(torch.uint8).numpy()
            for t in data.tensors
        ]  # fmt: skip
        for k in range(last - first):
            yield [part for head, row in zip(heads, rows, strict=True) for part in (head, row[k])]
        return
    for k in range(first, last):
        parts = []
        for leaf in tree_leaves(data[k]):
            content = _bytes(leaf)
            shaped = isinstance(leaf, Tensor | np.ndarray)
            kind = _head(str(leaf.dtype), tuple(leaf.shape)) if shaped else _head("", ())
            parts += [kind, content] if shaped else [kind, len(content).to_bytes(8, "big"), content]
        yield parts


def _head(kind: str, shape: tuple[int, ...]) -> bytes:
    return f"{kind.removeprefix('torch.')}{shape}:".encode()


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
