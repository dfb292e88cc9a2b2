"""Strategies of fused kernels: recurrent layers, bags of embeddings, those of GPUs by stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazygt.passes.sharding.rules import strategies_of
from lazygt.passes.sharding.rules.strategy import P, S
from tests.passes.sharding.rules import standins
from tests.passes.sharding.rules.draws import UNATTENDED, Cases, Draw, check_strategies, typical
from tests.passes.sharding.rules.harness import Case
from tests.support import cudnn_rnn
from tests.support.values import Kind

aten: Any = torch.ops.aten
Make = Callable[[Draw], Case]
LSTM = 2  # the mode of the kernels


def queries(d: Draw, grouped: bool) -> list[torch.Tensor]:
    """Query, key and value; ``grouped``: three queries' heads for each of the keys'.

    Large ones are small enough that a float32 logarithm of a sum keeps its digits.
    """
    b, i, j = d.shape(3)
    heads = 12 if grouped else d.size()
    shapes = (b, 3 * heads if grouped else heads, i, 8), (b, heads, j, 8), (b, heads, j, 8)
    return [d.of(*shape).float() / (512 if d.kind is Kind.LARGE else 1) for shape in shapes]


def flash(backward: bool, causal: bool = False, grouped: bool = False) -> Make:
    op = "_scaled_dot_product_flash_attention"

    def make(d: Draw) -> Case:
        d = d.without(*UNATTENDED)
        q, k, v = queries(d, grouped)
        if not backward:
            return Case(f"{op}.default", q, k, v, 0.0, causal, False)
        out, sums, *_ = standins.flash(q, k, v, 0.0, causal)
        state, unused = torch.zeros(2), torch.zeros(())
        return Case(f"{op}_backward.default", d.like(q).float(), q, k, v, out, sums, None, None,
                    q.shape[2], k.shape[2], 0.0, causal, state, unused)  # fmt: skip

    return make


def efficient(backward: bool, bias: str = "", causal: bool = False) -> Make:
    """``bias``: which of its four dims are not broadcast."""
    op = "_scaled_dot_product_efficient_attention"

    def make(d: Draw) -> Case:
        d = d.without(*UNATTENDED)
        q, k, v = queries(d, grouped=False)
        whole = dict(zip("bhij", (*q.shape[:3], k.shape[2]), strict=True))
        shape = [size if name in bias else 1 for name, size in whole.items()]
        added = d.of(*shape).float() if bias else None
        if not backward:
            return Case(f"{op}.default", q, k, v, added, d.flag(), 0.0, causal)
        out, sums, *_ = standins.efficient(q, k, v, added, True, 0.0, causal)
        state = torch.zeros((), dtype=torch.int64)
        mask = [True, True, True, added is not None]
        return Case(f"{op}_backward.default", d.like(q).float(), q, k, v, added, out, sums, state,
                    state.clone(), 0.0, mask, causal)  # fmt: skip

    return make


def cudnn_attention(backward: bool, causal: bool) -> Make:
    op = "_scaled_dot_product_cudnn_attention"

    def make(d: Draw) -> Case:
        d = d.without(*UNATTENDED)
        q, k, v = queries(d, grouped=False)
        if not backward:
            return Case(f"{op}.default", q, k, v, None, True, 0.0, causal, False)
        out, sums, *_ = standins.cudnn(q, k, v, None, True, 0.0, causal)
        state = torch.zeros((), dtype=torch.int64)
        return Case(f"{op}_backward.default", d.like(q).float(), q, k, v, out, sums, state,
                    state.clone(), None, None, None, q.shape[2], k.shape[2], 0.0,
                    causal)  # fmt: skip

    return make


def rms_norm(
    dims: int, affine: bool, backward: bool, mask: tuple[bool, bool] = (True, True)
) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(3)
        shape = value.shape[-dims:]
        weight = d.of(*shape) if affine else None
        if not backward:
            return Case("_fused_rms_norm.default", value, shape, weight, 0.1)
        _, rstd = aten._fused_rms_norm(value, shape, weight, 0.1)
        return Case("_fused_rms_norm_backward.default", d.like(value), value, shape, rstd, weight,
                    mask)  # fmt: skip

    return make


def cudnn(backward: bool) -> Make:
    def make(d: Draw) -> Case:
        value = d.of(d.size() + 1, d.size(), 2)
        c = value.shape[1]
        vectors = [d.of(c), d.of(c), d.of(c), d.of(c).abs()]
        if not backward:
            return Case("cudnn_batch_norm.default", value, *vectors, True, 0.1, 0.1, writing=True)
        _, mean, inverse = aten.native_batch_norm(
            value, *[v.clone() for v in vectors], True, 0.1, 0.1
        )
        reserve = torch.zeros(0, dtype=torch.uint8)
        return Case("cudnn_batch_norm_backward.default", value, d.like(value), vectors[0],
                    *vectors[2:], mean, inverse, 0.1, reserve)  # fmt: skip

    return make


def grid_sampler(d: Draw) -> Case:
    value = d.of(*d.shape(2), 4, 5)
    return Case("cudnn_grid_sampler.default", value, d.of(value.shape[0], 3, 3, 2))


def grid_sampler_backward(d: Draw) -> Case:
    value = d.of(*d.shape(2), 4, 5)
    grid, gradient = d.of(value.shape[0], 3, 3, 2), d.of(*value.shape[:2], 3, 3)
    return Case("cudnn_grid_sampler_backward.default", value, grid, gradient)


def recurrent(d: Draw) -> list[Any]:
    """All arguments of a layer of an LSTM on sequences, samples second."""
    length, samples, features, hidden = d.shape(4)
    sizes = (4 * hidden, features), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)
    weights = [d.of(*size).float() for size in sizes]
    states = [d.of(samples, hidden).float() for _ in range(2)]
    value = d.of(length, samples, features).float()
    return [value, *weights, *states, False, [], LSTM, hidden, 1, True, False, False, True]


def lstm(d: Draw) -> Case:
    return Case("mkldnn_rnn_layer.default", *recurrent(d))


def lstm_backward(d: Draw) -> Case:
    args = recurrent(d)
    value, *weights, hx, cx = args[:7]
    reverse, batch_sizes, mode, hidden, layers, biases, bidirectional, first, train = args[7:]
    out, hy, cy, workspace = aten.mkldnn_rnn_layer(*args)
    return Case("mkldnn_rnn_layer_backward.default", value, *weights, hx, cx, out, hy, cy,
                d.like(out).float(), d.like(hy).float(), d.like(cy).float(), reverse, mode, hidden,
                layers, biases, train, bidirectional, batch_sizes, first, workspace)  # fmt: skip


def cudnn_rnn_case(kind: int, backward: bool, biases: bool = True) -> Make:
    """Two layers in both directions; of an LSTM with a projection."""

    def make(d: Draw) -> Case:
        length, samples, features, hidden = d.shape(4)
        gates = {LSTM: 4, cudnn_rnn.GRU: 3}.get(kind, 1)
        width = hidden + 1 if kind == LSTM else hidden
        weights: list[torch.Tensor] = []
        for inputs in (features, features, 2 * width, 2 * width):
            weights += [d.of(gates * hidden, inputs), d.of(gates * hidden, width)]
            weights += [d.of(gates * hidden) for _ in range(2 * biases)]
            weights += [d.of(width, hidden)] if kind == LSTM else []
        hx = d.of(4, samples, width)
        cx = d.of(4, samples, hidden) if kind == LSTM else None
        value, count = d.of(length, samples, features), len(weights) // 4
        settings = (kind, hidden, width if kind == LSTM else 0, 2, False, 0.0, True, True, [], None)
        if not backward:
            return Case("_cudnn_rnn.default", value, weights, count, None, hx, cx, *settings)
        out, hy, cy, reserve, packed = cudnn_rnn.forward(
            value, weights, count, None, hx, cx, *settings
        )
        grads = [d.like(out), d.like(hy), None if cx is None else d.like(cy)]
        return Case("_cudnn_rnn_backward.default", value, weights, count, packed, hx, cx, out,
                    *grads, *settings, reserve, [True, True, cx is not None, True])  # fmt: skip

    return make


def bag(mode: int) -> Make:
    def make(d: Draw) -> Case:
        rows, features, count = d.shape(3)
        return Case("_embedding_bag.default", d.of(rows, features), d.indices(rows, count),
                    torch.tensor([0, count // 2]), False, mode)  # fmt: skip

    return make


def bag_backward(mode: int) -> Make:
    def make(d: Draw) -> Case:
        rows, features, count = d.shape(3)
        indices, offsets = d.indices(rows, count), torch.tensor([0, count // 2])
        made, *known = aten._embedding_bag(d.of(rows, features), indices, offsets, False, mode)
        return Case("_embedding_bag_backward.default", d.like(made), indices, offsets, *known, rows,
                    False, mode, False, None)  # fmt: skip

    return make


CASES: Cases = {
    **{f"flash causal={causal} grouped={grouped} backward={backward}":
       flash(backward, causal, grouped)
       for causal in (False, True) for grouped in (False, True) for backward in (False, True)},
    **{f"efficient bias={bias!r} backward={backward}": efficient(backward, bias)
       for bias in ("", "bij", "hij", "bhij") for backward in (False, True)},
    **{f"efficient causal backward={backward}": efficient(backward, causal=True)
       for backward in (False, True)},
    **{f"cudnn attention causal={causal} backward={backward}": cudnn_attention(backward, causal)
       for causal in (False, True) for backward in (False, True)},
    **{f"rms_norm dims={dims} affine={affine} backward={backward}": rms_norm(dims, affine, backward)
       for dims in (1, 2) for affine in (False, True) for backward in (False, True)},
    "rms_norm backward of weights": rms_norm(1, True, True, (False, True)),
    "bag sum": bag(0), "bag mean": bag(1), "lstm": lstm, "lstm_backward": lstm_backward,
    "bag sum backward": bag_backward(0), "bag mean backward": bag_backward(1),
    **{f"cudnn_rnn mode={kind} backward={backward}": cudnn_rnn_case(kind, backward)
       for kind in (cudnn_rnn.TANH, LSTM, cudnn_rnn.GRU) for backward in (False, True)},
    "cudnn_rnn without biases": cudnn_rnn_case(LSTM, True, biases=False),
    "cudnn_grid_sampler": grid_sampler, "cudnn_grid_sampler_backward": grid_sampler_backward,
    "cudnn_batch_norm": cudnn(backward=False), "cudnn_batch_norm_backward": cudnn(backward=True),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_rows(name: str) -> None:
    check_strategies(CASES[name], examples=12)


@pytest.mark.parametrize("op", ["flash", "efficient"])
def test_dropout_is_drawn_for_the_whole(op: str) -> None:
    case = flash(backward=False)(typical()) if op == "flash" else efficient(False)(typical())
    args = tuple(0.5 if arg == 0.0 and type(arg) is float else arg for arg in case.node.args)
    node = type(case.node)(case.node.op, args, (), case.node.fresh)
    assert len(strategies_of(node, case.metas, 2)) == 1


def test_a_workspace_without_bytes_is_no_empty_block() -> None:
    case = lstm_backward(typical())
    (place,) = (n for n, ref in enumerate(case.node.refs()) if case.metas[ref].dtype == torch.uint8)
    case.tensors[case.node.refs()[place]] = torch.zeros(0, dtype=torch.uint8)
    (strategy,) = (strategy for strategy in case.strategies(2) if strategy.outputs[1] == P)
    for graph in case.local(2, strategy)[0]:
        assert case.node.op in [node.op for node in graph.nodes]


@pytest.mark.parametrize("mode", [0, 1])
def test_infinite_row_stays_out_of_bags_without_it(mode: int) -> None:
    table = torch.ones(4, 2, dtype=torch.float64)
    table[0], table[2] = torch.inf, torch.nan
    case = Case("_embedding_bag.default", table, torch.tensor([1, 3]), torch.tensor([0]), False,
                mode)  # fmt: skip
    (by_rows,) = [each for each in case.strategies(2) if each.inputs[0] == S(0)]
    assert case.expected[0].isfinite().all()
    case.check(2, by_rows)
