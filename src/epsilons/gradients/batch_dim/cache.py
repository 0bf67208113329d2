"""What operations did to the dimension of the examples, remembered from pass to pass.

Finding it out takes longer than many an operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epsilons.gradients.batch_dim.layout import Layout

Known = tuple["weakref.ref[Tensor]", Layout | None, bool]  # a tensor, its layout; a guess or not
Question = tuple[Any, ...]
Answer = list[tuple[torch.Size, Layout | None]]  # shapes and layouts of what comes out

_MOST = 2**14  # batches vary in size
_answers: dict[Question, Answer] = {}


def asked(
    func: Any, args: Any, kwargs: Any, count: int, data: Mapping[int, Known]
) -> Question | None:
    """An operation on data as far as layouts depend on it; None where they may on more.

    `data` is what is known of tensors, by id.
    """
    question = [func, count]
    for arg in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(arg, Tensor):
            entry = data.get(id(arg))
            if entry is None or entry[2] or entry[0]() is not arg:
                return None
            question += arg.shape, entry[1]
        elif type(arg) in _PLAIN or _all_plain(arg):
            question.append(arg)
        else:
            return None
    if func is torch.Tensor.__getitem__ and isinstance(args[1], Tensor):
        return None  # where an index of tensors leads depends on its numbers
    return (*question, tuple(kwargs))


def remembered(question: Question) -> Answer | None:
    return _answers.get(question)


def remember(question: Question, answer: Answer) -> None:
    if len(_answers) >= _MOST:
        _answers.clear()
    _answers[question] = answer


def _all_plain(arg: Any) -> bool:
    return type(arg) is tuple and all(type(part) in _PLAIN for part in arg)


_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        type(Ellipsis),
        torch.device,
        torch.dtype,
        torch.memory_format,
    }
)
