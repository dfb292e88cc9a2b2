"""Recurrent layers over packed sequences, step by step as torch's CPU kernels do it.

At each step fewer samples are left, or more where time runs backwards. The numbers of samples are
the client's (``PackedSequence.batch_sizes`` is a CPU tensor on every device).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from lazygt.record.decompositions import gru_step, lstm_step, stack

#: Of a layer: one tensor, or two for an LSTM.
State = tuple[torch.Tensor, ...]
#: From a step's gates, the state before, and the weights besides those of the input.
Cell = Callable[[torch.Tensor, State, list[Any]], State]


def register_packed() -> torch.library.Library:
    """Register the layers."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in _LAYERS.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, "PrivateUse1")
    return library


def _join(states: list[State]) -> State:
    return tuple(torch.cat(parts, 0) for parts in zip(*states, strict=True))


def _cut(state: State, start: int, end: int) -> State:
    return tuple(part[start:end] for part in state)


def _forwards(
    gates: list[torch.Tensor], first: State, cell: Callable[[torch.Tensor, State], State]
) -> tuple[list[torch.Tensor], State]:
    """Samples that end are put aside with their last state."""
    outs, ended, state = [], [], first
    for gate in gates:
        left, before = gate.shape[0], state[0].shape[0]
        if left < before:
            ended.append(_cut(state, left, before))
            state = _cut(state, 0, left)
        state = cell(gate, state)
        outs.append(state[0])
    return outs, _join([state, *reversed(ended)])


def _backwards(
    gates: list[torch.Tensor], first: State, cell: Callable[[torch.Tensor, State], State]
) -> tuple[list[torch.Tensor], State]:
    """Samples that begin come with their first state."""
    outs: list[torch.Tensor] = []
    state = _cut(first, 0, gates[-1].shape[0])
    for gate in reversed(gates):
        now, before = gate.shape[0], state[0].shape[0]
        if now > before:
            state = _join([state, _cut(first, before, now)])
        state = cell(gate, state)
        outs.append(state[0])
    return outs[::-1], state


def _layers(
    cell: Cell,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    first: State,
    params: list[torch.Tensor],
    per_layer: int,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, State]:
    """The layers' output and last states; ``first`` has the states of all layers."""
    sizes = batch_sizes.tolist()
    weights = [params[i : i + per_layer] for i in range(0, len(params), per_layer)]

    def layer(steps: torch.Tensor, index: int, reverse: bool) -> Any:
        w_ih, w_hh, *others = weights[index]
        biases, rest = (others[:2], others[2:]) if has_biases else ((None, None), others)
        b_ih, b_hh = biases
        whole = torch.nn.functional.linear(steps, w_ih, b_ih)
        gates = [
            whole.narrow(0, end - n, n) for n, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        own = tuple(part[index] for part in first)
        run = _backwards if reverse else _forwards
        outs, state = run(gates, own, lambda gate, state: cell(gate, state, [w_hh, b_hh, *rest]))
        return torch.cat(outs, 0), state

    directions = 2 if bidirectional else 1
    out, states = stack(data, layer, num_layers, directions, dropout, train, False)
    return out, tuple(torch.stack(parts, 0) for parts in zip(*states, strict=True))


def _lstm_cell(gate: torch.Tensor, state: State, weights: list[Any]) -> State:
    w_hh, b_hh, *projection = weights
    return lstm_step(gate, state[0], state[1], w_hh, b_hh, projection[0] if projection else None)


def _gru_cell(gate: torch.Tensor, state: State, weights: list[Any]) -> State:
    return (gru_step(gate, state[0], weights[0], weights[1]),)


def _lstm(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_layer = 2 + 2 * has_biases + (hx[0].shape[2] != hx[1].shape[2])
    out, (h, c) = _layers(
        _lstm_cell, data, batch_sizes, (hx[0], hx[1]), params, per_layer, has_biases, *rest
    )
    return out, h, c


def _one_state(cell: Cell) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def layers(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: torch.Tensor,
        params: list[torch.Tensor],
        has_biases: bool,
        *rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        per_layer = 2 + 2 * has_biases
        out, (h,) = _layers(cell, data, batch_sizes, (hx,), params, per_layer, has_biases, *rest)
        return out, h

    return layers


def _elman(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Cell:
    def cell(gate: torch.Tensor, state: State, weights: list[Any]) -> State:
        total = torch.nn.functional.linear(state[0], weights[0], weights[1])
        return (nonlinearity(total.add_(gate)),)

    return cell


_LAYERS: dict[str, Callable[..., Any]] = {
    "lstm.data": _lstm,
    "gru.data": _one_state(_gru_cell),
    "rnn_tanh.data": _one_state(_elman(torch.tanh)),
    "rnn_relu.data": _one_state(_elman(torch.relu)),
}
