"""The peers of `norms.py`: norm passes and private steps of Opacus, torch.func and Opake.

A method takes a model that it may keep and a batch, and returns the call to be timed. The call of
a norm pass returns every example's gradient norm (B,); that of a step clips, adds noise drawn by
the peer's own generator and lets torch's SGD take the step.

    hooks, functorch, ew, ghost    Opacus's `grad_sample_mode`
    fast                           ghost with materialized gradients in place of ghost norms
    vmap                           torch.func's vmap of grad
    opake, opake/2                 Opake's `clipped_grad` on the batch, and in two micro-batches
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from opacus.grad_sample import prepare_module
from opacus.optimizers import get_optimizer_class
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from opake.dpsgd.clipping import clipped_grad
from opake.dpsgd.noise import gaussian_noise
from opake.functional import make_functional
from opake.pytree import global_norm
from opake.random import random_key
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

Call = Callable[[], Any]
Method = Callable[[nn.Module, Tensor, Tensor], Call]
Gradients = dict[str, Tensor]
BOUND, NOISE, RATE = 1.0, 1.0, 1e-6


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def opacus_norms(model: nn.Module, x: Tensor, y: Tensor, *, mode: str, **options: Any) -> Call:
    wrapped: Any = prepare_module(model, mode, loss_reduction="sum", **options)

    def run() -> Tensor:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y, reduction="sum").backward()
        if mode == "ghost":
            return wrapped.get_norm_sample()
        return _norms([p.grad_sample for p in wrapped.parameters()])

    return run


def opacus_step(model: nn.Module, x: Tensor, y: Tensor, *, mode: str, **options: Any) -> Call:
    wrapped: Any = prepare_module(model, mode, loss_reduction="mean", **options)
    optimizer_class: Any = get_optimizer_class("flat", distributed=False, grad_sample_mode=mode)
    optimizer = optimizer_class(
        sgd(wrapped), noise_multiplier=NOISE, max_grad_norm=BOUND, expected_batch_size=len(x)
    )
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "ghost":
        criterion = DPLossFastGradientClipping(wrapped, optimizer, criterion)

    def run() -> None:
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()

    return run


def vmap_norms(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    gradients = _per_example(model)
    return lambda: _norms(list(gradients(x, y).values()))


def vmap_step(model: nn.Module, x: Tensor, y: Tensor) -> Call:
    gradients, optimizer = _per_example(model), sgd(model)

    def run() -> None:
        found = gradients(x, y)
        factors = (BOUND / _norms(list(found.values()))).clamp(max=1)
        for name, p in model.named_parameters():
            clipped = torch.tensordot(factors, found.pop(name), dims=1)
            p.grad = torch.normal(0.0, NOISE * BOUND, p.shape).add_(clipped).div_(len(x))
        optimizer.step()

    return run


def opake_norms(model: nn.Module, x: Tensor, y: Tensor, *, parts: int = 1) -> Call:
    """Opake returns norms along with a clipped sum, here the sum of the norms themselves.

    With the clipped sum of gradients it takes 1.5 to 6 times as long.
    """
    loss, parameters = _opake_loss(model)
    clip, state = clipped_grad(
        loss, clipping_norm=BOUND, batch_argnums=(1, 2), microbatch_size=_micro_batch(x, parts),
        return_aux=True, pre_clipping_transform=lambda gradients: {"norm": global_norm(gradients)},
    )  # fmt: skip

    def run() -> Tensor:
        (_, diagnostics), _ = clip(parameters, x, y, state=state)
        return diagnostics.grad_norms

    return run


def opake_step(model: nn.Module, x: Tensor, y: Tensor, *, parts: int = 1) -> Call:
    loss, parameters = _opake_loss(model)
    clip, clip_state = clipped_grad(
        loss, clipping_norm=BOUND, normalize_by=len(x), batch_argnums=(1, 2),
        microbatch_size=_micro_batch(x, parts),
    )  # fmt: skip
    add_noise, noise_state = gaussian_noise(noise_multiplier=NOISE, key=random_key())
    optimizer = sgd(model)

    def run() -> None:
        nonlocal noise_state
        clipped, _ = clip(parameters, x, y, state=clip_state)
        noisy, noise_state = add_noise(clipped, noise_state)
        for name, p in model.named_parameters():
            p.grad = noisy.pytree[name]
        optimizer.step()

    return run


NORMS: dict[str, Method] = {
    "hooks": partial(opacus_norms, mode="hooks"),
    "functorch": partial(opacus_norms, mode="functorch"),
    "ew": partial(opacus_norms, mode="ew"),
    "ghost": partial(opacus_norms, mode="ghost", max_grad_norm=BOUND),
    "fast": partial(opacus_norms, mode="ghost", max_grad_norm=BOUND, use_ghost_clipping=False),
    "vmap": vmap_norms,
    "opake": opake_norms,
    "opake/2": partial(opake_norms, parts=2),
}
STEPS: dict[str, Method] = {
    "hooks": partial(opacus_step, mode="hooks"),
    "functorch": partial(opacus_step, mode="functorch"),
    "ew": partial(opacus_step, mode="ew"),
    "ghost": partial(opacus_step, mode="ghost", max_grad_norm=BOUND),
    "fast": partial(opacus_step, mode="ghost", max_grad_norm=BOUND, use_ghost_clipping=False),
    "vmap": vmap_step,
    "opake": opake_step,
    "opake/2": partial(opake_step, parts=2),
}


def _per_example(model: nn.Module) -> Callable[[Tensor, Tensor], Gradients]:
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: Gradients, x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (x.unsqueeze(0),))
        return F.cross_entropy(logits, y.unsqueeze(0))

    return partial(vmap(grad(loss), in_dims=(None, 0, 0)), parameters)


def _opake_loss(model: nn.Module) -> tuple[Callable[..., Tensor], Gradients]:
    function, parameters, _ = make_functional(
        model, disable_autograd_tracking=True, partition_trainable=True
    )

    def loss(parameters: Gradients, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(function(parameters, x.unsqueeze(0)), y.unsqueeze(0))

    return loss, parameters


def _micro_batch(x: Tensor, parts: int) -> int | None:
    return None if parts == 1 else len(x) // parts


def _norms(gradients: list[Tensor]) -> Tensor:
    squares = [g.reshape(len(g), -1).square().sum(1) for g in gradients]
    return torch.stack(squares).sum(0).sqrt()
