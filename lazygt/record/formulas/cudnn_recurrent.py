"""Recurrent layers on GPUs: cuDNN's op for all layers at once, where eager CUDA uses it.

The op's reserve and packed weights are of sizes that cuDNN alone knows, and its backward writes
into the reserve. Workers pass it a copy (``runtime.executors.kernels``), so the op is pure here: a
second backward pass and a repeated run find the reserve as the forward left it.

cuDNN's dropout draws from a state that no seed resets. So layers with dropout between them are one
op each, with torch's dropout in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lazygt.host.gpus import workers_gpu
from lazygt.record.context import workers_device

aten: Any = torch.ops.aten
#: cuDNN's modes: the kinds of layers.
RELU, TANH, LSTM, GRU = range(4)
#: State of all layers: one tensor, or two for an LSTM.
State = tuple[torch.Tensor, ...]

_DTYPES = (torch.float64, torch.float32, torch.float16)
#: Minimum cuDNN version (9.13), and compute capability, for bfloat16 layers in torch.
_BFLOAT16 = 91300
_AMPERE = (8, 0)


class Layers(NamedTuple):
    """Stacked layers."""

    mode: int  # kind of the layers
    params: Sequence[torch.Tensor]  # weights of one layer and direction after the other
    per_layer: int  # number of weights of a layer and direction
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    sizes: Sequence[int]  # of packed sequences, the number of samples at each step

    @property
    def directions(self) -> int:
        """Number of directions: 1 or 2."""
        return 2 if self.bidirectional else 1

    @property
    def has_dropout(self) -> bool:
        """True if there is dropout between layers."""
        return self.dropout != 0 and self.train and self.num_layers > 1

    def layer(self, number: int) -> Layers:
        """Return one of the layers alone."""
        count = self.per_layer * self.directions
        params = self.params[number * count : (number + 1) * count]
        return self._replace(params=params, num_layers=1)

    def settings(self, initial: State) -> tuple[Any, ...]:
        """Return the op's arguments from ``mode`` to ``dropout_state``, for these initial states.

        Their widths show whether an LSTM has a projection: h is then smaller than c.
        """
        width, hidden = initial[0].shape[2], initial[-1].shape[2]
        projected = 0 if width == hidden else width
        return (self.mode, hidden, projected, self.num_layers, False, 0.0, self.train,
                self.bidirectional, [*self.sizes], None)  # fmt: skip


def cudnn_or(mode: int, steps: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op on dense sequences: by cuDNN where eager torch uses it, else by ``steps``.

    Args:
        mode: the kind of the layers: ``RELU``, ``TANH``, ``LSTM`` or ``GRU``.
        steps: implementation step by step, with the same arguments.
    """

    @wraps(steps)
    def op(
        x: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not _uses_cudnn(x):
            return steps(x, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                         batch_first)  # fmt: skip
        initial = _contiguous_states(hx)
        count = _weights_per_layer(initial, has_biases)
        layers = Layers(mode, params, count, num_layers, dropout, train, bidirectional, ())
        out, last = _stack(x.transpose(0, 1) if batch_first else x, initial, layers)
        return (out.transpose(0, 1) if batch_first else out, *last)

    return op


def cudnn_or_packed(mode: int, steps: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op on packed sequences: by cuDNN where eager torch uses it, else by ``steps``.

    Args:
        mode, steps: see `cudnn_or`.
    """

    @wraps(steps)
    def op(
        data: torch.Tensor,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: list[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        if not _uses_cudnn(data):
            return steps(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train,
                         bidirectional)  # fmt: skip
        initial, sizes = _contiguous_states(hx), batch_sizes.tolist()
        count = _weights_per_layer(initial, has_biases)
        layers = Layers(mode, params, count, num_layers, dropout, train, bidirectional, sizes)
        out, last = _stack(data, initial, layers)
        return out, *last

    return op


def _uses_cudnn(x: torch.Tensor) -> bool:
    """Return whether eager torch would use cuDNN; False in transforms, which cuDNN lacks."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if workers_device() != "cuda" or not torch.backends.cudnn.enabled or transformed:
        return False
    return x.numel() != 0 and (
        x.dtype in _DTYPES or (x.dtype == torch.bfloat16 and _supports_bfloat16())
    )


def _supports_bfloat16() -> bool:
    """Return whether cuDNN and the GPU compute layers in bfloat16."""
    gpu = workers_gpu()
    return gpu.cudnn >= _BFLOAT16 and gpu.capability >= _AMPERE


def _weights_per_layer(initial_states: State, has_biases: bool) -> int:
    """Return the number of weight tensors of one layer and direction.

    They are w_ih and w_hh, with biases b_ih and b_hh, and w_hr of an LSTM with a projection, whose
    h0 is smaller than its c0.
    """
    has_projection = initial_states[0].shape[2] != initial_states[-1].shape[2]
    return 2 + 2 * has_biases + has_projection


def _contiguous_states(hx: Any) -> State:
    """Return ``hx``, one state or a pair (h, c), as a tuple.

    Raises:
        RuntimeError: a state is not contiguous, as in eager torch.
    """
    states = tuple(hx) if isinstance(hx, list | tuple) else (hx,)
    for name, state in zip(("hx", "cx"), states, strict=False):
        if not state.is_contiguous():
            raise RuntimeError(f"rnn: {name} is not contiguous")
    return states


def _stack(x: torch.Tensor, initial: State, layers: Layers) -> tuple[torch.Tensor, State]:
    """Return output and last states of stacked layers, with dropout between them if any."""
    if not layers.has_dropout:
        return _fused(x, initial, layers)
    last_states = []
    for number in range(layers.num_layers):
        if number:
            x = torch.dropout(x, layers.dropout, True)
        start = number * layers.directions
        states = tuple(state[start : start + layers.directions] for state in initial)
        x, last = _fused(x, states, layers.layer(number))
        last_states.append(last)
    return x, tuple(torch.cat(states, 0) for states in zip(*last_states, strict=True))


def _fused(x: torch.Tensor, initial: State, layers: Layers) -> tuple[torch.Tensor, State]:
    """Return output and last states by one cuDNN op, differentiable if a gradient is needed."""
    hx, cx = initial if len(initial) == 2 else (initial[0], None)
    tensors = (x, *initial, *layers.params)
    settings = layers.settings(initial)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        out, *last = _Cudnn.apply(x, hx, cx, layers.per_layer, settings, *layers.params)  # type: ignore[no-untyped-call]
        return out, tuple(last)
    out, hy, cy, _, _ = aten._cudnn_rnn.default(
        x, layers.params, layers.per_layer, None, hx, cx, *settings
    )
    return out, (hy,) if cx is None else (hy, cy)


class _Cudnn(torch.autograd.Function):
    """torch's own derivative of cuDNN's op, without the clone of the reserve.

    The reserve is what cuDNN's forward leaves for its backward (see the module docstring).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        hx: torch.Tensor,
        cx: torch.Tensor | None,
        per_layer: int,
        settings: tuple[Any, ...],
        *params: torch.Tensor,
    ) -> Any:
        out, hy, cy, reserve, packed = aten._cudnn_rnn.default(
            x, params, per_layer, None, hx, cx, *settings
        )
        ctx.save_for_backward(x, packed, hx, cx, out, reserve, *params)
        ctx.set_materialize_grads(False)
        ctx.per_layer, ctx.settings = per_layer, settings
        return (out, hy) if cx is None else (out, hy, cy)

    @staticmethod
    def backward(
        ctx: Any,
        grad_out: torch.Tensor | None,
        grad_hy: torch.Tensor | None,
        grad_cy: torch.Tensor | None = None,
    ) -> Any:
        x, packed, hx, cx, out, reserve, *params = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        wanted = [*needs_grad[:3], any(needs_grad[5:])]
        if grad_out is None and grad_hy is None and grad_cy is None:
            return (None,) * len(needs_grad)
        dx, dhx, dcx, weights = aten._cudnn_rnn_backward.default(
            x, params, ctx.per_layer, packed, hx, cx, out, grad_out, grad_hy, grad_cy,
            *ctx.settings, reserve, wanted,
        )  # fmt: skip
        grads = (dx, dhx, dcx, None, None, *(weights or [None] * len(params)))
        return tuple(
            grad if needed else None for grad, needed in zip(grads, needs_grad, strict=True)
        )
