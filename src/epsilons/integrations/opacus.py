"""Individual accounting inside an Opacus loop: one line after `make_private`.

Rate, noise and bound are read from what Opacus does, at every step, and a set-up for which the
accounting would be false is refused with its reason. Opacus's accountant goes on as before.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.data_loader import CollateFnWithEmpty
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.integrations.accounted import Accounted, Collate
from epsilons.training.norms import LossFn

_REFRESHES_PER_EPOCH = 3  # the paper's
_SAME = 1e-9  # relative, between numbers that should be equal
_NORM_TOLERANCE = 0.01  # between Opacus's norms, in the model's precision, and ours


def attach(
    model: GradSampleHooks | nn.Module,
    optimizer: Any,
    data_loader: DataLoader[Any],
    *,
    loss_fn: LossFn,
    out: str | os.PathLike[str],
    dataset: Dataset[Any] | None = None,
    examples: Examples | None = None,
    delta: float = 1e-5,
    refresh_every: int | None = None,
    batch_size: int = 256,
) -> AttachedToOpacus:
    """Add individual accounting to what `PrivacyEngine.make_private` returned.

    `model`: the wrapped model, or the hooks object of `wrap_model=False`. `loss_fn(model, batch)`
    gives one loss per example; the loop's own loss is its mean (or sum). `dataset` is the loader's,
    or the same examples in the same order. Every `refresh_every` steps (default: a third of an
    epoch) the norms of all examples are computed, `batch_size` at a time. The run folder `out`
    is complete after `.close()`.

    Works with hooks, functorch and ghost modes and with `BatchMemoryManager`. Refused: batches that
    are not Poisson samples, per-layer and adaptive clipping, distributed training, a rate that
    differs between loader and accountant, and noise or bound that change during training.
    """
    hooks = _hooks(model)
    optimizer = _dp_optimizer(optimizer)
    sampler = _poisson_sampler(data_loader)
    data = data_loader.dataset if dataset is None else dataset
    n = len(data)  # type: ignore[arg-type]
    if n != sampler.num_samples:
        raise ValueError(
            f"the data set has {n} examples and the loader draws from {sampler.num_samples}; "
            "they must be the same, in the same order"
        )
    _check_rate(sampler, data_loader, optimizer)
    _check_parameters(hooks, optimizer)
    _check_bounds(hooks, optimizer)
    plan = Plan(
        n=n,
        sample_rate=float(sampler.sample_rate),
        noise_multiplier=float(optimizer.noise_multiplier),
        max_grad_norm=float(optimizer.max_grad_norm),
        delta=delta,
        refresh_every=refresh_every
        or max(1, round(1 / (_REFRESHES_PER_EPOCH * sampler.sample_rate))),
    )
    return AttachedToOpacus(
        hooks, optimizer, loss_fn, data, plan, out=out, examples=examples,
        batch_size=batch_size, collate_fn=_collate(data_loader),
    )  # fmt: skip


class AttachedToOpacus(Accounted):
    """The accounting of an Opacus loop; see `attach`. `.close()` lets the optimizer go."""

    def __init__(
        self,
        hooks: GradSampleHooks,
        optimizer: DPOptimizer,
        loss_fn: LossFn,
        dataset: Dataset[Any],
        plan: Plan,
        **options: Any,
    ) -> None:
        super().__init__(
            hooks._module, loss_fn, dataset, plan, resting=lambda: _resting(hooks), **options
        )
        self._hooks, self._optimizer = hooks, optimizer
        self._before = optimizer.step_hook
        optimizer.attach_step_hook(self._on_step)

    def close(self) -> None:
        if self._optimizer.step_hook == self._on_step:
            self._optimizer.attach_step_hook(self._before)
        super().close()

    def _on_step(self, optimizer: DPOptimizer) -> None:
        """Called by Opacus when the gradient is noisy and the weights have not changed yet."""
        self._check_unchanged(optimizer)
        norms = self.before_step()
        if norms is not None and not self.random_loss and self.run.journal.steps_charged == 1:
            _check_norms(norms, _norms_of_opacus(self._hooks, optimizer))
        if self._before is not None:
            self._before(optimizer)

    def _check_unchanged(self, optimizer: DPOptimizer) -> None:
        plan = self.run.plan
        _check_bounds(self._hooks, optimizer)
        for name in ("noise_multiplier", "max_grad_norm"):
            now, then = float(getattr(optimizer, name)), getattr(plan, name)
            if now != then:
                raise ValueError(
                    f"{name} is {now} at step {self.run.journal.steps_charged} and was {then} when "
                    "accounting was attached; schedules of noise or bound are not accounted here"
                )
        if optimizer.accumulated_iterations != 1:
            raise ValueError(
                f"{optimizer.accumulated_iterations} batches were accumulated for one step, so "
                "that the rate is not the loader's; use BatchMemoryManager"
            )


def _hooks(model: Any) -> GradSampleHooks:
    if isinstance(model, GradSampleHooks):
        return model
    raise ValueError(
        f"model is a {type(model).__name__}; expected the first of what make_private returned: the "
        "wrapped model, or the hooks object of wrap_model=False (grad_sample_mode hooks, functorch "
        "or ghost)"
    )


def _dp_optimizer(optimizer: Any) -> DPOptimizer:
    while not isinstance(optimizer, DPOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # as Accelerate and Lightning wrap it
    if type(optimizer) not in (DPOptimizer, DPOptimizerFastGradientClipping):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__}; individual accounting is for Opacus's "
            "flat clipping in one process (clipping='flat'), where one norm and one bound count"
        )
    return optimizer


def _poisson_sampler(data_loader: DataLoader[Any]) -> UniformWithReplacementSampler:
    sampler: Any = getattr(data_loader, "batch_sampler", None)
    if type(sampler) is BatchSplittingSampler:
        sampler = sampler.sampler
    if type(sampler) is not UniformWithReplacementSampler:
        raise ValueError(
            f"the loader draws its batches by {type(sampler).__name__}, not by Poisson sampling; "
            "the accounting would be false. Pass the loader that make_private returned, with "
            "poisson_sampling=True and no sampler of your own."
        )
    return sampler


def _check_rate(
    sampler: UniformWithReplacementSampler, loader: DataLoader[Any], optimizer: DPOptimizer
) -> None:
    """The rate that Opacus's accountant charges must be the one that the loader draws with."""
    hook = optimizer.step_hook
    if hook is None or not inspect.isfunction(hook):
        return
    charged = inspect.getclosurevars(hook).nonlocals.get("sample_rate")
    # int(1 / (1 / L)) can be L − 1: then Opacus charges a little more than it draws
    rounded = 1 / sampler.steps if sampler.steps else sampler.sample_rate
    if charged is not None and not any(
        abs(charged - rate) <= _SAME * rate for rate in (sampler.sample_rate, rounded)
    ):
        raise ValueError(
            f"Opacus's accountant charges for a rate of {charged}, and the loader draws each "
            f"example with {sampler.sample_rate}; use the loader that make_private returned"
        )


