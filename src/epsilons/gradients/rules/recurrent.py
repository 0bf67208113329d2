"""Recurrent layers written out step by step, in operations that have rules.

The input projection of a layer is one linear map over the whole sequence; the recurrent one is
used once per step, and its uses are concatenated along the sequence before a norm is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from epsilons.gradients.rules.registry import UnsupportedLayer

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Tensor], Any], State]  # projected input, state → state


def _lstm_step(projected: Tensor, state: State, weights: Sequence[Tensor], bias: Any) -> State:
    h, c = state
    i, f, u, o = (projected + F.linear(h, weights[0], bias)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(u)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (F.linear(h, weights[1]) if len(weights) > 1 else h), c


def _gru_step(projected: Tensor, state: State, weights: Sequence[Tensor], bias: Any) -> State:
    (h,) = state
    reset, update, new = projected.chunk(3, -1)
    h_reset, h_update, h_new = F.linear(h, weights[0], bias).chunk(3, -1)
    update = torch.sigmoid(update + h_update)
    new = torch.tanh(new + torch.sigmoid(reset + h_reset) * h_new)
    return (new + update * (h - new),)


def _rnn_step(activation: Callable[[Tensor], Tensor]) -> Step:
    def step(projected: Tensor, state: State, weights: Sequence[Tensor], bias: Any) -> State:
        return (activation(projected + F.linear(state[0], weights[0], bias)),)

    return step


def layer(step: Step, states: int) -> Callable[..., Any]:
    """A composite for `torch.lstm` and its relatives: their signature after the tracer."""

    def run(tracer: Any, *args: Any) -> Any:
        if isinstance(args[3 - states], Tensor):  # the batch sizes, or the state after them
            raise UnsupportedLayer(
                "a recurrent layer reads a PackedSequence, whose rows are not arranged by example. "
                "Pass the padded batch and mask the loss."
            )
        input, hx, weights, has_biases, layers, dropout, train, bidirectional, batch_first = args
        state = tuple(hx) if states > 1 else (hx,)
        for part in state:
            if part not in tracer.weights:
                tracer.data.mark_state(part, 1, input)
        with tracer:
            x = input.transpose(0, 1) if batch_first else input
            directions = 2 if bidirectional else 1
            each = len(weights) // (layers * directions)
            ends: list[State] = []
            for number in range(layers):
                outputs: list[Tensor] = []
                for direction in range(directions):
                    position = number * directions + direction
                    own = weights[position * each : (position + 1) * each]
                    start = tuple(part[position] for part in state)
                    out, end = _sequence(step, x, start, own, has_biases, direction == 1)
                    outputs.append(out)
                    ends.append(end)
                x = torch.cat(outputs, 2) if bidirectional else outputs[0]
                if dropout and train and number < layers - 1:
                    x = F.dropout(x, dropout)
            last = [torch.stack(parts) for parts in zip(*ends, strict=True)]
            return (x.transpose(0, 1) if batch_first else x, *last)

    return run


def cell(step: Step, states: int) -> Callable[..., Any]:
    """A composite for `torch.lstm_cell` and its relatives."""

    def run(
        tracer: Any,
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Any = None,
        b_hh: Any = None,
    ) -> Any:
        with tracer:
            state = tuple(hx) if states > 1 else (hx,)
            end = step(F.linear(input, w_ih, b_ih), state, [w_hh], b_hh)
        return end if states > 1 else end[0]

    return run


def _sequence(
    step: Step,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    backwards: bool,
) -> tuple[Tensor, State]:
    w_ih, w_hh, *rest = weights
    b_ih, b_hh = rest[:2] if has_biases else (None, None)
    inner = [w_hh, *(rest[2:] if has_biases else rest)]
    steps = F.linear(x, w_ih, b_ih).unbind(0)
    outputs: list[Tensor] = []
    for projected in reversed(steps) if backwards else steps:
        state = step(projected, state, inner, b_hh)
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: layer(_lstm_step, 2),
    torch.gru: layer(_gru_step, 1),
    torch.rnn_tanh: layer(_rnn_step(torch.tanh), 1),
    torch.rnn_relu: layer(_rnn_step(torch.relu), 1),
    torch.lstm_cell: cell(_lstm_step, 2),
    torch.gru_cell: cell(_gru_step, 1),
    torch.rnn_tanh_cell: cell(_rnn_step(torch.tanh), 1),
    torch.rnn_relu_cell: cell(_rnn_step(torch.relu), 1),
}
