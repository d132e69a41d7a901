"""LSTM and GRU unrolled in time, so that per-example gradients of their gates can be taken.

Every time step computes its gates from the input and from the state before; `gate(out, a, weight, bias)` is called on each
such product (out = a weight^T + bias) and returns what to go on with.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Gate = Callable[[Tensor, Tensor, nn.Parameter, "nn.Parameter | None"], Tensor]


def gates_of(layer: nn.LSTM | nn.GRU, x: Tensor, gate: Gate) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """What the layer itself gives for x [n, time, inputs], started at zero: outputs, and the last state(s)."""
    states: list[Tensor] = []
    cells: list[Tensor] = []
    for depth in range(layer.num_layers):
        outs = []
        for direction in range(2 if layer.bidirectional else 1):
            end = f"l{depth}{'_reverse' if direction else ''}"
            out, state, cell = _one(layer, x.flip(1) if direction else x, end, gate)
            outs.append(out.flip(1) if direction else out)
            states.append(state)
            cells.append(cell)
        x = torch.cat(outs, 2) if len(outs) > 1 else outs[0]
    if isinstance(layer, nn.LSTM):
        return x, (torch.stack(states), torch.stack(cells))
    return x, torch.stack(states)


def _one(layer: nn.LSTM | nn.GRU, x: Tensor, end: str, gate: Gate) -> tuple[Tensor, Tensor, Tensor]:
    from_input, from_state = getattr(layer, f"weight_ih_{end}"), getattr(layer, f"weight_hh_{end}")
    input_bias = getattr(layer, f"bias_ih_{end}") if layer.bias else None
    state_bias = getattr(layer, f"bias_hh_{end}") if layer.bias else None
    driven = gate(F.linear(x, from_input, input_bias), x, from_input, input_bias)
    state = cell = x.new_zeros(len(x), layer.hidden_size)
    outs = []
    for time in range(x.shape[1]):
        own = gate(F.linear(state, from_state, state_bias), state, from_state, state_bias)
        if isinstance(layer, nn.LSTM):
            enter, forget, new, leave = (driven[:, time] + own).chunk(4, 1)
            cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
        else:
            (r_in, z_in, n_in), (r_own, z_own, n_own) = driven[:, time].chunk(3, 1), own.chunk(3, 1)
            update = torch.sigmoid(z_in + z_own)
            new = torch.tanh(n_in + torch.sigmoid(r_in + r_own) * n_own)
            state = (1 - update) * new + update * state
        outs.append(state)
    return torch.stack(outs, 1), state, cell
