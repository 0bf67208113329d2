"""What Python code may read besides tensors, so that a change of it is seen.

A traced graph takes numbers, settings and flags of model and loss for constant. Here they are told
apart by value, as far as that costs little: attributes of modules; of functions what they close
over, their defaults and the global variables that they name; of other objects the attributes that
the code at hand names.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from enum import Enum
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device})
_MANY = 256  # entries of a list, numbers of an array: of more, only how many there are
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_HOOKS = frozenset(
    ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
)
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"} - _HOOKS  # attributes of any module
_HASHABLE = (type, BuiltinFunctionType, CodeType, Enum, np.generic, int, float, str)
Names = frozenset[str]


def python_state(model: nn.Module, loss_fn: Any) -> Any:
    """A hashable value that is another one if model or loss may do something else.

    Of the model's parameters and buffers it has shapes, dtypes and devices.
    """
    modules = list(model.modules())
    tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
    own = {id(part) for part in chain(modules, tensors)}
    seen: set[Any] = set()
    return (
        *(None if t is None else (t.shape, t.dtype, t.device) for t in tensors),
        *_of_modules(modules, seen, own),
        _state(loss_fn, frozenset(), seen, own),
    )


def _of_modules(modules: Iterable[nn.Module], seen: set[Any], own: set[int]) -> list[Any]:
    facts: list[Any] = []
    for module in modules:
        kind: Any = type(module)
        names = _names(kind.forward, kind)
        facts += kind, *module._parameters, *module._buffers
        for name, value in vars(module).items():
            if name in _TORCHS_OWN or (name in _HOOKS and not value):
                continue
            facts += name, value if type(value) in PLAIN else _state(value, names, seen, own)
        facts += (_state(part, names, seen, own) for part in _globals(kind.forward, names))
    return facts


def _state(value: Any, names: Names, seen: set[Any], own: set[int]) -> Any:
    """What a value is for code that mentions `names`; `own`: what is told apart elsewhere."""
    kind: Any = type(value)
    if kind in PLAIN or (kind is tuple and PLAIN.issuperset(map(type, value))):
        return value
    if id(value) in own or (id(value), names) in seen:
        return kind
    seen.add((id(value), names))
    if isinstance(value, _HASHABLE):
        return value
    if isinstance(value, (slice, range)):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes() if value.size <= _MANY else id(value)
    if isinstance(value, _RANDOM):
        return _of_generator(value)
    parts: Iterable[Any]
    if isinstance(value, nn.Module):
        tensors = chain(value.parameters(), value.buffers())
        its = _of_modules(value.modules(), seen, own)
        return (*its, *(_state(t, names, seen, own) for t in tensors))
    if isinstance(value, (tuple, list, set, frozenset, dict)):
        if len(value) > _MANY:
            return kind, len(value)
        parts = chain.from_iterable(value.items()) if isinstance(value, dict) else value
    elif isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        names = _names(value.__func__, cast(Any, type(value.__self__)))
        parts = chain((value.__self__,), _of_function(value.__func__, names))
    elif isinstance(value, FunctionType):
        names = _names(value)
        parts = _of_function(value, names)
    elif isinstance(value, ModuleType) or _torchs(kind):
        return kind
    else:
        call = getattr(kind, "__call__", None)  # noqa: B004 (its code is wanted)
        names |= _names(call, kind)
        held = getattr(value, "__dict__", {})
        parts = chain((held[name] for name in names if name in held), _globals(call, names))
    return (kind, *[_state(part, names, seen, own) for part in parts])


def _of_function(function: Any, names: Names) -> Iterable[Any]:
    """Which function it is and, unless it is torch's, what it has hold of."""
    yield getattr(function, "__code__", None)
    if not _torchs(function):
        yield from (cell.cell_contents for cell in function.__closure__ or () if _filled(cell))
        yield from (function.__defaults__, function.__kwdefaults__)
        yield from _globals(function, names)


def _globals(function: Any, names: Names) -> Iterable[Any]:
    known = getattr(function, "__globals__", {})
    return (known[name] for name in names if name in known)


@functools.cache
def _names(function: Any, owner: type | None = None) -> Names:
    """The names in a function's code, and in that of methods of its class that it calls."""
    found: set[str] = set()
    done: set[CodeType] = set()
    waiting = [_code(function)]
    while waiting:
        code = waiting.pop()
        if code is not None and code not in done:
            done.add(code)
            found.update(code.co_names)
            waiting += (part for part in code.co_consts if isinstance(part, CodeType))
            waiting += (_code(getattr(owner, name, None)) for name in code.co_names)
    return frozenset(found)


def _code(function: Any) -> CodeType | None:
    """The code of a function or property that isn't torch's."""
    function = getattr(function, "fget", function)
    own = isinstance(function, FunctionType) and not _torchs(function)
    return function.__code__ if own else None


def _torchs(what: Any) -> bool:
    return (getattr(what, "__module__", None) or "").partition(".")[0] == "torch"


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (an empty one raises)
    except ValueError:
        return False
    return True


def _of_generator(generator: Any) -> Any:
    """The state of a generator: of one that draws, another after each pass."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state())
    return str(generator.bit_generator.state)