def _check_parameters(hooks: GradSampleHooks, optimizer: DPOptimizer) -> None:
    trained = {id(p) for p in hooks._module.parameters() if p.requires_grad}
    if trained != {id(p) for p in optimizer.params if p.requires_grad}:
        raise ValueError(
            "the optimizer does not hold the model's trainable parameters; those that it leaves "
            "out need requires_grad=False, since clipping does not count them"
        )


def _check_bounds(hooks: GradSampleHooks, optimizer: DPOptimizer) -> None:
    """In ghost mode the model clips and the optimizer adds noise, each with its own bound."""
    bound = getattr(hooks, "max_grad_norm", None)
    if bound is not None and bound != optimizer.max_grad_norm:
        raise ValueError(
            f"the model clips to {bound} and the optimizer's noise is for {optimizer.max_grad_norm}"
        )
    if getattr(optimizer, "_adjusted_noise_multiplier", None) is not None:
        raise ValueError("adaptive clipping adjusts the noise; it is not accounted here")


def _collate(data_loader: DataLoader[Any]) -> Collate:
    collate = data_loader.collate_fn
    if isinstance(collate, CollateFnWithEmpty):
        collate = collate.wrapped_collator_fn
    return collate or default_collate


@contextmanager
def _resting(hooks: GradSampleHooks) -> Iterator[None]:
    """Opacus's hooks taken off the layers, and put back in their places."""
    places = [handle.hooks_dict_ref() for handle in hooks.autograd_grad_sample_hooks]
    found = [(place, dict(place)) for place in places if place is not None]
    for handle, place in zip(hooks.autograd_grad_sample_hooks, places, strict=True):
        if place is not None:
            place.pop(handle.id, None)
    try:
        yield
    finally:
        for place, before in found:
            place.clear()
            place.update(before)


def _norms_of_opacus(hooks: GradSampleHooks, optimizer: DPOptimizer) -> NDArray[np.float64]:
    """The norms of the last physical batch, as Opacus clipped by them."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        norms: torch.Tensor = hooks.per_sample_gradient_norms
    elif len(optimizer.grad_samples[0]) == 0:
        norms = torch.empty(0)
    else:
        rows = [g.reshape(len(g), -1).norm(dim=1) for g in optimizer.grad_samples]
        norms = torch.stack(rows).norm(dim=0)
    return np.asarray(norms.detach().cpu(), dtype=np.float64).reshape(-1)


def _check_norms(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> None:
    """Every norm that Opacus clipped by must be among those of the data set."""
    ranked = np.sort(ours)
    place = np.searchsorted(ranked, theirs).clip(1, max(1, len(ranked) - 1))
    below, above = ranked[place - 1], ranked[np.minimum(place, len(ranked) - 1)]
    apart = np.minimum(np.abs(theirs - below), np.abs(theirs - above))
    strange = apart > _NORM_TOLERANCE * np.maximum(theirs, ranked.mean())
    if strange.any():
        raise ValueError(
            "the gradient norms that Opacus clipped by are not those of loss_fn on this data set. "
            "Is loss_fn the loss of the loop, one value per example? Does the loop's reduction "
            "match loss_reduction? Does the data set give the same examples as the loader?"
        )
