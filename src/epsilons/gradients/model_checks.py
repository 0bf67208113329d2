"""What stands between a model and per-example gradients, said before training.

`check_model` looks at the layers and then sends a canary: three examples, one of them twice,
through the whole machinery and, one at a time, through autograd. It finds what no list of layers
can: examples that leak into each other, a batch dimension in the wrong place, a model that keeps
state, a wrong rule. Losses of some more are compared between groupings (`expect_separate`), since
some leaks show only in certain company: a loss that is weighted by the classes of its batch, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from epsilons.gradients.autograd_nodes import without_override_check
from epsilons.gradients.buffer_checks import check_buffers
from epsilons.gradients.clip_factors import widest_dtype
from epsilons.gradients.isolation import undisturbed
from epsilons.gradients.norms import (
    LossFn,
    Sums,
    check_loss_fn,
    check_losses,
    clipped_gradients,
    example_count,
    examples,
    trainable,
)
from epsilons.gradients.random_loss import SEED, NoDropout, batch_losses, is_random
from epsilons.gradients.rules import UnsupportedLayer
from epsilons.gradients.trees import swapped, tensors_in

CANARIES = 3
GROUPED = 16  # examples whose losses are compared between groupings
_LEAST = 1e-12  # losses apart by less are equal


class MixedExamples(UnsupportedLayer):
    """A batch gives its examples other losses or gradients than they have by themselves."""


@dataclass(frozen=True)
class ModelCheck:
    """What the check learned: whether the loss draws, as with dropout (None: not asked).

    It is in `random_loss`.
    """

    random_loss: bool | None


def check_model(model: nn.Module, loss_fn: LossFn | None = None, batch: Any = None) -> ModelCheck:
    """Raise `UnsupportedLayer` with every problem and its remedy; else say what was learned.

    Layers of `model` that are known to let one example change another's gradient are always found.

    With `loss_fn` and a `batch`, its first three examples, the first of them twice, are compared
    with autograd, one example at a time: losses, gradient norms and clipped sums. Losses of its
    first sixteen are compared between groupings: see `expect_separate`. Examples without a finite
    loss are left out. The model is left as it was.
    """
    problems = list(_problems(model))
    if problems:
        raise UnsupportedLayer("\n".join(problems))
    trainable(model)
    if loss_fn is not None:
        check_loss_fn(loss_fn)
    if loss_fn is None or batch is None:
        return ModelCheck(random_loss=None)
    device = next(iter(trainable(model).values())).device
    batch = swapped(batch, {id(t): t.to(device) for t in tensors_in(batch)})
    some = _finite(model, loss_fn, examples(batch, slice(0, GROUPED)), device)
    if not example_count(some):
        return ModelCheck(random_loss=None)
    few = examples(some, slice(0, CANARIES))
    check_buffers(model, loss_fn, few, device)
    first_again = torch.tensor([*range(example_count(few)), 0], device=device)
    random = _canary(model, loss_fn, examples(few, first_again), device)
    expect_separate(model, loss_fn, some)
    return ModelCheck(random_loss=random)


def expect_separate(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, least: float = _LEAST
) -> bool:
    """Raise `UnsupportedLayer` if a loss depends on who else is in the batch; say if it draws.

    The losses of the batch, half of which is in it twice and one example with another's label, are
    compared with those of every second example and of the others. Dropout is left out; a loss that
    draws even so is not compared. Differences below `least` are rounding.
    """
    device = next(iter(trainable(model).values())).device
    batch = _finite(model, loss_fn, batch, device)
    count = example_count(batch)
    if not count:
        return False
    everyone = torch.arange(count, device=device)
    with undisturbed(model, device, SEED) as restore:
        random = is_random(model, loss_fn, batch, restore)
        with NoDropout(device.type) as quiet, torch.enable_grad():
            if random and is_random(model, loss_fn, batch, restore):
                return random
            crowd = torch.cat([everyone, everyone[: (count + 1) // 2]])
            among = _among_namesakes(model, loss_fn, batch, crowd).detach()
            restore()
            for part in (everyone[::2], everyone[1::2]):
                if len(part):
                    apart = batch_losses(model, loss_fn, examples(batch, part)).detach()
                    restore()
                    _compare("losses", apart, among[part], quiet.tolerance, least=least)
            again = among[count:]
            _compare("losses", again, among[: len(again)], quiet.tolerance, least=least)
    return random


def expect_equal_losses(
    model: nn.Module, loss_fn: LossFn, together: Any, apart: list[Any], *, least: float = _LEAST
) -> None:
    """Raise `MixedExamples` if losses of a batch are not those of its examples, each a batch.

    They may be padded differently. Dropout is left out; a loss that draws even so, or is not
    finite, is not compared. Differences below `least` are rounding.
    """
    device = next(iter(trainable(model).values())).device
    with undisturbed(model, device, SEED) as restore, NoDropout(device.type) as quiet:
        if is_random(model, loss_fn, together, restore):
            return
        with torch.enable_grad():
            among = batch_losses(model, loss_fn, together).detach()
            restore()
            for k, one in enumerate(apart):
                alone = batch_losses(model, loss_fn, one).detach()
                restore()
                if alone.isfinite().all() and among[k].isfinite():
                    _compare("losses", alone, among[k : k + 1], quiet.tolerance, least=least)


def _among_namesakes(model: nn.Module, loss_fn: LossFn, batch: Any, crowd: Tensor) -> Tensor:
    """Losses of the crowd in the company of one more: the second example with the first's label.

    The last tensor of a batch is taken for its labels; where no such example can be made up, the
    crowd is by itself.
    """
    parts = tensors_in(batch)
    if len(parts) > 1 and example_count(batch) > 1:
        second = torch.cat([crowd, crowd[1:2]])
        first = torch.cat([crowd, crowd[:1]])
        rows = {id(t): t[second] for t in parts[:-1] if t.dim() > 0}
        rows[id(parts[-1])] = parts[-1][first] if parts[-1].dim() > 0 else parts[-1]
        with suppress(RuntimeError, ValueError, IndexError):
            return loss_fn(model, swapped(batch, rows))[: len(crowd)]
    return batch_losses(model, loss_fn, examples(batch, crowd))


def _finite(model: nn.Module, loss_fn: LossFn, batch: Any, device: torch.device) -> Any:
    """The examples of a batch that have a finite loss."""
    with undisturbed(model, device, SEED), torch.enable_grad():  # as in training
        losses = loss_fn(model, batch)
    check_losses(losses, example_count(batch))
    finite = losses.detach().isfinite()
    return batch if bool(finite.all()) else examples(batch, finite)


def replace_batch_norm(model: nn.Module, groups: int = 16) -> nn.Module:
    """The model with a GroupNorm in the place of every BatchNorm, same scale and shift.

    `groups` is reduced to divide the channels into groups of two or more. The layers are replaced
    in the model itself; build the optimizer afterwards. `model` comes back, or a GroupNorm where it
    is a BatchNorm itself.

    >>> model = nn.Sequential(nn.Conv2d(3, 24, 3), nn.BatchNorm2d(24))
    >>> replace_batch_norm(model)[1].num_groups
    12
    """
    if isinstance(model, _BatchNorm):
        return _group_norm(model, groups)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                setattr(module, name, _group_norm(child, groups))
    return model


def _group_norm(old: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = old.num_features
    number = max((d for d in range(1, groups + 1) if channels % (2 * d) == 0), default=1)
    new = nn.GroupNorm(number, channels, eps=old.eps, affine=old.affine)
    if old.affine:
        new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def _problems(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        kind, path = type(module).__name__, path or "the model"
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats):
            yield (
                f"{path}: {kind} mixes the examples of a batch, so no per-example gradient exists. "
                "Replace it with GroupNorm: epsilons.gradients.replace_batch_norm(model)."
            )
        elif isinstance(module, _InstanceNorm) and module.track_running_stats and module.training:
            yield (
                f"{path}: {kind} keeps running statistics over the examples, which no noise "
                "protects. Use track_running_stats=False."
            )
        elif isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            yield f"{path}: {kind} wraps the model. Pass the model itself, `.module`."
        elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and (
            module.max_norm is not None or module.scale_grad_by_freq
        ):
            yield (
                f"{path}: {kind} with max_norm or scale_grad_by_freq lets one example change "
                "another's gradient. Leave both options off."
            )
        for name, p in module.named_parameters(recurse=False):
            if isinstance(p, nn.parameter.UninitializedParameter):
                yield f"{path}.{name}: has no shape yet. Run the model once on a batch first."


def _canary(model: nn.Module, loss_fn: LossFn, batch: Any, device: torch.device) -> bool:
    with undisturbed(model, device, SEED) as restore:
        random = is_random(model, loss_fn, batch, restore)
        with NoDropout(device.type) as quiet:
            settled = not (random and is_random(model, loss_fn, batch, restore))
            losses = batch_losses(model, loss_fn, batch).detach() if settled else None
            restore()
            rows = [
                _single(model, loss_fn, batch, i, restore, losses, quiet)
                for i in range(example_count(batch))
            ]
            norms = torch.stack([_norm(row) for row in rows])
            if not norms.isfinite().all():
                return random
            bounds = norms / 2
            torch.manual_seed(SEED)
            sums, found = clipped_gradients(
                model, loss_fn, batch, bounds, sums=_widest_sums(device)
            )
            restore()
    tolerance = quiet.tolerance
    _compare("gradient norms", found, norms, tolerance)
    factors = (bounds / norms).nan_to_num()
    for name, total in sums.items():
        expected = sum(f * row[name].cpu().double() for f, row in zip(factors, rows, strict=True))
        _compare(f"clipped gradients of {name}", total, expected, tolerance, float(norms.max()))
    return random


def _single(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    place: int,
    restore: Callable[[], None],
    losses: Tensor | None,
    quiet: NoDropout,
) -> Mapping[str, Tensor]:
    """One example's gradient by autograd: alone, or (if the loss is random) within its batch."""
    parameters = trainable(model)
    torch.manual_seed(SEED)
    with torch.enable_grad():
        if losses is None:
            loss = loss_fn(model, batch)[place]
        else:
            loss = batch_losses(model, loss_fn, examples(batch, slice(place, place + 1))).sum()
            _compare("losses", loss.detach(), losses[place], quiet.tolerance)
        found = _gradients(loss, list(parameters.values()))
    restore()
    return {
        name: torch.zeros_like(p) if gradient is None else gradient
        for (name, p), gradient in zip(parameters.items(), found, strict=True)
    }


