"""Every example's gradient norm, and the sum of clipped gradients, from one backward pass.

Nothing is wrapped, hooked or left behind on the model: see `tracer` for how.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils.data import default_collate

from epsilons.gradients.accumulate import Accumulator
from epsilons.gradients.batch_dim.dims import BATCH_FIRST
from epsilons.gradients.clip_factors import clip_factors, widest_dtype
from epsilons.gradients.compile import Clipped, Compile, check_compile, compiled_pass, repays
from epsilons.gradients.isolation import in_order, undisturbed
from epsilons.gradients.rules.registry import UnsupportedLayer, without_autocast
from epsilons.gradients.tracer import PresumedWrongly, Tracer
from epsilons.gradients.trees import swapped, tensors_in

LossFn = Callable[[nn.Module, Any], Tensor]
"""One loss per example: called with model and batch, it gives a tensor (B,)."""
Sums = Literal["float64", "float32"]  # the dtype of sums over examples


def check_loss_fn(loss_fn: Any) -> None:
    """A `ValueError` unless it can be a function of model and batch; a criterion can't."""
    inner = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    of_torch = getattr(inner, "__module__", None) == F.__name__ and not isinstance(inner, nn.Module)
    if isinstance(inner, _Loss) or of_torch:
        name = type(inner).__name__ if isinstance(inner, _Loss) else inner.__name__
        raise ValueError(
            f"loss_fn is the criterion {name}, of outputs and labels; expected a function of model "
            'and batch: supervised(criterion), with reduction="none", for batches (x, y)'
        )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r}; expected a function of model and batch")


