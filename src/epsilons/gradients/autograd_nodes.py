"""Hooks into autograd: the gradient of an output, the body of torch's functions, checkpoints."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor


class GradientTap(torch.autograd.Function):
    """The identity; in the backward pass, `arrived` is called with the gradient.

    A node of its own and not a hook: a hook on a view would be lost when the model modifies the
    view in place. The anchor gives gradients to outputs of plain data as well.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        ctx.arrived = arrived
        return out.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        ctx.arrived(g)
        return g if ctx.needs_input_grad[0] else None, None, None


@functools.cache
def anchor(device: torch.device) -> Tensor:
    """A leaf that nodes depend on beside their input; its gradient stays empty."""
    with torch.inference_mode(False):
        return torch.zeros((), device=device, requires_grad=True)


def without_override_check(function: Any) -> Callable[..., Any] | None:
    """A Python function of torch without its `__torch_function__` check: its body, to be traced.

    None if it has no such check.
    """
    names = [n for n in function.__code__.co_names if n.startswith("has_torch_function")]
    if not names:
        return None
    blind = {name: lambda *_: False for name in names}
    body = types.FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


_hooks_on_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks


def packs_tensors() -> bool:
    """Whether hooks, such as a checkpoint's, replace the tensors that autograd saves now."""
    return _hooks_on_saved_tensors(True) is not None


def unpacked() -> AbstractContextManager[None]:
    """Have autograd save tensors as usual: gradients are pulled back after checkpoints are over."""
    if not packs_tensors():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def running_checkpoint() -> str | None:
    """The function of torch.utils.checkpoint that the model is running under, if any."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return frame.f_code.co_qualname
        frame = frame.f_back
    return None
