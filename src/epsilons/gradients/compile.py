"""Passes of one shape, traced once into one graph and compiled by torch; eager is the definition.

Forward and backward pass, norms, clip factors and clipped sums become one graph of torch's
operations, out of the same rules. A graph can't branch on data: an example that the eager pass
would treat apart (cancellation, nothing finite) comes out with a norm that isn't finite, and is
done again by the eager pass, by itself. Everybody else's bits stay as they are.

Of torch this needs two names that are not public, `FakeTensor` and an option of `make_fx`; tried
with torch 2.13.
"""

from __future__ import annotations

import functools
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from epsilons.gradients.isolation import undisturbed
from epsilons.gradients.python_state import PLAIN, python_state
from epsilons.gradients.trees import swapped, tensors_in

Compile = Literal["auto"] | bool
LossFn = Callable[[nn.Module, Any], Tensor]

# Gradients by example want the channels where they are.
_OPTIONS: dict[str, Any] = {"layout_optimization": False}
_MOST = 16  # graphs of one model and loss; what needs more has another shape every time
_PASSES, _SECONDS = 100, 300.0  # the least, and what eager passes must take, to be compiled
_FLOPS, _CALLS = 2e10, 2e-4  # a second on two cores; seconds that the calls of a parameter take
_AGREE = 1e-5  # relative: half of the examples' norms must come out as near to the eager ones


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor stands for the numbers of a graph that is being made, and has none."""
    return isinstance(tensor, FakeTensor)


def check_compile(compile: Any) -> None:
    """A `ValueError` unless it says whether to compile."""
    if compile != "auto" and not isinstance(compile, bool):
        raise ValueError(f"compile={compile!r}; expected 'auto', True or False")


class Clipped(NamedTuple):
    """A batch's clipped sum by parameter name; norms and losses (B,) of its examples."""

    sums: dict[str, Tensor]
    norms: Tensor
    losses: Tensor


class Inputs(NamedTuple):
    """What a pass takes; without `limits`, the clip bounds (B,), it gives no sums."""

    sums: str  # their dtype
    parameters: dict[str, Tensor]
    model: nn.Module
    loss_fn: LossFn
    batch: Any
    limits: Tensor | None

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


Pass = Callable[..., Clipped]  # of all inputs


class StaysEager(Exception):
    """Why a pass can't be compiled, for a reader."""


class Graph:
    """A pass over batches of one shape as a function of parameters, other tensors and batch."""

    def __init__(self, work: Pass, inputs: Inputs) -> None:
        self.names = list(inputs.parameters)
        self._replayed = inputs.device.type == "cuda"  # as a CUDA graph; not tried on a GPU
        traced = _traced(work, inputs)
        if any(map(_is_coarse, (t for node in traced.graph.nodes for t in _values(node)))):
            raise StaysEager("the compiler rounds less often in bfloat16 and float16")
        self._call: Callable[..., Any] = torch.compile(
            traced,
            dynamic=False,
            fullgraph=True,
            options=_OPTIONS | {"triton.cudagraphs": self._replayed},
        )

    def __call__(self, inputs: Inputs) -> Clipped:
        device = inputs.device.type
        if self._replayed:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
            sums, norms, losses = self._call(*_tensors(inputs))
            if self._replayed:  # the next call writes to the same memory
                sums, norms, losses = [t.clone() for t in sums], norms.clone(), losses.clone()
        return Clipped(dict(zip(self.names, sums, strict=False)), norms, losses)


def compiled_pass(work: Pass, *given: Any) -> Clipped:
    """The pass `work` of the given `Inputs` by its graph; eager if it has none.

    Examples that must be treated apart are done by `work`, and the others without them.
    """
    inputs = Inputs(*given)
    graph = _graph(work, inputs)
    if graph is None:
        return work(*inputs)
    found = graph(inputs)
    apart = ~found.norms.isfinite()
    if not bool(apart.any()):
        return found
    limits = inputs.limits
    if limits is None:
        eager = work(*inputs)
    else:
        eager = work(*inputs._replace(limits=limits.where(apart, 0.0)))
        if not bool(apart.all()):  # copies of another in their places: 0 · ∞ is no 0
            rows = torch.arange(len(apart), device=apart.device)
            rows = rows.where(~apart, rows[~apart][0])
            rest = swapped(
                inputs.batch, {id(t): t[rows] for t in tensors_in(inputs.batch) if t.dim() > 0}
            )
            found = graph(inputs._replace(batch=rest, limits=limits.where(~apart, 0.0)))
            sums = {name: total + eager.sums[name] for name, total in found.sums.items()}
            eager = eager._replace(sums=sums)
    norms = eager.norms.where(apart, found.norms)
    return Clipped(eager.sums, norms, eager.losses.where(apart, found.losses))


