"""private_step: one step of DP-SGD on any model with any optimizer, unwrapped.

Clip, sum, add noise, divide by the expected batch size, step. Algorithms 1 and 3 of the paper
differ in `bounds` alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from epsilons.accounting.plan import Phase, Plan
from epsilons.training.allocator import keep_freed_memory
from epsilons.training.noise import rounding_charge
from epsilons.training.norms import LossFn, clipped_gradients, trainable


class Noise(Protocol):
    """What adds noise to a clipped sum; the result is the caller's own, to be changed in place."""

    def added_to(self, sums: dict[str, Tensor], std: float) -> dict[str, Tensor]: ...


def private_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | Phase,
    *,
    noise: Noise,
    bounds: float | Tensor | None = None,
    micro_batch: int | None = None,
) -> Tensor:
    """Take one private step; the norms (B,) of the batch's gradients come back.

    `batch` is a Poisson draw, or None for an empty one: then the step adds noise only.
    `bounds` is each example's clip bound (B,), at most `plan.max_grad_norm`, which is the default.
    The gradient left in `.grad` is (Σ clipped + N(0, noise_std²)) / batch_size, with the
    *expected* batch size: the number really drawn is private. Clipping leaves room for the
    rounding of the sum to the noise's grid, so that no example moves it by more than its bound.
    Without noise (`clipping="none"`) the bounds are taken as they are, up to ∞.
    """
    keep_freed_memory()
    parameters = trainable(model)
    if batch is None:
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        norms = torch.empty(0, dtype=torch.float64)
    else:
        limits = plan.max_grad_norm if bounds is None else bounds
        if plan.noise_std > 0:
            size = sum(p.numel() for p in parameters.values())
            limits = _with_room(limits, plan, size)
        sums, norms = clipped_gradients(model, loss_fn, batch, limits, micro_batch=micro_batch)
    noisy = noise.added_to(sums, plan.noise_std)
    gradients = [noisy[name] for name in parameters]
    torch._foreach_div_(gradients, plan.batch_size)
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = gradient.to(parameter)
    optimizer.step()
    return norms


def _with_room(bounds: float | Tensor, plan: Plan | Phase, size: int) -> float | Tensor:
    """The bounds less what the rounding of `size` sums to the noise's grid may add."""
    if isinstance(bounds, (int, float)):
        least = most = bounds
    else:
        bounds = torch.as_tensor(bounds, dtype=torch.float64)
        least, most = (float(b) for b in torch.aminmax(bounds))
    if most > plan.max_grad_norm:
        raise ValueError(
            f"a bound exceeds max_grad_norm={plan.max_grad_norm}, which the plan charges for"
        )
    charge = rounding_charge(plan.noise_std, size)
    if least < charge:
        raise ValueError(
            f"a bound is below the rounding of the noise's grid for {size} parameters; "
            "expected bounds of at least 1e-5 of the noise"
        )
    return bounds - charge
