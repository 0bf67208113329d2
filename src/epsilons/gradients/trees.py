"""Nested lists, tuples and dictionaries of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_LEAVES = frozenset({int, float, bool, str, type(None)})


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return found
    for branch in tree:
        if type(branch) in _LEAVES:
            continue
        if isinstance(branch, Tensor):
            found.append(branch)
        elif isinstance(branch, (list, tuple, dict)):
            found += tensors_in(branch)
    return found


def swapped(tree: Any, replacements: Mapping[int, Tensor]) -> Any:
    """The same nest of lists, tuples and dictionaries with some tensors (by id) replaced."""
    if isinstance(tree, Tensor):
        return replacements.get(id(tree), tree)
    if isinstance(tree, (list, tuple)):
        branches = [b if type(b) in _LEAVES else swapped(b, replacements) for b in tree]
        return type(tree)(*branches) if hasattr(tree, "_fields") else type(tree)(branches)
    if isinstance(tree, dict):
        return {key: swapped(branch, replacements) for key, branch in tree.items()}
    return tree
