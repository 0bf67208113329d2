"""Model, optimizer, loader and accountant of an Opacus loop, read and validated."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.accountants import IAccountant
from opacus.data_loader import CollateFnWithEmpty
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader, default_collate

from epsilons.gradients.norms import trainable
from epsilons.randomness import Randomness, Source
from epsilons.training.sampling import Collate, torch_source
from epsilons.training.step import check_optimizer

_SAME = 1e-9  # relative, between numbers that should be equal
_LABELS = 64  # examples whose labels are compared between two data sets


def grad_sample_hooks(model: Any) -> GradSampleHooks:
    if isinstance(model, GradSampleHooks):
        return model
    raise ValueError(
        f"model is a {type(model).__name__}; expected the first of what make_private returned: the "
        "wrapped model, or the hooks object of wrap_model=False (grad_sample_mode hooks, functorch "
        "or ghost)"
    )


def dp_optimizer(optimizer: Any) -> DPOptimizer:
    while not isinstance(optimizer, DPOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer  # as Accelerate and Lightning wrap it
    if type(optimizer) not in (DPOptimizer, DPOptimizerFastGradientClipping):
        raise ValueError(
            f"the optimizer is a {type(optimizer).__name__}; individual accounting is for Opacus's "
            "flat clipping in one process (clipping='flat'), where one norm and one bound count"
        )
    return optimizer


def poisson_sampler(data_loader: DataLoader[Any]) -> UniformWithReplacementSampler:
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


def accountant_of(hook: Any) -> IAccountant | None:
    """The accountant of a step hook, if it is Opacus's own."""
    if not inspect.isfunction(hook):
        return None
    owner = inspect.getclosurevars(hook).nonlocals.get("self")
    return owner if isinstance(owner, IAccountant) else None


def steps_taken(accountant: IAccountant) -> int:
    return sum(steps for _, _, steps in accountant.history)


def randomness_of(optimizer: DPOptimizer, sampler: UniformWithReplacementSampler) -> Randomness:
    """Where Opacus takes its noise and its coins from."""
    device = optimizer.params[0].device
    return Randomness(
        _source(optimizer.generator, device, optimizer.secure_mode),
        _source(sampler.generator, torch.device("cpu"), optimizer.secure_mode),
    )


def _source(generator: Any, device: torch.device, secure: bool) -> Source:
    """In secure mode the generator is torchcsprng's; where none is given, torch's default."""
    if generator is None:
        if device.type == "cpu":
            return torch_source(torch.default_generator)
        if device.type == "cuda":
            return torch_source(torch.cuda.default_generators[device.index or 0])
        return "torch"
    return "system" if secure else torch_source(generator)


def check_labels(given: Any, loaded: Any) -> None:
    """The numbers and words of an example must be the same in both data sets.

    Pictures and other arrays may differ, as with an augmentation that one of them lacks.
    """
    for index in np.unique(np.linspace(0, len(given) - 1, _LABELS).astype(int)).tolist():
        ours, theirs = _labels(given[index]), _labels(loaded[index])
        if any(ours[key] != theirs[key] for key in ours.keys() & theirs.keys()):
            raise ValueError(
                f"example {index} of dataset has another label than the loader's; everyone would "
                "get someone else's ε. Pass the same examples in the same order."
            )


def _labels(example: Any) -> dict[Any, str]:
    """Single numbers and words of an example by their position in it, in a form that compares."""
    if not isinstance(example, (dict, list, tuple)):
        example = [example]
    parts = dict(example) if isinstance(example, dict) else dict(enumerate(example))
    single = {k: p.item() if getattr(p, "ndim", None) == 0 else p for k, p in parts.items()}
    words = {k: p for k, p in single.items() if isinstance(p, str)}
    return words | {k: f"{p:.6g}" for k, p in single.items() if isinstance(p, (int, float))}


def check_rate(
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


def check_parameters(hooks: GradSampleHooks, optimizer: DPOptimizer) -> None:
    trained = {id(p) for p in hooks._module.parameters() if p.requires_grad}
    if trained != {id(p) for p in optimizer.params if p.requires_grad}:
        raise ValueError(
            "the optimizer does not hold the model's trainable parameters; those that it leaves "
            "out need requires_grad=False, since clipping does not count them"
        )
    check_optimizer(hooks._module, optimizer, trainable(hooks._module))


def check_bounds(hooks: GradSampleHooks, optimizer: DPOptimizer) -> None:
    """In ghost mode the model clips and the optimizer adds noise, each with its own bound."""
    bound = getattr(hooks, "max_grad_norm", None)
    if bound is not None and bound != optimizer.max_grad_norm:
        raise ValueError(
            f"the model clips to {bound} and the optimizer's noise is for {optimizer.max_grad_norm}"
        )
    if getattr(optimizer, "_adjusted_noise_multiplier", None) is not None:
        raise ValueError("adaptive clipping adjusts the noise; it is not accounted here")


def collate_fn(data_loader: DataLoader[Any]) -> Collate:
    collate = data_loader.collate_fn
    if isinstance(collate, CollateFnWithEmpty):
        collate = collate.wrapped_collator_fn
    return collate or default_collate


@contextmanager
def without_hooks(hooks: GradSampleHooks) -> Iterator[None]:
    """Opacus's hooks removed from the layers inside, and registered again in the same order."""
    registries = [handle.hooks_dict_ref() for handle in hooks.autograd_grad_sample_hooks]
    registered = [(registry, dict(registry)) for registry in registries if registry is not None]
    for handle, registry in zip(hooks.autograd_grad_sample_hooks, registries, strict=True):
        if registry is not None:
            registry.pop(handle.id, None)
    try:
        yield
    finally:
        for registry, before in registered:
            registry.clear()
            registry.update(before)


def clipped_by(hooks: GradSampleHooks, optimizer: DPOptimizer) -> torch.Tensor:
    """The norms of the last physical batch, as Opacus clipped by them."""
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        norms: torch.Tensor = hooks.per_sample_gradient_norms
        return norms.detach().flatten()
    if len(optimizer.grad_samples[0]) == 0:
        return torch.empty(0)
    rows = [g.reshape(len(g), -1).norm(dim=1) for g in optimizer.grad_samples]
    norms = torch.stack(rows).norm(dim=0)
    return norms.detach()


def are_among(theirs: NDArray[np.float64], ours: NDArray[np.float64], tolerance: float) -> bool:
    """Whether every finite norm that Opacus clipped by is one of the data set's.

    Who was drawn is not known, so that in a large data set a norm may pass for a neighbour's.
    """
    ranked = np.sort(ours[np.isfinite(ours)])
    theirs = theirs[np.isfinite(theirs)]
    if not len(theirs) or not len(ranked):
        return not len(theirs)
    rank = np.searchsorted(ranked, theirs)
    below, above = ranked[np.maximum(rank - 1, 0)], ranked[np.minimum(rank, len(ranked) - 1)]
    apart = np.minimum(np.abs(theirs - below), np.abs(theirs - above))
    return bool((apart <= tolerance * np.maximum(theirs, ranked.mean())).all())
