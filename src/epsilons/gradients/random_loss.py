"""Whether a loss is random, and dropout that drops nothing, so that examples can be compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from epsilons.gradients.norms import LossFn, example_count
from epsilons.gradients.operations import names
from epsilons.gradients.rules import LOW_PRECISION, UnsupportedLayer

SEED = 20


def is_random(model: nn.Module, loss_fn: LossFn, batch: Any, restore: Callable[[], None]) -> bool:
    """Whether two draws give the batch other losses."""
    results = []
    with torch.enable_grad():
        for seed in (SEED, SEED + 1):
            torch.manual_seed(seed)
            results.append(batch_losses(model, loss_fn, batch).detach())
            restore()
    return not torch.equal(results[0], results[1])


def batch_losses(model: nn.Module, loss_fn: LossFn, batch: Any) -> Tensor:
    """The losses of some examples; batches of every size occur in training."""
    try:
        return loss_fn(model, batch)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        count = example_count(batch)
        size = "one example" if count == 1 else f"{count} examples"
        raise UnsupportedLayer(
            f"the model or its loss fails on a batch of {size}: {error}"
        ) from error


class NoDropout(TorchFunctionMode):
    """Dropout that drops nothing, so that a batch and its examples see the same network.

    `rows`: only where a tensor has one of these lengths along a dimension, that of the examples; a
    mask that is common to a batch stays. `tolerance` is how far apart they may come out, by the
    coarsest numbers seen.
    """

    def __init__(self, device: str, rows: Collection[int] | None = None) -> None:
        super().__init__()
        self.device, self.rows = device, rows
        self.tolerance = 1e-3

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPPING and args and self._by_row(args[0]):
            return args[0].clone()
        if name in _DROPOUT_AT:
            place = _DROPOUT_AT[name]
            if name in _RECURRENT and not isinstance(args[3], bool):
                place += 1  # a packed sequence brings its sizes
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif "dropout_p" in named:
                named["dropout_p"] = 0.0
        out = func(*args, **named)
        halved = isinstance(out, Tensor) and out.dtype in LOW_PRECISION
        if halved or torch.is_autocast_enabled(self.device):
            self.tolerance = 0.1
        return out

    def _by_row(self, tensor: Tensor) -> bool:
        if self.rows is None:
            return True
        return not isinstance(tensor, nn.Parameter) and not set(tensor.shape).isdisjoint(self.rows)


_DROPPING = names(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout "
    "dropout_ alpha_dropout_ feature_dropout_"
)
_RECURRENT = names("lstm gru rnn_tanh rnn_relu")
_DROPOUT_AT = {  # its place among the arguments
    "scaled_dot_product_attention": 4,
    "multi_head_attention_forward": 10,
    **dict.fromkeys(_RECURRENT, 5),
}