def _gradients(loss: Tensor, parameters: list[Tensor]) -> tuple[Tensor | None, ...]:
    try:
        return _grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise UnsupportedLayer(
            "a reentrant checkpoint hides its part of the model from the gradients. "
            "Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)."
        ) from None


def _widest_sums(device: torch.device) -> Sums:
    return "float64" if widest_dtype(device) == torch.float64 else "float32"


def _norm(row: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([g.cpu().double().square().sum() for g in row.values()]).sum().sqrt()


def _compare(
    what: str,
    found: Tensor,
    expected: Any,
    tolerance: float,
    scale: float | None = None,
    *,
    least: float = _LEAST,
) -> None:
    found, expected = found.cpu().double(), torch.as_tensor(expected).cpu().double()
    size = expected.abs().max() if scale is None else torch.as_tensor(scale)
    apart = (found - expected).abs().max()
    if not bool(apart <= tolerance * size + least):
        raise MixedExamples(
            f"{what} of a batch are not those of its examples by themselves (off by "
            f"{float(apart / size):.1g} of the largest). A layer or the loss mixes examples "
            "(BatchNorm, a mean over the batch, weights by how often a class is in the batch, "
            "padding to the longest of a batch without an attention mask), the examples are not "
            "along dimension 0, the model keeps state between calls, or a rule given to norm_rule "
            "is wrong."
        )


# what a checkpoint computes again in the backward pass has no dropout either
_grad = without_override_check(torch.autograd.grad) or torch.autograd.grad
