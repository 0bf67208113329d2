"""The forward pass, traced: every operation on a weight and data is recorded as a `ParameterUse`.

While `Tracer` is active, such operations run with the weight detached, so that autograd never
computes a weight gradient; the gradients of their outputs go to the rules instead. The model isn't
touched.
"""

from __future__ import annotations

import types
import weakref
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
    opened,
    packs_tensors,
    running_checkpoint,
    unpacked,
)
from epsilons.gradients.batch_dim.cache import CachedDims, Known, cache_key, lookup, store
from epsilons.gradients.batch_dim.dims import BATCH_FIRST, BatchDim, examples_first
from epsilons.gradients.batch_dim.indexing import assigned_batch_dim
from epsilons.gradients.batch_dim.propagate import agreeing, output_batch_dim
from epsilons.gradients.operations import (
    ALIKE,
    CASTING,
    DIFFERENTIATING,
    ELEMENTWISE,
    EXPANDING,
    IN_PLACE,
    INQUIRING,
    NEW,
    REARRANGING,
    ROW_BY_ROW,
    changes,
)
from epsilons.gradients.parameter_use import ParameterUse, Weight
from epsilons.gradients.rules import (
    COMPOSITES,
    FUSED,
    LOW_PRECISION,
    REFUSED,
    RULES,
    GradientRule,
    Materialized,
    UnsupportedLayer,
)
from epsilons.gradients.rules.conv import Conv
from epsilons.gradients.rules.derived import Standardised, derivation
from epsilons.gradients.rules.fallback import fallback
from epsilons.gradients.rules.linear import Bias
from epsilons.gradients.trees import swapped, tensors_in


class PresumedWrongly(Exception):
    """A tensor taken for one row per example, because of its size, was something else."""


