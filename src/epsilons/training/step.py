"""private_step: one step of DP-SGD on any model with any optimizer, unwrapped.

Clip, sum, add noise, divide by the expected batch size, step. Algorithms 1 and 3 of the paper
differ in `bounds` alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from epsilons.accounting.margins import Margin
from epsilons.accounting.persons import expect_drawn_together
from epsilons.accounting.plan import Phase, Plan
from epsilons.accounting.sums import pass_size
from epsilons.gradients.compile import Clipped
from epsilons.gradients.norms import (
    LossFn,
    check_loss_fn,
    clipped_pass,
    example_count,
    examples,
    trainable,
)
from epsilons.noise.grid import Noise

Bounds = float | Tensor | NDArray[np.float64]


def private_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | Phase,
    *,
    noise: Noise,
    bounds: Bounds | None = None,
    micro_batch: int | None = None,
) -> Tensor:
    """Take one private step; the norms (B,) of the batch's gradients come back.

    `model` is trained in place by `optimizer`, any of `torch.optim`; no step needs more of it than
    `step()`. `loss_fn(model, batch)`: one loss per example, (B,). `noise`: `SecureNoise()`, or
    `SeededNoise(seed)` for experiments. The norms are those before clipping; they are private.

    `batch` is a Poisson draw, or None for an empty one: then the step adds noise only.
    `plan` is a plan without phases, or `plan.phase(step)`. `bounds` is each example's clip bound
    (B,), or one for all, at most `plan.max_grad_norm`, which is the default under common clipping.
    Under individual clipping, and with a phase, it must be given: `journal.bounds(step, indices)`.

    The gradient left in `.grad` is (Σ clipped + N(0, noise_std²)) / batch_size, with the
    *expected* batch size: the number really drawn is private. Clipping leaves room for the
    rounding of the sum, so that no example moves it by more than its bound. Without noise
    (`clipping="none"`) the bounds are taken as they are, up to ∞.

    `micro_batch`: the most examples in memory at once. With the plan's `sums="float64"` every pass
    has one size, by default a little more than the expected batch. ValueError for bounds,
    optimizers and sums that don't fit; `UnsupportedLayer` where no per-example gradient exists.
    """
    if isinstance(plan, Plan):
        expect_drawn_together(plan, "this step would clip each record by itself")
        if plan.adaptive is not None:
            raise ValueError(
                "the plan's clip bound adapts, and a single step doesn't know where it is; use "
                "PrivateTraining, fit or `epsilons train`"
            )
    return taken_step(
        model, optimizer, loss_fn, batch, plan, noise=noise, bounds=bounds, micro_batch=micro_batch
    ).norms


def taken_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | Phase,
    *,
    noise: Noise,
    bounds: Bounds | None = None,
    micro_batch: int | None = None,
) -> Clipped:
    """`private_step`, with the losses; its sums may be overwritten."""
    if not hasattr(noise, "added_to"):
        raise ValueError(
            f"noise={noise!r} adds none; expected SecureNoise(), or SeededNoise(seed) for an "
            "experiment"
        )
    found = clipped_sum(
        model, optimizer, loss_fn, batch, plan, bounds=bounds, micro_batch=micro_batch
    )
    apply(model, optimizer, noise.added_to(found.sums, plan.noise_std, plan.batch_size))
    return found


def clipped_sum(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFn,
    batch: Any,
    plan: Plan | Phase,
    *,
    bounds: Bounds | None = None,
    micro_batch: int | None = None,
    shards: int = 1,
    compile: bool = False,
) -> Clipped:
    """The first half of a step: the clipped sum of a batch, or of one of the `shards` of it."""
    check_loss_fn(loss_fn)
    parameters = trainable(model)
    check_optimizer(model, optimizer, parameters)
    limits = _limits(plan, bounds)
    if batch is None:
        nobody = torch.empty(0, dtype=torch.float64)
        sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
        return Clipped(sums, nobody, nobody)
    _check_size(plan, example_count(batch))
    if plan.noise_std > 0:
        limits = _with_room(limits, plan, sum(p.numel() for p in parameters.values()))
    return clipped_pass(
        parameters,
        model,
        loss_fn,
        batch,
        limits,
        micro_batch=pass_examples(plan, micro_batch, shards, fixed=compile),
        sums=plan.sums,
        compile=compile,
    )


def apply(model: nn.Module, optimizer: torch.optim.Optimizer, noisy: dict[str, Tensor]) -> None:
    """The second half: one step of the optimizer by the noisy mean."""
    for name, parameter in trainable(model).items():
        parameter.grad = noisy[name].to(parameter)
    optimizer.step()


def without_out(
    indices: Tensor, batch: Any, bounds: float | Tensor
) -> tuple[Tensor, Any, float | Tensor]:
    """Without the examples whose bound is 0: they are out, and add exactly nothing.

    Everything else of the step is as it was: noise, divisor, coins.
    """
    kept = torch.nonzero(torch.as_tensor(bounds) > 0).flatten()
    if batch is None or len(kept) == len(indices):
        return indices, batch, bounds
    some = examples(batch, kept) if len(kept) else None
    return indices[kept], some, torch.as_tensor(bounds)[kept]


def pass_examples(
    plan: Plan | Phase, micro_batch: int | None, shards: int = 1, *, fixed: bool = False
) -> int | None:
    """How many examples each pass of a step takes; None: all there are, unless it is `fixed`."""
    if plan.sums == "float32" and not fixed:
        return micro_batch
    return pass_size(plan.batch_size / shards, plan.max_batch, micro_batch)


def most_examples(plan: Plan | Phase, micro_batch: int | None, shards: int = 1) -> int:
    """How many examples a pass of a step takes, about, where it takes all there are."""
    fixed = pass_examples(plan, micro_batch, shards)
    return fixed or micro_batch or max(1, round(plan.batch_size / shards))


def refresh_examples(
    plan: Plan, step: int, micro_batch: int | None, usual: int, shards: int = 1
) -> int:
    """How many examples each pass of a refresh takes: `usual`, or as the step's if it matters.

    It does where a norm is charged for just the model it was computed from, as what the step adds:
    in a pass of another shape it could be that of the other side of a kink.
    """
    exact = plan.clipping == "max" and plan.kind != "estimate"
    same = pass_examples(plan.phase(step), micro_batch, shards) if exact else None
    return same or usual


def pass_sizes(plan: Plan, micro_batch: int | None, shards: int = 1) -> set[int]:
    """The sizes of all passes whose sums are to be covered; none where they can't be."""
    if plan.sums == "float32" or plan.clipping == "none":
        return set()
    return {pass_size(p.batch_size / shards, p.max_batch, micro_batch) for p in plan.all_phases}


