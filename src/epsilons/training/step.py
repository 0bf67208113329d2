"""private_step: one step of DP-SGD on any model with any optimizer, unwrapped.

Clip, sum, add noise, divide by the expected batch size, step. Algorithms 1 and 3 of the paper
differ in `bounds` alone.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from epsilons.accounting.plan import Phase, Plan
from epsilons.training.noise import rounding_charge
from epsilons.training.norms import LossFn, clipped_gradients, trainable


class Noise(Protocol):
    """What adds noise to a clipped sum."""

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
    parameters = trainable(model)
    if batch is None:
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        norms = torch.empty(0, dtype=torch.float64)
    else:
        limits = torch.as_tensor(
            plan.max_grad_norm if bounds is None else bounds, dtype=torch.float64
        )
        private = plan.noise_std > 0
        if private and limits.max() > plan.max_grad_norm:
            raise ValueError(
                f"a bound exceeds max_grad_norm={plan.max_grad_norm}, which the plan charges for"
            )
        if private:
            size = sum(p.numel() for p in parameters.values())
            limits = limits - rounding_charge(plan.noise_std, size)
            if limits.min() < 0:
                raise ValueError(
                    f"a bound is below the rounding of the noise's grid for {size} parameters; "
                    "expected bounds of at least 1e-5 of the noise"
                )
        sums, norms = clipped_gradients(model, loss_fn, batch, limits, micro_batch=micro_batch)
    noisy = noise.added_to(sums, plan.noise_std)
    for name, parameter in parameters.items():
        parameter.grad = (noisy[name] / plan.batch_size).to(parameter)
    optimizer.step()
    return norms