def is_compiled(work: Pass, *given: Any) -> bool:
    """Whether such a pass has a graph, which is made now if it is new."""
    return _graph(work, Inputs(*given)) is not None


def is_current(work: Pass, *given: Any) -> bool:
    """Whether the graph of such a pass, if there is one, still does what the eager pass does."""
    inputs = Inputs(*given)
    graph = _graph(work, inputs)
    if graph is None:
        return True
    with undisturbed(inputs.model, inputs.device, seed=0):
        return not _differ(graph(inputs), work(*inputs))


def repays(
    compile: Compile, model: nn.Module, loss_fn: LossFn, batch: Any, size: int, passes: int
) -> bool:
    """Whether to compile, given what the caller asked for and how many passes there will be.

    With "auto", if eager passes of `size` examples would take five minutes: by the operations and
    parameters of a forward pass, so that the same run decides the same way on any machine with a
    compiler. Then a line on stderr says so. `batch`: some examples, `size` of which are looked at.
    """
    if compile != "auto":
        return compile
    device = next(model.parameters()).device
    if passes < _PASSES or (device.type == "cpu" and shutil.which("g++") is None):
        return False
    some = swapped(batch, {id(t): t[:size] for t in tensors_in(batch) if t.dim() > 0})
    count = max(len(t) for t in tensors_in(some) if t.dim() > 0)
    with undisturbed(model, device, seed=0), torch.no_grad(), FlopCounterMode(display=False) as its:
        loss_fn(model, some)
    parameters = sum(p.requires_grad for p in model.parameters())
    each = 3 * its.get_total_flops() / count * size / _FLOPS + _CALLS * parameters
    if passes * each < _SECONDS:
        return False
    say_once(f"compiling the passes of {type(model).__name__}; the first takes a minute or more")
    return True


_NEW: Any = object()
Graphs = dict[Any, Graph | None]  # by `_facts`; None: eager
_known: WeakKeyDictionary[nn.Module, WeakKeyDictionary[Any, Graphs]] = WeakKeyDictionary()


def _graph(work: Pass, inputs: Inputs) -> Graph | None:
    """The graph of such a pass, made now if it is new; None if such passes stay eager."""
    owner = getattr(inputs.loss_fn, "__self__", inputs.loss_fn)  # a bound method is always new
    try:
        try:
            known = _known.setdefault(inputs.model, WeakKeyDictionary()).setdefault(owner, {})
            key = _facts(inputs)
            graph: Graph | None = known.get(key, _NEW)
        except TypeError as error:  # a dataclass that can be changed, say
            raise StaysEager(f"whether they have changed can't be told ({error})") from error
        if graph is _NEW:
            if len(known) >= _MOST:
                raise StaysEager(f"{_MOST} shapes or states had a graph, and this is one more")
            try:
                graph = known[key] = _checked(work, inputs)
            except StaysEager:
                known[key] = None
                raise
        return graph
    except StaysEager as reason:
        say_once(f"passes of {type(inputs.model).__name__} stay eager: {reason}")
        return None


def _traced(work: Pass, inputs: Inputs) -> GraphModule:
    """The pass as a graph of torch's operations, from shapes alone."""
    trained, batch = inputs.parameters, inputs.batch
    others = [name for name, _ in _others(inputs)]

    def run(own: list[Tensor], rest: list[Tensor], rows: list[Tensor], limits: Any) -> Any:
        leaves = {n: t.detach().requires_grad_() for n, t in zip(trained, own, strict=True)}
        held = leaves | dict(zip(others, rest, strict=True))
        its = swapped(batch, {id(t): r for t, r in zip(tensors_in(batch), rows, strict=True)})

        def passed(model: nn.Module) -> Any:
            found = work(inputs.sums, leaves, model, inputs.loss_fn, its, limits)
            return list(found.sums.values()), found.norms, found.losses

        return functional_call(
            _Holding(inputs.model), {f"held.{name}": t for name, t in held.items()}, passed
        )

    return make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(*_tensors(inputs))


