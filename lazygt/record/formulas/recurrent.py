"""Recurrent layers: step by step or fused, as torch's CPU kernels, or by cuDNN on GPUs.

Packed sequences have fewer samples at each later step, or more in the reverse direction. The client
has the numbers of samples (``PackedSequence.batch_sizes`` is a CPU tensor on every device).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from lazygt.record.context import workers_device
from lazygt.record.formulas.autocast import as_cudnn
from lazygt.record.formulas.cudnn_recurrent import GRU, LSTM, RELU, TANH, cudnn_or, cudnn_or_packed

aten: Any = torch.ops.aten
#: State of a layer: one tensor, or two for an LSTM.
State = tuple[torch.Tensor, ...]
#: One step of a layer: (gates, state, weights) -> next state. ``gates`` has the input's share of
#: the gates; ``weights`` are w_hh and b_hh, and w_hr of an LSTM with a projection.
Cell = Callable[[torch.Tensor, State, list[Any]], State]
#: The same for a state of one tensor: (gates, h, w_hh, b_hh) -> next h.
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def register_recurrent() -> torch.library.Library:
    """Register the layers."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in RECURRENT.items():
        library.impl(name, kernel, "AutogradPrivateUse1")
        library.impl(name, kernel, "PrivateUse1")
    return library


# -- cells and dense sequences ---------------------------------------------------------------------


