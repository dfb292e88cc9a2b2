"""Stand-ins on the CPU for cuDNN's recurrent layers, by the contract of torch's op.

Weights are packed with zeros for biases that are not there. The backward reads the packed ones
alone; it refuses a reserve that it has written into before, and writes into the one that it has.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lazygt.graph.ops import undispatched

#: cuDNN's numbers of the kinds of layers, and what computes them.
RELU, TANH, LSTM, GRU = range(4)
OPS = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)
#: Bytes of a reserve before the last output's.
HEAD = 3


def forward(
    x: Tensor,
    weights: Sequence[Tensor],
    per_layer: int,
    packed: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    *settings: Any,
) -> tuple[Tensor, ...]:
    train = settings[6]
    assert hx.is_contiguous()
    assert cx is None or cx.is_contiguous()
    if packed is None:
        packed = _packed(weights, per_layer)
    out, hy, *rest = _run(x, _unpacked(packed, weights, per_layer), hx, cx, settings)
    cy = rest[0] if rest else hx.new_empty(0)
    reserve = torch.zeros(0, dtype=torch.uint8)
    if train:
        reserve = torch.cat([torch.tensor([0, 1, 2], dtype=torch.uint8), _bytes(hy)])
    return out, hy, cy, reserve, packed


def backward(
    x: Tensor,
    weights: Sequence[Tensor],
    per_layer: int,
    packed: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    output: Tensor,
    grad_out: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    *settings, reserve, mask = rest
    assert settings[6], "cudnn RNN backward can only be called in training mode"
    assert hx.is_contiguous()
    assert cx is None or cx.is_contiguous()
    assert reserve[:HEAD].tolist() == [0, 1, 2], "a reserve that was written into"
    reserve.fill_(255)
    leaves = [t.detach().clone().requires_grad_() for t in (x, hx, *([] if cx is None else [cx]))]
    flat = packed.detach().clone().requires_grad_()
    with undispatched(), torch.enable_grad():
        given = _unpacked(flat, weights, per_layer)
        made = _run(leaves[0], given, leaves[1], None if cx is None else leaves[2], settings)
        torch.testing.assert_close(made[0], output, equal_nan=True)
        grads = [grad_out, grad_hy, grad_cy][: len(made)]
        pairs = [(t, grad) for t, grad in zip(made, grads, strict=True) if grad is not None]
        tensors, grads_of = zip(*pairs, strict=True)
        *found, dw = torch.autograd.grad(tensors, [*leaves, flat], grads_of, allow_unused=True)
    dx, dhx, *dcx = [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(leaves, found, strict=True)
    ]
    parts = _unpacked(torch.zeros_like(flat) if dw is None else dw, weights, per_layer)
    kept = [part for part in parts if part is not None] if mask[3] else []
    return dx, dhx, dcx[0] if dcx else None, kept[: len(weights)] if mask[3] else []


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def _run(
    x: Tensor, weights: Sequence[Tensor], hx: Tensor, cx: Tensor | None, settings: Sequence[Any]
) -> Any:
    """Outputs and last states by torch's layers of the CPU."""
    mode, hidden, projected, layers, first, dropout, train, both, sizes, state = settings
    assert (dropout, state, first) == (0.0, None, False)
    assert hx.shape[2] == (projected or hidden)
    states = hx if cx is None else [hx, cx]
    has_biases = len(weights) // (layers * (2 if both else 1)) > 3
    options = (has_biases, layers, dropout, train, both)
    if sizes:
        return OPS[mode](x, torch.tensor(sizes), states, weights, *options)
    return OPS[mode](x, states, weights, *options, False)


def _packed(weights: Sequence[Tensor], per_layer: int) -> Tensor:
    """All weights in one row, before the biases."""
    groups = [weights[i : i + per_layer] for i in range(0, len(weights), per_layer)]
    order = [w for group in groups for w in group if w.dim() == 2]
    order += [w for group in groups for w in group if w.dim() == 1]
    zeros = weights[0].new_zeros(7)  # cuDNN has room for biases that are not there
    return torch.cat([w.reshape(-1) for w in order] + [zeros])


def _unpacked(packed: Tensor, weights: Sequence[Tensor], per_layer: int) -> list[Tensor]:
    """Views of what ``_packed`` has made, in the order of the weights."""
    order = sorted(range(len(weights)), key=lambda i: weights[i].dim() == 1)
    counts = [weights[i].numel() for i in order]
    found = {
        i: packed.narrow(0, end - count, count).view(weights[i].shape)
        for i, count, end in zip(order, counts, accumulate(counts), strict=True)
    }
    return [found[i] for i in range(len(weights))]


@contextmanager
def registered() -> Iterator[None]:
    """The stand-ins as torch's kernels of the CPU, for as long as the block runs."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_cudnn_rnn", _warning, "CPU")
    library.impl("_cudnn_rnn_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]


def _warning(*args: Any) -> Any:
    """As cuDNN's op does, which packs the weights in each call."""
    warnings.warn("RNN module weights are not part of single contiguous memory", stacklevel=1)
    return forward(*args)