def clipped_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    bounds: float | Tensor | np.ndarray[Any, Any],
    *,
    micro_batch: int | None = None,
    sums: Sums = "float64",
    compile: Compile = "auto",
) -> tuple[dict[str, Tensor], Tensor]:
    """The sum of clipped per-example gradients by parameter name, and the norms (B,).

    `loss_fn(model, batch)`: one loss per example, (B,). `batch`: tensors, also in tuples and
    dictionaries, with the examples along dimension 0. `bounds`: C_i ≥ 0 of each example (B,), or
    one for all, up to ∞. Gradients are those of the parameters of `model` that require one; `.grad`
    is left alone.

        Σ_i g_i · min(1, C_i / (‖g_i‖ · (1 + 1e-4)))

    The factor 1 + 1e-4 covers the rounding of the norms: no example contributes more than its
    bound C_i. An example whose norm is not finite contributes nothing; its norm comes back as it
    is, for the caller to charge at C_i.

    `micro_batch`: how many examples are in memory at once; None: the whole batch. `sums`: the dtype
    of the sum over examples. With `"float64"` every pass has exactly `micro_batch` examples, the
    last one being padded with copies that don't count: then what an example adds does not depend on
    the others, as far as the kernels allow (`docs/sums.md`). With `"float32"` nothing is padded and
    gradients are summed as they come, which is faster; rounding may then let one example move the
    sum by more than its bound. `compile`: whether passes are compiled by torch; `"auto"`: if this
    call has so many that it repays (`docs/norms.md`). Then they are padded with either dtype.
    `UnsupportedLayer` where no per-example gradient exists or can be had; ValueError for losses and
    bounds that don't fit.
    """
    check_loss_fn(loss_fn)
    check_compile(compile)
    size = micro_batch or max(example_count(batch), 1)
    compile = repays(compile, model, loss_fn, batch, size, example_count(batch) // size)
    found = clipped_pass(
        trainable(model), model, loss_fn, batch, bounds, micro_batch=micro_batch, sums=sums,
        compile=compile,
    )  # fmt: skip
    return found.sums, found.norms


def clipped_pass(
    parameters: dict[str, Tensor],
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    bounds: float | Tensor | np.ndarray[Any, Any],
    *,
    micro_batch: int | None = None,
    sums: Sums = "float64",
    compile: bool = False,
) -> Clipped:
    """`clipped_gradients` for who knows the model's `trainable` parameters, with the losses."""
    device = _place(parameters)
    _check_sums(sums, device)
    count = example_count(batch)
    limits = _bounds(bounds, count, device)
    size = max(count, 1) if micro_batch is None else micro_batch
    if size < 1:
        raise ValueError(f"micro_batch={micro_batch} is not a number of examples; expected ≥ 1.")
    run = partial(compiled_pass, one_pass) if compile else one_pass
    totals: dict[str, Tensor] | None = None
    norms, losses = [limits.new_empty(0)], [limits.new_empty(0)]
    for start in range(0, count, size):
        rows = torch.arange(start, min(start + size, count), device=device)
        its, taken = limits[rows], len(rows)
        if sums == "float64" or compile:
            rows = padded(rows, size)
            its = torch.cat([its, its.new_zeros(size - taken)])
        # Chosen even if it is all of them: of one layout in memory whatever the batch's is.
        whole = len(rows) == count and sums == "float32"
        part = batch if whole else examples(batch, rows)
        clipped, lengths, found = run(sums, parameters, model, loss_fn, part, its)
        if totals is None:
            totals = clipped
        else:
            totals = {name: total.add_(clipped[name]) for name, total in totals.items()}
        norms.append(lengths[:taken])
        losses.append(found[:taken])
    if totals is None:
        dtype = _dtype(parameters, sums)
        totals = {name: torch.zeros_like(p, dtype=dtype) for name, p in parameters.items()}
    return Clipped(totals, torch.cat(norms), torch.cat(losses))


def whole_rows(count: int) -> int:
    """The next multiple of 8: kernels treat the rest after whole vectors in another way."""
    return -(-count // 8) * 8


def padded(rows: Tensor, size: int) -> Tensor:
    """The rows, and the first of them again up to `size`."""
    return torch.cat([rows, rows[:1].expand(size - len(rows))])


def _place(parameters: dict[str, Tensor]) -> torch.device:
    return next(iter(parameters.values())).device


def _check_sums(sums: str, device: torch.device) -> None:
    if sums not in ("float64", "float32"):
        raise ValueError(f"sums={sums!r}; expected 'float64' or 'float32'.")
    if sums == "float64" and widest_dtype(device) != torch.float64:
        raise ValueError(
            f"sums='float64', and {device} has no float64. Use another device, or sums='float32', "
            "where floating-point effects of the sum are not covered by the guarantee."
        )


def gradient_norms(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    *,
    batch_size: int,
    device: torch.device | str | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
    compile: Compile = "auto",
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Every example's gradient norm at the current model, (n,) float64 in dataset order.

    `loss_fn(model, batch)`: one loss per example, (B,). Of all parameters of `model` that require a
    gradient, together.

    `data` is a map-style dataset, or tensors (also in tuples and dictionaries) with the examples
    along dimension 0, or a `DataLoader` that goes through its data set in order. The model runs in
    the mode it is in; its random draws (dropout) come from `seed` and not from the global
    generators. Model, buffers, gradients and generators are left as they were, also by an
    exception. `progress(done, total)` is called after every batch. A norm that isn't finite is
    returned as it is. `batch_size`: how many examples are in a pass. `device`: must be the model's,
    where batches are put. `collate_fn`: as for a `DataLoader`. `compile`: whether passes are
    compiled by torch; `"auto"`: if the data are so many that it repays (`docs/norms.md`).
    `UnsupportedLayer` where no per-example gradient exists or can be had.

    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> loss_fn = lambda model, x: model(x).squeeze(1)
    >>> gradient_norms(model, loss_fn, torch.tensor([[3.0, 4.0], [0.0, 1.0]]), batch_size=2)
    array([5., 1.])
    """
    check_loss_fn(loss_fn)
    check_compile(compile)
    parameters = trainable(model)
    place = _place(parameters)
    if device is not None and torch.device(device).type != place.type:
        raise ValueError(
            f"device={device} but the model is on {place}; move the model there first."
        )
    total, batches = in_order(data, batch_size, collate_fn)
    norms = np.empty(total)
    done = 0
    size = 0
    with undisturbed(model, place, seed) as restore:
        for batch in batches:
            moved = {id(t): t.to(place) for t in tensors_in(batch)}
            batch, count = swapped(batch, moved), example_count(batch)
            if not size:
                size = min(batch_size, whole_rows(count))
                compile = repays(compile, model, loss_fn, batch, size, total // max(size, 1))
            if count:  # all passes have one shape and layout: see `clipped_gradients`
                rows = torch.arange(count, device=place)
                batch = examples(batch, padded(rows, max(size, count)))
            found = batch_norms(model, loss_fn, batch, compile=compile is True and count > 0)
            norms[done : done + count] = found[:count].cpu().numpy()
            done += count
            restore()
            if progress is not None:
                progress(done, total)
    if done != total:
        raise ValueError(f"the data gave {done} examples where its length is {total}.")
    return norms


def batch_norms(model: nn.Module, loss_fn: LossFn, batch: Any, *, compile: bool = False) -> Tensor:
    """The gradient norms of one batch, (B,), on the model's device."""
    run = partial(compiled_pass, one_pass) if compile else one_pass
    return run("float64", trainable(model), model, loss_fn, batch, None).norms


def one_pass(
    sums: Sums,
    parameters: dict[str, Tensor],
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    limits: Tensor | None,
) -> Clipped:
    """The clipped sum of a batch in memory; without `limits`, clip bounds (B,), no sum."""
    keep = limits is not None
    accumulated, losses = backward_pass(model, loss_fn, batch, parameters, keep=keep)
    if limits is None:
        return Clipped({}, accumulated.squares.sqrt(), losses)
    norms, factors, finite = clip_factors(accumulated.squares, limits)
    factors = factors.to(_dtype(parameters, sums))
    return Clipped(accumulated.clipped_sum(factors, finite), norms, losses)


def _dtype(parameters: dict[str, Tensor], sums: Sums) -> torch.dtype:
    """That of the sums; float64 parameters keep theirs."""
    wide = sums == "float64" or any(p.dtype == torch.float64 for p in parameters.values())
    return torch.float64 if wide else torch.float32


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that training changes, by name."""
    parameters: dict[str, Tensor] = {
        name: p for name, p in model.named_parameters() if p.requires_grad
    }
    if not parameters:
        raise ValueError(
            "the model has no trainable parameter, so there is no gradient; "
            "expected at least one with requires_grad=True."
        )
    if any(p.is_complex() for p in parameters.values()):
        found = ", ".join(name for name, p in parameters.items() if p.is_complex())
        raise ValueError(
            f"{found}: complex parameters have two numbers in each place, and noise would reach "
            "one of them. Keep torch.view_as_real(…) of it as the parameter, and use "
            "torch.view_as_complex(parameter) in the model."
        )
    foreign = [f"{name} ({type(p).__name__})" for name, p in parameters.items() if _is_foreign(p)]
    if foreign:
        raise UnsupportedLayer(
            f"{', '.join(foreign)}: a parameter that is a tensor subclass, as fully_shard's "
            "DTensor, acts by rules of its own, so that its per-example gradients can't be seen. "
            "Train the model with plain parameters: before fully_shard or quantization, or with "
            "nn.Parameter(p.full_tensor()) in their place."
        )
    return parameters


def _is_foreign(parameter: Tensor) -> bool:
    """Whether operations on it may do something else than on an `nn.Parameter`.

    A subclass that only carries more attributes is as good as an `nn.Parameter`.
    """
    kind = type(parameter)
    if kind is nn.parameter.UninitializedParameter:
        return False
    return (
        kind.__torch_function__ != nn.Parameter.__torch_function__
        or kind.__torch_dispatch__ != nn.Parameter.__torch_dispatch__
    )


def example_count(batch: Any) -> int:
    """How many examples a batch holds: the first dimension of its tensors."""
    sizes = {t.shape[0] for t in tensors_in(batch) if t.dim() > 0}
    if len(sizes) != 1:
        raise ValueError(
            f"a batch holds tensors whose first dimensions are {sorted(sizes)}; expected one "
            "number of examples, along dimension 0 of every tensor."
        )
    return sizes.pop()


def examples(batch: Any, part: slice | Tensor) -> Any:
    """Some examples of a batch of tensors, tuples, lists or dictionaries."""
    with torch.inference_mode(False):
        chosen = {id(t): t[part] for t in tensors_in(batch) if t.dim() > 0}
    return swapped(batch, chosen)


def _bounds(bounds: Any, count: int, device: torch.device) -> Tensor:
    limits = torch.as_tensor(bounds, dtype=widest_dtype(device), device=device)
    limits = limits.detach().resolve_neg()
    if limits.dim() == 0:
        limits = limits.expand(count)
    if limits.shape != (count,):
        raise ValueError(
            f"bounds has shape {tuple(limits.shape)}; expected a number or one per example, "
            f"({count},)."
        )
    if not bool((limits >= 0).all()):
        raise ValueError("bounds holds a negative number or NaN; expected clipping bounds ≥ 0.")
    return limits


def backward_pass(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    parameters: dict[str, Tensor],
    *,
    keep: bool,
) -> tuple[Accumulator, Tensor]:
    """Norms and what the clipped sum needs, from one backward pass; and the losses."""
    versions = [(t, t._version) for t in tensors_in(batch) if not t.is_inference()]
    try:
        return _traced_pass(model, loss_fn, batch, parameters, keep=keep, presume=True)
    except PresumedWrongly:
        if any(t._version != version for t, version in versions):
            raise RuntimeError(
                "the model modifies its input in place and must be run a second time. "
                "Use the out-of-place operation."
            ) from None
        return _traced_pass(model, loss_fn, batch, parameters, keep=keep, presume=False)


def _traced_pass(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    parameters: dict[str, Tensor],
    *,
    keep: bool,
    presume: bool,
) -> tuple[Accumulator, Tensor]:
    count = example_count(batch)
    mode = Tracer(parameters, count, presume)
    # Aliases, so that what is noted about a tensor is not noted about the caller's.
    aliases = {id(t): t.detach() for t in tensors_in(batch)}
    for alias in aliases.values():
        if alias.dim() > 0:
            mode.data.mark(alias, BATCH_FIRST)
    with torch.inference_mode(False), torch.enable_grad(), _eager():
        with mode:
            losses = loss_fn(model, swapped(batch, aliases))
        check_losses(losses, count)
        if presume and mode.data.presumed(losses):
            raise PresumedWrongly
        accumulated = Accumulator(
            mode.uses, parameters, count, keep=keep, coarse=mode.weights.rounds
        )
        with without_autocast(mode.device):
            if losses.requires_grad:
                mode.backward(losses.sum(), accumulated.receive)
            accumulated.finish()
    return accumulated, losses.detach().to(accumulated.squares.dtype)


def _eager() -> AbstractContextManager[Any]:
    # A compiled model runs as it was written: compiled code can't be traced.
    if "torch._dynamo" in sys.modules:
        return cast(AbstractContextManager[Any], torch.compiler.set_stance("force_eager"))
    return nullcontext()


def check_losses(losses: Any, count: int) -> None:
    """A `ValueError` unless there is one loss per example."""
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"loss_fn returned {got}; expected one loss per example, ({count},). "
            'Use reduction="none" and average within each example only.'
        )