@dataclass(eq=False)
class Tracer(TorchFunctionMode):
    """One forward pass over `count` examples."""

    parameters: Mapping[str, Tensor]
    count: int
    presume: bool = True
    receive: Callable[[ParameterUse], None] | None = None
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
        self._weights = {
            id(p): Weight(p, frozenset([name]), True) for name, p in self.parameters.items()
        }
        self._derived: list[Tensor] = []
        self._data: dict[int, Known] = {}
        self.recomputes = False
        self.rounds = False  # whether weights were derived in bfloat16 or float16

    def mark(self, tensor: Tensor, batch_dim: BatchDim | None, presumed: bool = False) -> None:
        """Take a tensor for data with this batch_dim; `presumed` if only its size says so."""
        self._data[id(tensor)] = (weakref.ref(tensor), batch_dim, presumed)

    def presumed(self, tensor: Tensor) -> bool:
        """Whether nothing but sizes ties a tensor to the data."""
        entry = self._data.get(id(tensor))
        return entry is not None and entry[0]() is tensor and entry[2]

    def note(self, tensor: Tensor, dim: int, like: Tensor) -> None:
        """Take a tensor for data whose dimension `dim` holds the examples as `like`'s does.

        Unless more is known about it: that it is a weight, or data.
        """
        batch_dim, presumed = self._batch_dim(tensor)
        its, _ = self._batch_dim(like)
        unknown = batch_dim is None or presumed
        if id(tensor) not in self._weights and unknown and its is not None:
            self.mark(tensor, BatchDim(dim, its.inner))

    def mark_rows(self, tensor: Tensor) -> None:
        """Take a tensor for data with one row per example."""
        self.mark(tensor, BATCH_FIRST)

    def batch_first(self, tensor: Tensor) -> bool:
        """Whether a tensor is data with one row per example, and not only by its size."""
        entry = self._data.get(id(tensor))
        if entry is None or entry[2] or entry[1] != BATCH_FIRST:
            return False
        return entry[0]() is tensor and tensor.shape[0] == self.count

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or known to come from parameters alone."""
        return id(tensor) in self._weights

    def expect(self, weight: Any, operation: str) -> ParameterUse | None:
        """Announce a use whose gradients an operation will `deliver`; None for a non-weight."""
        if id(weight) not in self._weights or self.receive is not None:
            return None
        use = ParameterUse(self._weights[id(weight)], _DELIVERED, operation)
        self.uses.append(use)
        return use

    def deliver(
        self, use: ParameterUse | None, g: Tensor, rule: GradientRule | None = None
    ) -> None:
        """What came back to an announced use: g for its rule, or without one the gradients."""
        if use is None:
            return
        assert self.receive is not None, "gradients before the loss is known"
        use.rule, use.g = rule or use.rule, g
        self.receive(use)

    def is_derived(self, weight: Tensor) -> bool:
        """Whether something is known about how a weight was derived from parameters."""
        known = self._weights.get(id(weight))
        return known is not None and known.derivation is not None

    def path(self, weights: Sequence[Weight]) -> str:
        return ", ".join(sorted(set[str]().union(*(w.roots for w in weights))))

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
                self.mark_rows(part)
            return out
        key = cache_key(func, args, kwargs, self.count, self._data)
        cached = None if key is None else lookup(key)
        if cached is not None:
            out = func(*args, **kwargs)
            if not self._mark_cached(out, cached):
                known = [(t, self._batch_dim(t)[0]) for t in tensors_in((args, kwargs))]
                self._propagate(func, args, kwargs, known, out, presumed=False)
            return out
        weights: list[Weight] = []
        data: list[tuple[Tensor, BatchDim | None]] = []
        guesses: list[bool] = []
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(kwargs)
        if func in ALIKE:  # what another tensor gives is its type and device
            tensors = tensors[1:] if func in NEW else tensors[:1]
        for tensor in tensors:
            if (weight := self._weights.get(id(tensor))) is not None:
                weights.append(weight)
            elif (entry := self._data.get(id(tensor))) is not None and entry[0]() is tensor:
                data.append((tensor, entry[1]))
                guesses.append(entry[2])
            elif tensor.requires_grad and not tensor.is_leaf:
                # From what can't be traced, such as an autograd.Function of the model's own.
                guess = self.presume and tensor.dim() > 0 and tensor.shape[0] == self.count
                data.append((tensor, BATCH_FIRST if guess else None))
                guesses.append(guess)
        if func in DIFFERENTIATING:
            raise UnsupportedLayer(
                "the model differentiates itself while it runs (torch.autograd inside forward), "
                "so gradients can't be told apart by example. Compute that part in closed form."
            )
        if data and func in REFUSED:
            REFUSED[func](*args, **kwargs)
        if func is torch.Tensor.__setitem__ and data and not weights:
            return self._assign(*args)
        presumed = bool(data) and all(guesses)
        if any(guesses) and not presumed and not agreeing(func, args, kwargs, data):
            raise PresumedWrongly
        if weights and data:
            if torch.is_grad_enabled():
                return self._mixed(func, args, kwargs, tensors, data, weights, presumed)
            self._refuse_reentrant(weights)
        elif weights:  # a view taken without gradients still is a view of the weight
            return self._derive(func, args, kwargs, weights)
        out = func(*args, **kwargs)
        if data:
            found = self._propagate(func, args, kwargs, data, out, presumed)
            if key is not None:
                store(key, found)
        elif self.presume and not tensors:
            self._presume(out)
        return out

    def backward(self, loss: Tensor, receive: Callable[[ParameterUse], None]) -> None:
        """Send gradients back from the loss; every use is handed over with its g."""
        self.uses.clear()  # whoever receives them lets go of each in time
        self.receive = _untraced(receive) if self.recomputes else receive
        names, parameters = list(self.parameters), list(self.parameters.values())
        with self if self.recomputes else nullcontext():
            # Every parameter was detached, so none of them can be reached; if one is, say so.
            found = _grad(loss, [self.anchor, *parameters], allow_unused=True)[1:]
        leaked = [name for name, g in zip(names, found, strict=True) if g is not None]
        if leaked:
            raise UnsupportedLayer(
                f"{', '.join(leaked)}: used by an operation that can't be traced (a custom "
                "autograd.Function, or torch.func inside the model). Write it with torch's "
                "operations, or call them on the parameter first."
            )

    def _propagate(
        self, func: Any, args: Any, kwargs: Any, data: Any, out: Any, presumed: bool
    ) -> CachedDims:
        """Mark what comes out of an operation on data; shapes and batch_dims of its tensors."""
        batch_dims: dict[torch.Size, BatchDim | None] = {}
        parts = tensors_in(out)
        for part in parts:
            if part.shape not in batch_dims:
                found = output_batch_dim(func, args, kwargs, data, part, self.count)
                batch_dims[part.shape] = found
            self.mark(part, batch_dims[part.shape], presumed)
        return [(part.shape, batch_dims[part.shape]) for part in parts]

    def _mark_cached(self, out: Any, shaped: CachedDims) -> bool:
        """Mark what came out as before; False if it has other shapes, which then say more."""
        parts = [out] if isinstance(out, Tensor) else tensors_in(out)
        if [part.shape for part in parts] != [shape for shape, _ in shaped]:
            return False
        for part, (_, batch_dim) in zip(parts, shaped, strict=True):
            self.mark(part, batch_dim)
        return True

    def _assign(self, target: Tensor, index: Any, value: Any) -> None:
        """target[index] = value, which makes data of the target."""
        batch_dim, presumed = self._batch_dim(target)
        its, guessed = self._batch_dim(value) if isinstance(value, Tensor) else (None, False)
        if (presumed and target.requires_grad) or (guessed and value.requires_grad):
            raise PresumedWrongly
        target[index] = value
        if its is not None and not guessed:
            known = None if presumed else batch_dim
            self.mark(target, assigned_batch_dim(target, index, value, its, known, self.count))
        elif batch_dim is None or (isinstance(value, Tensor) and value.requires_grad):
            self.mark(target, None)

    def _batch_dim(self, tensor: Tensor) -> tuple[BatchDim | None, bool]:
        entry = self._data.get(id(tensor))
        known = entry is not None and entry[0]() is tensor
        return (entry[1], entry[2]) if known and entry is not None else (None, False)

    def _presume(self, out: Any) -> None:
        # An initial state of zeros, noise, a range over the batch: constants, one row per example.
        if isinstance(out, Tensor) and out.dim() > 0 and out.shape[0] == self.count:
            self.mark(out, BATCH_FIRST, presumed=True)

    def _derive(self, func: Any, args: Any, kwargs: Any, weights: list[Weight]) -> Any:
        name = getattr(func, "__name__", "")
        if torch.is_grad_enabled() and changes(name) and id(args[0]) in self._weights:
            raise UnsupportedLayer(
                f"{self.path(weights)}: {name} changes a weight in place while the model runs. "
                "Use the out-of-place operation."
            )
        if self.presume and name in EXPANDING and torch.is_grad_enabled():
            expanded = self._expanded(func, args, kwargs, weights[0])
            if expanded is not None:
                return expanded
        with unpacked():
            out = func(*args, **kwargs)
        for part in tensors_in(out):
            if not part.requires_grad or id(part) in self._weights:
                continue
            self._derived.append(part)  # kept, so that its id stays its own
            single = weights[0]
            if name in CASTING and part.shape == single.tensor.shape:
                self._weights[id(part)] = single
                continue
            self.rounds = self.rounds or part.dtype in LOW_PRECISION
            rearranged = (
                len(weights) == 1
                and single.rearranged
                and name in REARRANGING
                and part.numel() == single.tensor.numel()
            )
            roots = frozenset[str]().union(*(w.roots for w in weights))
            found = None
            if len(roots) == len(weights) and not rearranged:
                found = derivation(func, args, kwargs, part, self._known)
            self._weights[id(part)] = Weight(part, roots, rearranged, found)
        return out

    def _known(self, tensor: Any) -> Weight | None:
        return self._weights.get(id(tensor))

    def _expanded(self, func: Any, args: Any, kwargs: Any, weight: Weight) -> Tensor | None:
        """A weight given a dimension of the batch's size: one equal row for each example."""
        source = args[0].shape
        out: Tensor = func(args[0].detach(), *args[1:], **kwargs)
        old = (1,) * (out.dim() - len(source)) + tuple(source)
        grown = [d for d in range(out.dim()) if old[d] == 1 and out.shape[d] == self.count > 1]
        if not grown:
            return None
        row = [1 if d == grown[0] else size for d, size in enumerate(out.shape)]
        if any(size not in (1, length) for size, length in zip(old, row, strict=True)):
            return None
        rule = (weight, Bias(source))
        return self._trace_output(out, BatchDim(grown[0]), [rule], "expand", presumed=True)

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
        self._notice_checkpoint()
        if func not in RULES and func in COMPOSITES:
            return COMPOSITES[func](self, *args, **kwargs)
        if func not in RULES and isinstance(func, types.FunctionType):
            body = opened(func)
            if body is not None:
                with self:
                    return body(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        if name in IN_PLACE:
            return self._out_of_place(name, args, kwargs)
        used = {id(t): t for t in tensors if id(t) in self._weights}
        detached = {key: tensor.detach() for key, tensor in used.items()}
        args = swapped(args, detached)
        if kwargs:
            kwargs = swapped(kwargs, detached)
        out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or any(out is t for t in (*tensors, *detached.values())):
            kind = "in place" if out is None or isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedLayer(
                f"{self.path(weights)}: {name} uses a parameter together with data and gives its "
                f"result {kind}. Write it with operations that return one new tensor."
            )
        batch_dim = output_batch_dim(func, args, kwargs, data, out, self.count)
        if batch_dim is None or any(its is None for _, its in data):
            if self.presume:
                raise PresumedWrongly
            raise UnsupportedLayer(
                f"{self.path(weights)}: lost track of the examples before or in {name} "
                f"(inputs {[tuple(t.shape) for t, _ in data]}, output {tuple(out.shape)}). "
                "Keep the examples along a dimension of their own, first if you can, and derive "
                "weights from parameters without a custom autograd.Function."
            )
        if self.receive is not None:
            # A checkpoint runs its part again on the way back, for what autograd saved there.
            out = self._tap(out, lambda g: None)
            self.mark(out, batch_dim, presumed)
            return out
        by_weight = {id(detached[key]): self._weights[key] for key in detached}
        rules = self._rules(func, args, kwargs, data, by_weight, batch_dim, out)
        self._keep_output(rules, out, batch_dim)
        return self._trace_output(out, batch_dim, rules, name, presumed)

    def _fused(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation as a node of its own, where it maps rows of data to rows."""
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
        if not args or not self.batch_first(args[0]):
            return False
        others = (*args[1:], *kwargs.values())
        return not any(isinstance(other, Tensor) for other in others)

    def _notice_checkpoint(self) -> None:
        if packs_tensors():
            self.recomputes = self.recomputes or running_checkpoint() is not None

    def _refuse_reentrant(self, weights: Sequence[Weight]) -> None:
        if running_checkpoint() == "CheckpointFunction.forward":
            raise UnsupportedLayer(
                f"{self.path(weights)}: a reentrant checkpoint hides its part of the model from "
                "the gradients. Use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)."
            )

    def _keep_output(
        self, rules: list[tuple[Weight, GradientRule]], out: Tensor, batch_dim: BatchDim
    ) -> None:
        for weight, rule in rules:
            if isinstance(rule, Conv) and isinstance(weight.derivation, Standardised):
                rule.keep(examples_first(out.detach(), batch_dim, self.count))

    def _rules(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        data: Any,
        by_weight: Any,
        batch_dim: BatchDim,
        out: Tensor,
    ) -> list[tuple[Weight, GradientRule]]:
        plain = [t.detach() for t, _ in data]
        first = [
            examples_first(t, its, self.count) for t, (_, its) in zip(plain, data, strict=True)
        ]
        originals = [t for t, _ in data]
        if func in RULES and not any(t.is_complex() for t in (*plain, out)):
            build, argument = RULES[func]
            subject = args[0] if args else kwargs.get(argument)
            applies = argument is None or (len(data) == 1 and originals[0] is subject)
            if getattr(func, "__name__", "") in ELEMENTWISE:
                place = data[0][1].dim - data[0][0].dim()
                applies = applies and not any(_spans(w.tensor, place) for w in by_weight.values())
            if applies:
                rows = {id(t): rows for t, rows in zip(originals, first, strict=True)}
                found = list(build(*swapped(args, rows), **swapped(kwargs, rows)))
                rules = [(by_weight[id(w)], rule) for w, rule in found if id(w) in by_weight]
                if {id(w) for w, _ in found} >= set(by_weight):
                    return rules
        pairs = list(zip(plain, first, strict=True))
        unhooked = {id(t): d for t, d in zip(originals, plain, strict=True)}
        args, kwargs = swapped(args, unhooked), swapped(kwargs, unhooked)
        return [
            (
                by_weight[id(tensor)],
                fallback(func, args, kwargs, pairs, tensor, batch_dim, out, self.count),
            )
            for tensor in {id(t): t for t in tensors_in((args, kwargs))}.values()
            if id(tensor) in by_weight
        ]

    def _trace_output(
        self,
        out: Tensor,
        batch_dim: BatchDim,
        rules: list[tuple[Weight, GradientRule]],
        name: str,
        presumed: bool,
    ) -> Tensor:
        uses = [ParameterUse(weight, rule, name) for weight, rule in rules]
        versions = [(t, t._version) for _, rule in rules for t in rule.saved()]
        self.uses.extend(uses)

        def arrived(g: Tensor) -> None:
            assert self.receive is not None, "gradients before the loss is known"
            if any(t._version != version for t, version in versions):
                raise RuntimeError(
                    f"{self.path([u.weight for u in uses])}: the input of {name} was modified in "
                    "place afterwards. Use the out-of-place operation."
                )
            rows = examples_first(g, batch_dim, self.count)
            for use in uses:
                use.g = rows
                self.receive(use)
            # The graph lives until the pass ends; the operands need not.
            uses.clear()
            versions.clear()

        out = self._tap(out, arrived)
        self.mark(out, batch_dim, presumed)
        return out

    def _tap(self, out: Tensor, arrived: Callable[[Tensor], None]) -> Tensor:
        return cast(Tensor, GradientTap.apply(out, self.anchor, arrived))  # type: ignore[no-untyped-call]

    def _out_of_place(self, name: str, args: Any, kwargs: Any) -> Any:
        target = args[0]
        with self:
            # From a copy: the rule still needs what the operation is about to overwrite.
            result = IN_PLACE[name](target.clone(), *args[1:], **kwargs)
            return target.copy_(result)


def _untraced(receive: Callable[[ParameterUse], None]) -> Callable[[ParameterUse], None]:
    """The same, where the tracer is active on the way back too: for checkpoints only."""

    def received(use: ParameterUse) -> None:
        with torch._C.DisableTorchFunction():
            receive(use)

    return received


def _spans(weight: Tensor, place: int) -> bool:
    return weight.dim() >= -place and weight.shape[place] != 1


_NO_RULE = None, None
_DELIVERED = Materialized()  # what comes back is the gradients
_grad = opened(torch.autograd.grad) or torch.autograd.grad