def _values(node: Node) -> list[Tensor]:
    return tensors_in(node.meta.get("val"))


def _is_coarse(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() < 4


class _Holding(nn.Module):
    """A module that passes its only child to a function."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, function: Callable[[nn.Module], Any]) -> Any:
        return function(self.held)


def _checked(work: Pass, inputs: Inputs) -> Graph:
    """A graph whose norms are those of the eager pass; that one must change nothing else."""
    with torch.inference_mode(False):  # a batch of its own, which the model may change
        own = {id(t): t.clone() for t in tensors_in(inputs.batch)}
        inputs = inputs._replace(batch=swapped(inputs.batch, own))
    with undisturbed(inputs.model, inputs.device, seed=0):
        before, facts = _disturbed(inputs), _facts(inputs)
        eager = work(*inputs)
        if _disturbed(inputs) != before:
            raise StaysEager("they draw random numbers, or change buffers or their batch")
        if _facts(inputs) != facts:  # seen here, before anything of a graph is left on the model
            raise StaysEager("the model's own attributes change from pass to pass")
        if _differ(work(*inputs), eager):
            raise StaysEager("they come out differently a second time")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler, about itself
                graph = Graph(work, inputs)
                found = graph(inputs)
        except (StaysEager, torch.OutOfMemoryError):
            raise
        except Exception as error:  # of the model, the tracing or the compiler, in any way
            said = " ".join((str(error) or type(error).__name__).split())
            raise StaysEager(f"they can't be compiled ({said[:200]})") from error
    if _differ(found, eager):
        raise StaysEager("their compiled norms differ from the eager ones")
    return graph


def _differ(found: Clipped, eager: Clipped) -> bool:
    """Whether most norms do: where a ReLU is at its kink, those of single examples may.

    A norm that isn't finite is no wrong one, since its example is done again.
    """
    right = (found.norms - eager.norms).abs() <= _AGREE * eager.norms
    wrong = found.norms.isfinite() & ~(right & eager.norms.isfinite())
    return bool(wrong.double().mean() > 0.5)


def _disturbed(inputs: Inputs) -> Any:
    """What a pass must leave as it was to be compiled: generators, buffers, batch."""
    tensors = [*inputs.model.buffers(), *tensors_in(inputs.batch)]
    states = [torch.get_rng_state()]
    if inputs.device.type != "cpu":
        states.append(torch.get_device_module(inputs.device).get_rng_state(inputs.device))
    return (
        [(id(t), t._version) for t in tensors if not t.is_inference()],
        [state.numpy().tobytes() for state in states],
        random.getstate(),
        np.random.get_state()[1].tobytes(),  # type: ignore[index] # noqa: NPY002
    )


def _others(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """The model's tensors that aren't trained, by name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in inputs.model.named_modules():
        for name, tensor in chain(module._parameters.items(), module._buffers.items()):
            if tensor is not None:
                found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor.detach()))
    return [(name, t) for name, t in found.values() if name not in inputs.parameters]


def _tensors(inputs: Inputs) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor | None]:
    """All that is numbers: trained parameters, other tensors of the model, batch, limits."""
    return (
        [p.detach() for p in inputs.parameters.values()],
        [t for _, t in _others(inputs)],
        [t.detach().resolve_neg().contiguous() for t in tensors_in(inputs.batch)],
        None if inputs.limits is None else inputs.limits.contiguous(),
    )


def _facts(inputs: Inputs) -> Any:
    """All that a graph takes for constant: shapes, settings, attributes of model and loss."""
    ids, device = [id(t) for t in tensors_in(inputs.batch)], inputs.device.type
    return (
        inputs.sums,
        inputs.limits is None,
        tuple(inputs.parameters),
        _skeleton(inputs.batch),
        tuple(ids.index(i) for i in ids),  # of tensors that are in it twice
        python_state(inputs.model, inputs.loss_fn),
        torch.get_num_threads(),
        torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def _skeleton(tree: Any) -> Any:
    """A batch but for the numbers in its tensors."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.device
    if isinstance(tree, dict):
        return tuple((key, _skeleton(branch)) for key, branch in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree), tuple(map(_skeleton, tree))
    if type(tree) in PLAIN:
        return tree
    raise StaysEager(f"a batch holds a {type(tree).__name__}")


@functools.cache
def say_once(sentence: str) -> None:
    """One line on stderr, the first time."""
    print(sentence, file=sys.stderr)