def _lstm_cell_op(
    x: torch.Tensor,
    hx: list[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Record ``aten::lstm_cell``."""
    gates = torch.nn.functional.linear(x, w_ih, b_ih)
    return _lstm_step(gates, hx[0], hx[1], w_hh, b_hh, None)


def _lstm_step(
    gates: torch.Tensor,
    h: torch.Tensor,
    c: torch.Tensor,
    w_hh: torch.Tensor,
    b_hh: torch.Tensor | None,
    w_hr: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (h, c) after one LSTM step; ``gates`` has the input's share of the gates."""
    total = torch.nn.functional.linear(h, w_hh, b_hh).add_(gates)
    i, f, g, o = aten.unsafe_chunk.default(total, 4, 1)
    c = f.sigmoid_().mul(c).add_(i.sigmoid_().mul(g.tanh_()))
    h = o.sigmoid_().mul(c.tanh())
    if w_hr is not None:
        h = torch.nn.functional.linear(h, w_hr)
    return h, c


def _gru_cell_op(
    x: torch.Tensor,
    h: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """Record ``aten::gru_cell``."""
    return _gru_step(torch.nn.functional.linear(x, w_ih, b_ih), h, w_hh, b_hh)


def _gru_step(
    gates: torch.Tensor, h: torch.Tensor, w_hh: torch.Tensor, b_hh: torch.Tensor | None
) -> torch.Tensor:
    """Return h after one GRU step; ``gates`` has the input's share of the gates."""
    chunked_x = aten.unsafe_chunk.default(gates, 3, 1)
    chunked_h = aten.unsafe_chunk.default(torch.nn.functional.linear(h, w_hh, b_hh), 3, 1)
    reset = chunked_h[0].add_(chunked_x[0]).sigmoid_()
    update = chunked_h[1].add_(chunked_x[1]).sigmoid_()
    new = chunked_x[2].add(chunked_h[2].mul_(reset)).tanh_()
    return (h - new).mul_(update).add_(new)


def _lstm_input(
    x: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``aten::lstm.input`` as a CPU does: float32 by oneDNN, else step by step."""
    projected = hx[0].shape[2] != hx[1].shape[2]
    fused = (
        workers_device() == "cpu"
        and torch.backends.mkldnn.is_available()
        and not projected
        and x.numel() != 0
        and x.dtype == torch.float32
        and torch._C._get_mkldnn_enabled()
    )
    directions = 2 if bidirectional else 1
    size = 2 + 2 * has_biases + projected
    weights = [params[i : i + size] for i in range(0, len(params), size)]

    def layer(steps: torch.Tensor, index: int, reverse: bool) -> Any:
        """Run one layer and direction; return output and state (h, c)."""
        h, c = hx[0].select(0, index), hx[1].select(0, index)
        layer_weights = weights[index]
        if fused:
            return _onednn_lstm(steps.contiguous(), layer_weights, h, c, reverse, has_biases,
                                num_layers, train, bidirectional)  # fmt: skip
        return _lstm_layer(steps, layer_weights, h, c, reverse, has_biases, projected)

    def finals(states: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([s[0] for s in states], 0), torch.stack([s[1] for s in states], 0)

    out, states = _stack(x, layer, num_layers, directions, dropout, train, batch_first)
    h, c = finals(states)
    return out, h, c


def _stack(
    x: torch.Tensor,
    layer: Callable[[torch.Tensor, int, bool], Any],
    num_layers: int,
    directions: int,
    dropout: float,
    train: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, list[Any]]:
    """Run stacked layers, in one or both directions; return output and final states.

    Args:
        layer: runs one layer and direction on (steps, its index, reverse); returns output and
            state.
    """
    steps = x.transpose(0, 1) if batch_first else x
    states: list[Any] = []
    for number in range(num_layers):
        outs = []
        for direction in range(directions):
            out, state = layer(steps, number * directions + direction, direction == 1)
            outs.append(out)
            states.append(state)
        steps = outs[0] if directions == 1 else torch.cat(outs, outs[0].dim() - 1)
        if dropout != 0 and train and number < num_layers - 1:
            steps = torch.dropout(steps, dropout, True)
    return (steps.transpose(0, 1) if batch_first else steps), states


def _onednn_lstm(
    steps: torch.Tensor,
    weights: list[torch.Tensor],
    h: torch.Tensor,
    c: torch.Tensor,
    reverse: bool,
    has_biases: bool,
    num_layers: int,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Run one LSTM layer and direction by oneDNN's fused kernel, which always takes biases."""
    if has_biases:
        b_ih, b_hh = weights[2:4]
    else:
        b_ih = b_hh = torch.zeros(weights[0].shape[0], dtype=h.dtype, device=h.device)
    hidden = h.shape[1]
    out, hy, cy, _ = aten.mkldnn_rnn_layer.default(
        steps, weights[0], weights[1], b_ih, b_hh, h, c, reverse, [], LSTM, hidden, num_layers,
        has_biases, bidirectional, False, train,
    )  # fmt: skip
    return out, (hy, cy)


def _lstm_layer(
    steps: torch.Tensor,
    weights: list[torch.Tensor],
    h: torch.Tensor,
    c: torch.Tensor,
    reverse: bool,
    has_biases: bool,
    projected: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Run one LSTM layer and direction step by step, with one matmul for all inputs."""
    b_ih, b_hh = weights[2:4] if has_biases else (None, None)
    w_hr = weights[-1] if projected else None
    gates = torch.nn.functional.linear(steps, weights[0], b_ih).unbind(0)
    outs = []
    for gate in reversed(gates) if reverse else gates:
        h, c = _lstm_step(gate, h, c, weights[1], b_hh, w_hr)
        outs.append(h)
    return torch.stack(outs[::-1] if reverse else outs, 0), (h, c)


def _simple_rnn(
    step: Step,
    x: torch.Tensor,
    hx: torch.Tensor,
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run layers with one state tensor step by step, with one matmul for all inputs."""
    size = 2 + 2 * has_biases
    weights = [params[i : i + size] for i in range(0, len(params), size)]
    first_states = hx.unbind(0)

    def layer(steps: torch.Tensor, index: int, reverse: bool) -> Any:
        """Run one layer and direction; return output and state."""
        layer_weights = weights[index]
        b_ih, b_hh = layer_weights[2:4] if has_biases else (None, None)
        h = first_states[index]
        gates = torch.nn.functional.linear(steps, layer_weights[0], b_ih).unbind(0)
        outs = []
        for gate in reversed(gates) if reverse else gates:
            h = step(gate, h, layer_weights[1], b_hh)
            outs.append(h)
        return torch.stack(outs[::-1] if reverse else outs, 0), h

    out, states = _stack(x, layer, num_layers, 2 if bidirectional else 1, dropout, train,
                         batch_first)  # fmt: skip
    return out, torch.stack(states, 0)


# -- packed sequences ----------------------------------------------------------------------


def _concatenated(states: list[State]) -> State:
    """Concatenate states along the batch."""
    return tuple(torch.cat(tensors, 0) for tensors in zip(*states, strict=True))


def _batch_slice(state: State, start: int, end: int) -> State:
    """Return the states of samples ``start`` to ``end``."""
    return tuple(tensor[start:end] for tensor in state)


def _forwards(
    gates: list[torch.Tensor], initial: State, cell: Callable[[torch.Tensor, State], State]
) -> tuple[list[torch.Tensor], State]:
    """Run the steps forwards; samples that end leave the batch with their last state.

    The batch is sorted by length, so the samples that end are its last ones.

    Args:
        gates: for each step, the input's share of the gates, of the samples it has.
        initial: the states of all samples before the first step.
        cell: computes a step's state from its gates and the previous state.

    Returns:
        The outputs of all steps, and the last state of every sample.
    """
    outs, ended, state = [], [], initial
    for gate in gates:
        remaining, active = gate.shape[0], state[0].shape[0]
        if remaining < active:
            ended.append(_batch_slice(state, remaining, active))
            state = _batch_slice(state, 0, remaining)
        state = cell(gate, state)
        outs.append(state[0])
    return outs, _concatenated([state, *reversed(ended)])


def _backwards(
    gates: list[torch.Tensor], initial: State, cell: Callable[[torch.Tensor, State], State]
) -> tuple[list[torch.Tensor], State]:
    """Run the steps backwards; samples that begin join the batch with their initial state.

    Arguments and results are those of `_forwards`.
    """
    outs: list[torch.Tensor] = []
    state = _batch_slice(initial, 0, gates[-1].shape[0])
    for gate in reversed(gates):
        active, previous = gate.shape[0], state[0].shape[0]
        if active > previous:
            state = _concatenated([state, _batch_slice(initial, previous, active)])
        state = cell(gate, state)
        outs.append(state[0])
    return outs[::-1], state


def _layers(
    cell: Cell,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    initial: State,
    params: list[torch.Tensor],
    per_layer: int,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[torch.Tensor, State]:
    """Run layers over packed sequences; return output and last states of all layers.

    Args:
        initial: the initial states of all layers and directions, stacked.
        per_layer: number of weights of a layer and direction.
    """
    sizes = batch_sizes.tolist()
    weights = [params[i : i + per_layer] for i in range(0, len(params), per_layer)]

    def layer(steps: torch.Tensor, index: int, reverse: bool) -> Any:
        """Run one layer and direction over the packed steps; return output and state."""
        w_ih, w_hh, *others = weights[index]
        biases, rest = (others[:2], others[2:]) if has_biases else ((None, None), others)
        b_ih, b_hh = biases
        all_gates = torch.nn.functional.linear(steps, w_ih, b_ih)
        gates = [
            all_gates.narrow(0, end - n, n) for n, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        state_before = tuple(tensor[index] for tensor in initial)
        run = _backwards if reverse else _forwards
        outs, state = run(
            gates, state_before, lambda gate, state: cell(gate, state, [w_hh, b_hh, *rest])
        )
        return torch.cat(outs, 0), state

    directions = 2 if bidirectional else 1
    out, states = _stack(data, layer, num_layers, directions, dropout, train, False)
    return out, tuple(torch.stack(tensors, 0) for tensors in zip(*states, strict=True))


def _lstm_cell(gate: torch.Tensor, state: State, weights: list[Any]) -> State:
    """Return the LSTM's state after one step of a packed sequence."""
    w_hh, b_hh, *projection = weights
    return _lstm_step(gate, state[0], state[1], w_hh, b_hh, projection[0] if projection else None)


def _lstm(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Record ``aten::lstm.data``."""
    per_layer = 2 + 2 * has_biases + (hx[0].shape[2] != hx[1].shape[2])
    out, (h, c) = _layers(
        _lstm_cell, data, batch_sizes, (hx[0], hx[1]), params, per_layer, has_biases, *rest
    )
    return out, h, c


def _one_state(step: Step) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the op on packed sequences of layers with one state tensor (GRU, tanh, ReLU)."""

    def cell(gate: torch.Tensor, state: State, weights: list[Any]) -> State:
        return (step(gate, state[0], weights[0], weights[1]),)

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


def _tanh_step(
    gates: torch.Tensor, h: torch.Tensor, w_hh: torch.Tensor, b_hh: torch.Tensor | None
) -> torch.Tensor:
    """Return h after one step of a tanh RNN."""
    return torch.tanh(torch.nn.functional.linear(h, w_hh, b_hh).add_(gates))


def _relu_step(
    gates: torch.Tensor, h: torch.Tensor, w_hh: torch.Tensor, b_hh: torch.Tensor | None
) -> torch.Tensor:
    """Return h after one step of a ReLU RNN."""
    return torch.relu(torch.nn.functional.linear(h, w_hh, b_hh).add_(gates))


RECURRENT: dict[str, Callable[..., Any]] = {
    "lstm_cell": _lstm_cell_op,
    "gru_cell": _gru_cell_op,
    "lstm.input": as_cudnn(cudnn_or(LSTM, _lstm_input)),
    "gru.input": as_cudnn(cudnn_or(GRU, partial(_simple_rnn, _gru_step))),
    "rnn_tanh.input": as_cudnn(cudnn_or(TANH, partial(_simple_rnn, _tanh_step))),
    "rnn_relu.input": as_cudnn(cudnn_or(RELU, partial(_simple_rnn, _relu_step))),
    "lstm.data": as_cudnn(cudnn_or_packed(LSTM, _lstm)),
    "gru.data": as_cudnn(cudnn_or_packed(GRU, _one_state(_gru_step))),
    "rnn_tanh.data": as_cudnn(cudnn_or_packed(TANH, _one_state(_tanh_step))),
    "rnn_relu.data": as_cudnn(cudnn_or_packed(RELU, _one_state(_relu_step))),
}