def _check_size(plan: Plan | Phase, count: int) -> None:
    if plan.sums == "float64" and count > plan.max_batch:
        raise ValueError(
            f"a batch has more than {plan.max_batch} examples, which a Poisson draw of the plan "
            "exceeds with probability 2⁻¹²⁰; expected a batch drawn at its rate (PoissonLoader)"
        )


def check_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: dict[str, Tensor]
) -> None:
    """A `ValueError` if the optimizer would apply gradients without noise, or train nothing.

    A step sets the gradients of the model's trainable `parameters`. What lies in `.grad` of
    another one, frozen after a backward pass say, would be applied as it is at every step.
    """
    trained = {id(p) for p in parameters.values()}
    in_optimizer = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    stale = [p for key, p in in_optimizer.items() if key not in trained and _has_gradient(p)]
    if stale:
        names = {id(p): name for name, p in model.named_parameters()}
        which = [names.get(id(p), f"one of shape {tuple(p.shape)}, not the model's") for p in stale]
        raise ValueError(
            f"parameters that are not trained have a gradient ({'; '.join(which)}), and the "
            "optimizer would apply it at every step without noise. Clear it with "
            "optimizer.zero_grad(), or leave these parameters out of the optimizer."
        )
    if trained.isdisjoint(in_optimizer):
        raise ValueError(
            "the optimizer holds none of the model's trainable parameters; build it of "
            "model.parameters()"
        )


def _has_gradient(parameter: Tensor) -> bool:
    gradient = parameter.grad  # zeros, as zero_grad(set_to_none=False) leaves them, do no harm
    return gradient is not None and (gradient.is_sparse or bool(gradient.any()))


def _expect_one_phase(plan: Plan | Phase) -> None:
    if isinstance(plan, Plan) and plan.phases:
        raise ValueError(
            "the plan has phases, and noise, bound and batch size are those of one; "
            "pass plan.phase(step)"
        )


def _limits(plan: Plan | Phase, bounds: Bounds | None) -> Bounds:
    """The bounds to clip to; refused where they can't be those that the plan charges for."""
    _expect_one_phase(plan)
    clipping = plan.clipping if isinstance(plan, Plan) else None
    if bounds is None and clipping == "max":
        return plan.max_grad_norm
    if bounds is None or (clipping == "individual" and isinstance(bounds, (int, float))):
        what = "a phase" if clipping is None else f"clipping={clipping!r}"
        raise ValueError(
            f"bounds={bounds}; {what} needs those of the batch's examples: "
            "bounds=journal.bounds(step, indices)"
        )
    return bounds


def _with_room(bounds: Bounds, plan: Plan | Phase, size: int) -> float | Tensor:
    """The bounds less what the rounding of `size` sums may add."""
    if isinstance(bounds, (int, float)):
        least = most = bounds
    else:
        bounds = torch.as_tensor(bounds, dtype=torch.float64)
        least, most = (float(b) for b in torch.aminmax(bounds))
    if most > plan.max_grad_norm:
        raise ValueError(
            f"a bound exceeds max_grad_norm={plan.max_grad_norm}, which the plan charges for"
        )
    charge = Margin(parameters=size).room(plan)
    if least == 0:
        raise ValueError(
            "a bound is 0: that example is out. Leave it out of the batch, so that it adds exactly "
            "nothing: kept = indices[journal.bounds(step, indices) > 0]"
        )
    if least < charge:
        raise ValueError(
            f"a bound is below the rounding of the noise's grid for {size} parameters; "
            "expected bounds of at least 1e-5 of the noise"
        )
    return bounds - charge
