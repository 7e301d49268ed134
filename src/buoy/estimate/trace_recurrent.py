"""LSTM, GRU and RNN as cuDNN runs them: one kernel, a reserve kept for backward, gradients in one flat buffer."""

from __future__ import annotations

from typing import Any

import torch

# Values cuDNN keeps per unit and time step for backward: the gates, the cell, and the output of the layer. Its size is
# not documented; these are the values the backward pass needs. See `RESERVE_DOUBT`.
RESERVE = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
RESERVE_DOUBT = 0.5
"""The reserve may be this share larger."""


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, shape: tuple[int, ...], input: Any, *tensors: Any) -> Any:
        """Allocate what cuDNN's forward allocates."""
        layers, directions, _, batch, hidden, projected = shape
        ctx.save_for_backward(input, *tensors)
        out = input.new_empty((*input.shape[:-1], projected * directions))
        last = input.new_empty((layers * directions, batch, projected))
        cell = input.new_empty((layers * directions, batch, hidden))
        ctx.reserve = input.new_empty(reserve_values(kind, shape))
        return (out, last, cell) if kind == "lstm" else (out, last)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Allocate what cuDNN's backward allocates: the input's gradient and one buffer for all weights."""
        input, *tensors = ctx.saved_tensors
        flat = input.new_empty(sum(tensor.numel() for tensor in tensors))
        found, offset = [], 0
        for tensor in tensors:
            found.append(flat[offset : offset + tensor.numel()].view(tensor.shape))
            offset += tensor.numel()
        ctx.reserve = None
        return (None, None, torch.empty_like(input), *found)


def recurrent(kind: str, args: tuple[Any, ...]) -> tuple[Any, int]:
    """Stands in for `torch.lstm`, `torch.gru` and `torch.rnn_*` on fake CUDA tensors, packed input or not.

    Returns what they return, and the bytes of the reserve.
    """
    packed = isinstance(args[1], torch.Tensor) and not isinstance(args[3], bool)
    if packed:
        # Packed data has no padding: every row is one time step of one sequence.
        data, _, hidden_state, weights, _, layers, _, _, bidirectional = args[:9]
        time, batch = int(data.shape[0]), 1
    else:
        data, hidden_state, weights, _, layers, _, _, bidirectional, batch_first = args[:9]
        first, second = (
            (int(data.shape[0]), int(data.shape[1])) if data.dim() == 3 else (int(data.shape[0]), 1)
        )
        time, batch = (second, first) if batch_first else (first, second)
    state = hidden_state[0] if isinstance(hidden_state, (tuple, list)) else hidden_state
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        data, weights = data.to(dtype), [weight.to(dtype) for weight in weights]
    directions = 2 if bidirectional else 1
    hidden = int(weights[0].shape[0]) // GATES[kind]
    shape = (int(layers), directions, time, batch, hidden, int(state.shape[-1]))
    out = _Recurrent.apply(kind, shape, data, *weights)  # type: ignore[no-untyped-call]
    return out, reserve_values(kind, shape) * data.element_size()


def reserve_values(kind: str, shape: tuple[int, ...]) -> int:
    """How many values cuDNN keeps for the backward pass."""
    layers, directions, time, batch, hidden, _ = shape
    return RESERVE[kind] * layers * directions * time * batch * hidden
