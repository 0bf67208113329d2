"""What a training is given, checked before anything is written: the value, what is expected."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from epsilons.accounting.plan import Plan
from epsilons.examples import Examples
from epsilons.gradients.norms import trainable
from epsilons.training.checkpoint import Stateful
from epsilons.training.step import check_optimizer


def check_kinds(
    model: Any, optimizer: Any, train: Any, plan: Any, examples: Any, collate_fn: Any
) -> None:
    """Whether each is of the kind that is expected, and the model has its parameters."""
    _expect(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
    optimizers = "an optimizer of torch.optim, made of model.parameters()"
    _expect(isinstance(optimizer, torch.optim.Optimizer), "optimizer", optimizer, optimizers)
    check_data_set("train", train)
    _expect(isinstance(plan, Plan), "plan", plan, "a Plan; Plan.from_dict makes one of a dict")
    named = examples is None or isinstance(examples, Examples)
    _expect(named, "examples", examples, "Examples(ids=[…]), or leave it out")
    collates = "a function of a list of examples, or leave it out"
    _expect(callable(collate_fn), "collate_fn", collate_fn, collates)
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"the model has lazy parameters without a shape yet ({', '.join(lazy)}); call it once "
            "with a batch, then make the optimizer"
        )
    if next(model.parameters(), None) is None:
        raise ValueError(f"the model, a {type(model).__name__}, has no parameters to train")


def check_data_set(name: str, data: Any) -> None:
    """Whether examples can be fetched by their index."""
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    way_out = ". Give the loader's data set, loader.dataset" if isinstance(data, DataLoader) else ""
    _expect(
        indexed and not isinstance(data, IterableDataset | type),
        name,
        data,
        f"a map-style data set, with __len__ and __getitem__{way_out}",
    )


def check_all_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whether the optimizer takes all that is clipped, by one gradient a step."""
    parameters = trainable(model)
    check_optimizer(model, optimizer, parameters)
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left_out = [name for name, p in parameters.items() if id(p) not in in_optimizer]
    if left_out:
        raise ValueError(
            f"the optimizer leaves out {', '.join(left_out)}: clipping would count their gradients "
            "for nothing. Set requires_grad=False on them, or give them to the optimizer."
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times a step, each of which "
            "would have to be private; expected an optimizer that takes one gradient, like SGD"
        )


def check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a measured value at every step; give it in state=[…], and "
            "call its step(value) in the body of the loop, with a value that is public or private "
            "itself"
        )
    known = isinstance(scheduler, LRScheduler)
    _expect(known, "scheduler", scheduler, "a scheduler of torch.optim.lr_scheduler")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            "the scheduler is of another optimizer, and would change nothing here; make it of the "
            "one that is given"
        )


def check_state(state: Any) -> None:
    _expect(isinstance(state, Sequence), "state", state, "a list of objects: state=[average]")
    for each in state:
        if isinstance(each, type) or not isinstance(each, Stateful):
            raise ValueError(
                f"state has {_kind(each)}; expected objects with state_dict and load_state_dict"
            )


def check_max_epsilon(max_epsilon: Any, plan: Plan) -> None:
    """Whether the limit, if there is one, allows a step at all."""
    if max_epsilon is None:
        return
    number = isinstance(max_epsilon, int | float | np.integer | np.floating)
    if isinstance(max_epsilon, bool) or not number or not max_epsilon > 0:
        raise ValueError(f"max_epsilon={max_epsilon!r}; expected a number > 0, or leave it out")
    one = plan.worst_case(steps=1)
    if one > max_epsilon:
        raise ValueError(
            f"max_epsilon={max_epsilon} allows no step: the first alone has ε = {one:.6g}; "
            "expected more, or a plan with more noise"
        )


def _expect(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        raise TypeError(f"{name} is {_kind(value)}; expected {expected}")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
