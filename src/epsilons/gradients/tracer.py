"""The forward pass, traced: every operation on a weight and data is recorded as a `ParameterUse`.

While `Tracer` is active, such operations run with the weight detached, so that autograd never
computes a weight gradient; the gradients of their outputs go to the rules instead. The model isn't
touched.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from epsilons.gradients.autograd_nodes import (
    GradientTap,
    anchor,
    packs_tensors,
    running_checkpoint,
    without_override_check,
)
from epsilons.gradients.batch_dim.dims import BatchDim, examples_first
from epsilons.gradients.batch_dim.propagate import agreeing, output_batch_dim
from epsilons.gradients.operations import (
    ALIKE,
    DIFFERENTIATING,
    EXPANDING,
    IN_PLACE,
    INQUIRING,
    NEW,
    ROW_BY_ROW,
)
from epsilons.gradients.parameter_use import ParameterUse, parameter_uses
from epsilons.gradients.rules import (
    COMPOSITES,
    FUSED,
    REFUSED,
    RULES,
    GradientRule,
    Materialized,
    UnsupportedLayer,
)
from epsilons.gradients.rules.linear import Bias
from epsilons.gradients.traced_data import PresumedWrongly, TracedData
from epsilons.gradients.trees import swapped, tensors_in
from epsilons.gradients.weights import TracedWeights, Weight, roots_of

__all__ = ["PresumedWrongly", "Tracer"]


@dataclass(eq=False)
class Tracer(TorchFunctionMode):
    """One forward pass over `count` examples, traced."""

    parameters: Mapping[str, Tensor]
    count: int
    presume: bool = True
    receive: Callable[[ParameterUse], None] | None = None  # in the backward pass
    uses: list[ParameterUse] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        hooked = [name for name, p in self.parameters.items() if p._backward_hooks]
        if hooked:
            raise UnsupportedLayer(
                f"{', '.join(hooked)}: a hook on the parameter may change its gradient, and would "
                "not be called for every example. Remove it."
            )
        device = next(iter(self.parameters.values())).device
        self.device = device.type
        self.anchor = anchor(device)
        self.weights = TracedWeights(self.parameters)
        self.data = TracedData(self.count, self.presume)
        self.recomputes = False  # whether a checkpoint runs a part of the model again

    def expect(self, weight: Any, operation: str) -> ParameterUse | None:
        """Announce a use whose gradients an operation will `deliver`; None for a non-weight."""
        found = self.weights.find(weight)
        if found is None or self.receive is not None:
            return None
        use = ParameterUse(found, _DELIVERED, operation)
        self.uses.append(use)
        return use

    def deliver(
        self, use: ParameterUse | None, g: Tensor, rule: GradientRule | None = None
    ) -> None:
        """Complete an announced use: by the output gradient for `rule`, or by the gradients."""
        if use is None:
            return
        assert self.receive is not None, "gradients before the loss is known"
        use.rule, use.g = rule or use.rule, g
        self.receive(use)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in INQUIRING:
            return func(*args, **kwargs)
        if func in FUSED:
            out = self._fused(func, args, kwargs)
            if out is not NotImplemented:
                return out
        elif func in ROW_BY_ROW and self._on_rows_alone(args, kwargs):
            out = func(*args, **kwargs)
            for part in (out,) if isinstance(out, Tensor) else out:
                self.data.mark_rows(part)
            return out
        weights: list[Weight] = []
        data: list[tuple[Tensor, BatchDim | None]] = []
        guesses: list[bool] = []
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(kwargs)
        if func in ALIKE:  # another tensor gives its type and device only
            tensors = tensors[1:] if func in NEW else tensors[:1]
        for tensor in tensors:
            if (weight := self.weights.find(tensor)) is not None:
                weights.append(weight)
            elif (known := self.data.find(tensor)) is not None:
                data.append((tensor, known[1]))
                guesses.append(known[2])
        if func in DIFFERENTIATING:
            raise UnsupportedLayer(
                "the model differentiates itself while it runs (torch.autograd inside forward), "
                "so gradients can't be told apart by example. Compute that part in closed form."
            )
        if data and func in REFUSED:
            REFUSED[func](*args, **kwargs)
        if func is torch.Tensor.__setitem__ and data and not weights:
            return self.data.assign(*args)
        presumed = bool(data) and all(guesses)
        if any(guesses) and not presumed and not agreeing(func, args, kwargs, data):
            raise PresumedWrongly
        if weights and data:
            if torch.is_grad_enabled():
                return self._mixed(func, args, kwargs, tensors, data, weights, presumed)
            self._refuse_reentrant(weights)
        elif weights:  # a view taken without gradients still is a view of the weight
            out = self._expanded(func, args, kwargs, weights[0])
            return self.weights.derive(func, args, kwargs, weights) if out is None else out
        out = func(*args, **kwargs)
        if data:
            self.data.mark_outputs(func, args, kwargs, data, out, presumed)
        elif tensors:
            self.data.mark_apart(out)
        else:
            self.data.mark_constant(out)
        return out

    def backward(self, loss: Tensor, receive: Callable[[ParameterUse], None]) -> None:
        """Send gradients back from the loss; `receive` gets every use with its g."""
        self.uses.clear()  # `receive` frees each of them once it is done with it
        self.receive = _untraced(receive) if self.recomputes else receive
        names, parameters = list(self.parameters), list(self.parameters.values())
        with self if self.recomputes else nullcontext():
            # Every parameter was detached, so none of them can be reached; if one is, raise.
            found = _grad(loss, [self.anchor, *parameters], allow_unused=True)[1:]
        leaked = [name for name, g in zip(names, found, strict=True) if g is not None]
        if leaked:
            raise UnsupportedLayer(
                f"{', '.join(leaked)}: used by an operation that can't be traced (a custom "
                "autograd.Function, or torch.func inside the model). Write it with torch's "
                "operations, or call them on the parameter first."
            )

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operation as a node of its own, where it maps rows of data to rows."""
        apply, build = FUSED[func]
        if RULES.get(func, _NO_RULE)[0] is not build or not torch.is_grad_enabled():
            return NotImplemented
        if packs_tensors():
            # Checkpoints go through a part of the model again, where less is known about its data:
            # what another node had saved could pass for what this one needs.
            return NotImplemented
        return apply(self, *args, **kwargs)

    def _on_rows_alone(self, args: Any, kwargs: Any) -> bool:
        """Whether the first argument has one row per example, and no other one is a tensor."""
        if not args or not self.data.batch_first(args[0]):
            return False
        others = (*args[1:], *kwargs.values())
        return not any(isinstance(other, Tensor) for other in others)

    def _expanded(self, func: Any, args: Any, kwargs: Any, weight: Weight) -> Tensor | None:
        """A weight given a dimension of the batch's size: presumed to be one row per example."""
        if getattr(func, "__name__", "") not in EXPANDING:
            return None
        if not self.presume or not torch.is_grad_enabled():
            return None
        source = args[0].shape
        out: Tensor = func(args[0].detach(), *args[1:], **kwargs)
        old = (1,) * (out.dim() - len(source)) + tuple(source)
        grown = [d for d in range(out.dim()) if old[d] == 1 and out.shape[d] == self.count > 1]
        if not grown:
            return None
        row = [1 if d == grown[0] else size for d, size in enumerate(out.shape)]
        if any(size not in (1, length) for size, length in zip(old, row, strict=True)):
            return None
        use = ParameterUse(weight, Bias(source), "expand")
        return self._tapped(out, BatchDim(grown[0]), [use], presumed=True)

    def _mixed(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        data: list[tuple[Tensor, BatchDim | None]],
        weights: list[Weight],
        presumed: bool,
    ) -> Any:
        """Run an operation on weights and data with the weights detached; record its uses."""
        if packs_tensors():
            self.recomputes = self.recomputes or running_checkpoint() is not None
        if func not in RULES and func in COMPOSITES:
            return COMPOSITES[func](self, *args, **kwargs)
        if func not in RULES and isinstance(func, types.FunctionType):
            body = without_override_check(func)
            if body is not None:
                with self:
                    return body(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in IN_PLACE:
            with self:
                # From a copy: the rule still needs what the operation is about to overwrite.
                result = IN_PLACE[name](args[0].clone(), *args[1:], **kwargs)
                return args[0].copy_(result)
        used = {id(t): w for t in tensors if (w := self.weights.find(t)) is not None}
        detached = {id(t): t.detach() for t in tensors if id(t) in used}
        by_weight = {id(d): used[key] for key, d in detached.items()}
        args = swapped(args, detached)
        if kwargs:
            kwargs = swapped(kwargs, detached)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or any(out is t for t in (*tensors, *detached.values())):
            kind = "in place" if out is None or isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedLayer(
                f"{_path(weights)}: {name} uses a parameter together with data and gives its "
                f"result {kind}. Write it with operations that return one new tensor."
            )
        batch_dim = output_batch_dim(func, args, kwargs, data, out, self.count)
        located = [(t, at) for t, at in data if at is not None]
        if batch_dim is None or len(located) < len(data):
            if self.presume:
                raise PresumedWrongly
            raise UnsupportedLayer(
                f"{_path(weights)}: lost track of the examples before or in {name} "
                f"(inputs {[tuple(t.shape) for t, _ in data]}, output {tuple(out.shape)}). "
                "Keep the examples along a dimension of their own, first if you can, and derive "
                "weights from parameters without a custom autograd.Function."
            )
        uses: list[ParameterUse] = []
        if self.receive is None:  # else a checkpoint runs its part again, whose uses are known
            uses = parameter_uses(
                func, args, kwargs, located, by_weight, out, batch_dim, self.count
            )
        return self._tapped(out, batch_dim, uses, presumed)

    def _tapped(
        self, out: Tensor, batch_dim: BatchDim, uses: list[ParameterUse], presumed: bool
    ) -> Tensor:
        """The output, tapped so that the uses get its gradient in the backward pass."""
        self.uses.extend(uses)
        versions = [(t, t._version) for use in uses for t in use.rule.saved()]

        def arrived(g: Tensor) -> None:
            if not uses:
                return
            assert self.receive is not None, "gradients before the loss is known"
            if any(t._version != version for t, version in versions):
                raise RuntimeError(
                    f"{_path([u.weight for u in uses])}: the input of {uses[0].operation} was "
                    "modified in place afterwards. Use the out-of-place operation."
                )
            rows = examples_first(g, batch_dim, self.count)
            for use in uses:
                use.g = rows
                self.receive(use)
            # The graph lives until the pass ends; the operands need not.
            uses.clear()
            versions.clear()

        out = cast(Tensor, GradientTap.apply(out, self.anchor, arrived))  # type: ignore[no-untyped-call]
        self.data.mark(out, batch_dim, presumed)
        return out

    def _refuse_reentrant(self, weights: Sequence[Weight]) -> None:
        if running_checkpoint() == "CheckpointFunction.forward":
            raise UnsupportedLayer(
                f"{_path(weights)}: a reentrant checkpoint hides its part of the model from "
                "the gradients. Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)."
            )


def _path(weights: Sequence[Weight]) -> str:
    return ", ".join(roots_of(weights))


def _untraced(receive: Callable[[ParameterUse], None]) -> Callable[[ParameterUse], None]:
    """The same, where the tracer is active on the way back too: for checkpoints only."""

    def received(use: ParameterUse) -> None:
        with torch._C.DisableTorchFunction():
            receive(use)

    return received


_NO_RULE = None, None
_DELIVERED = Materialized()  # the rule where what comes back is the gradients
_grad = without_override_check(torch.autograd.grad) or torch.autograd.grad
