"""Strategies of normalisations, losses, embeddings, attention, convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.passes.sharding.rules.draws import UNATTENDED, Cases, Draw, check_strategies
from tests.passes.sharding.rules.harness import Case
from tests.support.values import Kind

aten: Any = torch.ops.aten
Make = Callable[[Draw], Case]


def layer_norm(dims: int, affine: bool = True) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(3)
        shape = value.shape[-dims:]
        weights = (d.of(*shape), d.of(*shape)) if affine else (None, None)
        return Case("native_layer_norm.default", value, shape, *weights, 1e-5)

    return make


def layer_norm_backward(dims: int, mask: tuple[bool, bool, bool], affine: bool = True) -> Make:
    def make(d: Draw) -> Case:
        d = d.without(Kind.FAR)  # products of such gradients keep no digits
        value = d.tensor(3)
        shape = value.shape[-dims:]
        weights = (d.of(*shape), d.of(*shape)) if affine else (None, None)
        _, mean, rstd = aten.native_layer_norm(value, shape, *weights, 1e-5)
        return Case("native_layer_norm_backward.default", d.like(value), value, shape, mean, rstd,
                    *weights, mask)  # fmt: skip

    return make


def group_norm(backward: bool) -> Make:
    def make(d: Draw) -> Case:
        d = d.without(Kind.FAR) if backward else d
        groups = 12 if d.flag() else 3
        n, c, area = d.size(), groups * 2, 4
        value, weight, bias = d.of(n, c, 2, 2), d.of(c), d.of(c)
        if not backward:
            return Case("native_group_norm.default", value, weight, bias, n, c, area, groups, 1e-5)
        _, mean, rstd = aten.native_group_norm(value, weight, bias, n, c, area, groups, 1e-5)
        return Case("native_group_norm_backward.default", d.like(value), value, mean, rstd, weight,
                    n, c, area, groups, [True] * 3)  # fmt: skip

    return make


def nll(reduction: int, backward: bool, weighted: bool, two: bool = False) -> Make:
    """With an ignored class; ``two``: of pictures."""
    op = "nll_loss2d" if two else "nll_loss"

    def make(d: Draw) -> Case:
        samples, classes = d.shape(2)
        space = d.shape(2) if two else ()
        value = d.of(samples, classes, *space).log_softmax(1)
        target = d.indices(classes, samples, *space)
        weight = d.of(classes).abs() + 0.1 if weighted else None
        rest = (target, weight, reduction, classes // 2)
        if not backward:
            return Case(f"{op}_forward.default", value, *rest)
        out, total = getattr(aten, f"{op}_forward")(value, *rest)
        return Case(f"{op}_backward.default", d.like(out), value, *rest, total)

    return make


def embedding(d: Draw) -> Case:
    rows, features, a, b = d.shape(4)
    return Case("embedding.default", d.of(rows, features), d.indices(rows, a, b))


def embedding_backward(padding: bool, scaled: bool = False) -> Make:
    def make(d: Draw) -> Case:
        rows, features, a, b = d.shape(4)
        return Case("embedding_dense_backward.default", d.of(a, b, features),
                    d.indices(rows, a, b), rows, rows // 2 if padding else -1, scaled)  # fmt: skip

    return make


def attention(backward: bool, causal: bool = False, mask: str = "") -> Make:
    op = "_scaled_dot_product_flash_attention_for_cpu"

    def make(d: Draw) -> Case:
        d = d.without(*UNATTENDED)
        b, h, i, j = d.shape(4)
        query, key, value = d.of(b, h, i, 8), d.of(b, h, j, 8), d.of(b, h, j, 8)
        sizes = {"": None, "plain": (i, j), "samples": (b, 1, i, j), "heads": (b, h, i, j)}[mask]
        named = {"attn_mask": None if sizes is None else d.of(*sizes)}
        if not backward:
            return Case(f"{op}.default", query, key, value, 0.0, causal, **named)
        out, lse = getattr(aten, op)(query, key, value, 0.0, causal, **named)
        return Case(f"{op}_backward.default", d.like(out), query, key, value, out, lse, 0.0, causal,
                    **named)  # fmt: skip

    return make


def convolution(backward: bool, kind: str, bias: bool = True) -> Make:
    """``kind``: plain, grouped, transposed or 1d."""

    def make(d: Draw) -> Case:
        groups = 12 if kind == "grouped" else 1
        n, into, out = d.size(), d.size() * groups, d.size() * groups
        space = (6,) if kind == "1d" else (6, 5)
        kernel = (3,) * len(space)
        first, second = (into, out) if kind == "transposed" else (out, into)
        value, weight = d.of(n, into, *space), d.of(first, second // groups, *kernel)
        ones, zeros = [1] * len(space), [0] * len(space)
        rest = (ones, ones, ones, kind == "transposed", zeros, groups)
        added = d.of(out) if bias else None
        if not backward:
            return Case("convolution.default", value, weight, added, *rest)
        made = aten.convolution(value, weight, added, *rest)
        return Case("convolution_backward.default", d.like(made), value, weight,
                    [out] if bias else None, *rest, [True, True, bias])  # fmt: skip

    return make


def batch_norm(op: str, training: bool, affine: bool = True) -> Make:
    def make(d: Draw) -> Case:
        value = d.tensor(4) if d.flag() else d.of(d.size() + 1, d.size())
        if value.numel() == value.shape[1]:
            value = torch.cat([value, value + 1])  # one value a channel has no variance
        c = value.shape[1]
        weights = (d.of(c), d.of(c)) if affine else (None, None)
        running = (d.of(c), d.of(c).abs())
        if op == "backward":
            _, mean, inverse = aten.native_batch_norm(
                value, *weights, *(r.clone() for r in running), training, 0.1, 1e-5)  # fmt: skip
            rest = (*running, mean, inverse, training, 1e-5, [True, affine, affine])
            return Case("native_batch_norm_backward.default", d.like(value), value, weights[0],
                        *rest)  # fmt: skip
        writing = training and op == "native_batch_norm.default"
        return Case(op, value, *weights, *running, training, 0.1, 1e-5, writing=writing)

    return make


def picture(backward: bool, stride: int, padding: int, dilation: int) -> Make:
    """A convolution of many rows and columns."""

    def make(d: Draw) -> Case:
        value, weight = d.of(2, d.size(), 17, 16), d.of(3, d.size(), 3, 2)
        weight = d.of(3, value.shape[1], 3, 2)
        rest = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1)
        if not backward:
            return Case("convolution.default", value, weight, d.of(3), *rest)
        result = aten.convolution(value, weight, None, *rest)
        return Case("convolution_backward.default", d.like(result), value, weight, [3], *rest,
                    [True, True, True])  # fmt: skip

    return make


def wide_pool(op: str, *args: Any) -> Make:
    return lambda d: Case(op, d.of(d.size(), d.size(), 16, 13), *args)


def wide_max_pool_backward(d: Draw) -> Case:
    value = d.of(d.size(), 2, 16, 12)
    out, indices = aten.max_pool2d_with_indices(value, [2, 2])
    return Case("max_pool2d_with_indices_backward.default", d.like(out), value, [2, 2], [2, 2],
                [0, 0], [1, 1], False, indices)  # fmt: skip


def wide_avg_pool_backward(d: Draw) -> Case:
    value = d.of(d.size(), 2, 16, 12)
    return Case("avg_pool2d_backward.default", d.of(*value.shape[:2], 8, 6), value, [2, 2], [2, 2],
                [0, 0], False, True, None)  # fmt: skip


def pool(op: str, *args: Any) -> Make:
    return lambda d: Case(op, d.of(*d.shape(2), 6, 6), *args)


def max_pool_backward(d: Draw) -> Case:
    value = d.of(*d.shape(2), 6, 6)
    out, indices = aten.max_pool2d_with_indices(value, [2, 2])
    return Case("max_pool2d_with_indices_backward.default", d.like(out), value, [2, 2], [2, 2],
                [0, 0], [1, 1], False, indices)  # fmt: skip


def avg_pool_backward(d: Draw) -> Case:
    value = d.of(*d.shape(2), 6, 6)
    return Case("avg_pool2d_backward.default", d.of(*value.shape[:2], 3, 3), value, [2, 2], [2, 2],
                [0, 0], False, True, None)  # fmt: skip


def adaptive_backward(d: Draw) -> Case:
    value = d.of(*d.shape(2), 6, 6)
    return Case("_adaptive_avg_pool2d_backward.default", d.of(*value.shape[:2], 2, 2), value)


def grid_sampler(d: Draw) -> Case:
    value = d.of(*d.shape(2), 4, 5)
    grid = d.of(value.shape[0], 3, 3, 2)
    return Case("grid_sampler_2d.default", value, grid, 0, 0, False)


LAYERS: Cases = {
    "layer_norm": layer_norm(1),
    "layer_norm of two dims": layer_norm(2),
    "layer_norm without weights": layer_norm(1, affine=False),
    "layer_norm_backward": layer_norm_backward(1, (True, True, True)),
    "layer_norm_backward of two dims": layer_norm_backward(2, (True, True, True)),
    "layer_norm_backward of weights": layer_norm_backward(1, (False, True, True)),
    "layer_norm_backward of the input": layer_norm_backward(1, (True, False, False), affine=False),
    "group_norm": group_norm(backward=False),
    "group_norm_backward": group_norm(backward=True),
    **{f"nll {reduction} backward={back} weighted={weighted}": nll(reduction, back, weighted)
       for reduction in (0, 1, 2) for back in (False, True) for weighted in (False, True)},
    **{f"nll2d {reduction} backward={backward}": nll(reduction, backward, weighted=True, two=True)
       for reduction in (0, 1, 2) for backward in (False, True)},
    "embedding": embedding,
    "embedding_backward": embedding_backward(padding=False),
    "embedding_backward with padding": embedding_backward(padding=True),
    "embedding_backward scaled": embedding_backward(padding=True, scaled=True),
    **{f"attention mask={mask!r} backward={backward}": attention(backward, mask=mask)
       for mask in ("", "plain", "samples", "heads") for backward in (False, True)},
    "causal attention": attention(backward=False, causal=True),
    "causal attention backward": attention(backward=True, causal=True),
    **{f"{kind} convolution backward={backward}": convolution(backward, kind)
       for kind in ("plain", "grouped", "transposed", "1d") for backward in (False, True)},
    "convolution without bias": convolution(backward=False, kind="plain", bias=False),
    "convolution without bias backward": convolution(backward=True, kind="plain", bias=False),
    **{f"{op} training={training}": batch_norm(op, training)
       for op in ("native_batch_norm.default", "_native_batch_norm_legit.default", "backward")
       for training in (False, True)},
    "batch_norm without weights": batch_norm("native_batch_norm.default", True, affine=False),
    **{f"rows, {stride} {padding} {dilation} backward={backward}":
       picture(backward, stride, padding, dilation)
       for backward in (False, True)
       for stride, padding, dilation in ((1, 0, 1), (1, 1, 1), (2, 1, 1), (1, 2, 2), (3, 0, 1))},
    "wide max_pool2d": wide_pool("max_pool2d_with_indices.default", [3, 2], [2, 2]),
    "wide avg_pool2d": wide_pool("avg_pool2d.default", [3, 3], [1, 1], [1, 1]),
    "wide avg_pool2d, uncounted":
        wide_pool("avg_pool2d.default", [3, 3], [2, 1], [1, 1], False, False),
    "wide max_pool2d_backward": wide_max_pool_backward,
    "wide avg_pool2d_backward": wide_avg_pool_backward,
    "max_pool2d": pool("max_pool2d_with_indices.default", [2, 2]),
    "max_pool2d_backward": max_pool_backward,
    "avg_pool2d": pool("avg_pool2d.default", [2, 2]),
    "avg_pool2d_backward": avg_pool_backward,
    "adaptive_avg_pool2d": pool("_adaptive_avg_pool2d.default", [2, 2]),
    "adaptive_avg_pool2d_backward": adaptive_backward,
    "grid_sampler_2d": grid_sampler,
    "im2col": pool("im2col.default", [2, 2], [1, 1], [0, 0], [2, 2]),
    "col2im": lambda d: Case("col2im.default", d.of(d.size(), 8, 9), [6, 6], [2, 2], [1, 1], [0, 0],
                             [2, 2]),
    "upsample_bilinear2d": pool("upsample_bilinear2d.vec", [9, 9], False, None),
    "upsample_nearest2d": pool("upsample_nearest2d.default", [9, 9]),
    "wide reflection_pad2d": lambda d: Case(
        "reflection_pad2d.default", d.of(2, 2, d.size() + 6, d.size() + 6), [2, 1, 3, 2]
    ),
    "replication_pad1d": lambda d: Case(
        "replication_pad1d.default", d.of(2, 2, d.size() + 6), [2, 4]
    ),
    "reflection_pad2d": pool("reflection_pad2d.default", [1, 1, 1, 1]),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", LAYERS)
def test_rows(name: str) -> None:
    check_strategies(LAYERS[name], examples=12)


@pytest.mark.timeout(120)
def test_pool_takes_one_number_for_both_dims() -> None:
    check_strategies(wide_pool("avg_pool2d.default", [3], [1], [1]), examples=12)
