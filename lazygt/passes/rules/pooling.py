"""Pooling, upsampling, sampling on a grid, patches: samples and channels pass through; space stays
whole."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.graph.node import Node
from lazygt.passes.rules.base import (
    Call,
    Metas,
    P,
    Row,
    Rule,
    S,
    splittable,
    table,
    zeros_when_empty,
)
from lazygt.passes.rules.views import sized

_WINDOWS = {"1d": 1, "2d": 2, "3d": 3}


def _rule(linear: str = "") -> Rule:
    """``linear``: the tensor that the op is linear in, when every other is R."""

    def rows(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
        call = Call(node, metas, parts)
        names = [name for name in call.args if call.has(name)]
        lead = len(call.shape(names[0])) - _spatial(node.op)
        found = [
            zeros_when_empty(call, call.row(S(dim), **dict.fromkeys(names, S(dim))))
            for dim in splittable(call.shape(names[0]))
            if dim < lead and _keeps(call, names, dim)
        ]
        return [*found, call.row(P, **{linear: P})] if linear else found

    return rows


def _resized_back(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Gradients of upsampling: samples and channels pass; ``input_size`` has those of the block."""
    call = Call(node, metas, parts)
    made = call.result().shape
    found = [
        zeros_when_empty(call, call.row(S(dim), grad_output=S(dim)).by(sized(made, "input_size")))
        for dim in splittable(made)
        if dim < len(made) - _spatial(node.op)
    ]
    return [*found, call.row(P, grad_output=P)]


def _keeps(call: Call, names: list[str], dim: int) -> bool:
    """Whether every operand and result has this dim in the same size."""
    size = call.shape(names[0])[dim]
    results = [meta.shape[dim] for meta in call.node.results if meta is not None]
    return all(call.shape(name)[dim] == size for name in names) and set(results) == {size}


def _spatial(op: str) -> int:
    return next(count for text, count in _WINDOWS.items() if text in op)


def _sampled(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """A grid for each sample, the same for all its channels."""
    call = Call(node, metas, parts)
    samples, channels = call.shape("input")[:2]
    found = [call.row(P, input=P)]
    if samples > 1:
        found.append(zeros_when_empty(call, call.row(S(0), input=S(0), grid=S(0))))
    if channels > 1:
        found.append(zeros_when_empty(call, call.row(S(1), input=S(1))))
    return found


def _sampled_backward(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """The gradient of the grid sums over channels."""
    call = Call(node, metas, parts)
    samples, channels = call.shape("input")[:2]
    names = ("grad_output", "input", "grid")
    found = [call.row(P, grad_output=P)]
    if samples > 1:
        found.append(zeros_when_empty(call, call.row(S(0), **dict.fromkeys(names, S(0)))))
    if channels > 1:
        row = call.row((S(1), P), grad_output=S(1), input=S(1))
        found.append(zeros_when_empty(call, row))
    return found


def _affine_grid(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """A grid for each sample; of the pictures' sizes only space matters."""
    call = Call(node, metas, parts)
    size = tuple(call["size"])
    found = [call.row(P, theta=P)]
    if size[0] > 1:
        row = call.row(S(0), theta=S(0)).by(sized(size))
        found.append(zeros_when_empty(call, row))
    return found


def _unfolded(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Patches as columns, and back: split by samples, where there are several."""
    call = Call(node, metas, parts)
    found = [call.row(P, self=P)]
    batched = len(call.shape("self")) == (3 if "col2im" in node.op else 4)
    if batched and call.shape("self")[0] > 1:
        found.append(zeros_when_empty(call, call.row(S(0), self=S(0))))
    return found


RULES: dict[str, Rule] = {
    **table("grid_sampler_2d.default grid_sampler_3d.default", _sampled),
    **table("grid_sampler_2d_backward.default grid_sampler_3d_backward.default", _sampled_backward),
    **table("affine_grid_generator.default", _affine_grid),
    **table("im2col.default col2im.default", _unfolded),
    **table("upsample_nearest2d.vec upsample_bilinear2d.vec", _rule("input")),
    **table(
        "max_pool2d_with_indices.default max_pool3d_with_indices.default "
        "adaptive_max_pool2d.default adaptive_max_pool3d.default fractional_max_pool2d.default "
        "fractional_max_pool3d.default",
        _rule(),
    ),
    **table(
        "avg_pool1d.default adaptive_avg_pool1d.default avg_pool2d.default avg_pool3d.default "
        "upsample_nearest2d.default upsample_bilinear2d.default upsample_bicubic2d.default "
        "reflection_pad3d.default replication_pad3d.default _adaptive_avg_pool2d.default "
        "_adaptive_avg_pool3d.default reflection_pad1d.default reflection_pad2d.default "
        "replication_pad1d.default replication_pad2d.default upsample_nearest1d.default "
        "upsample_nearest3d.default _upsample_nearest_exact1d.default "
        "_upsample_nearest_exact2d.default _upsample_nearest_exact3d.default "
        "upsample_linear1d.default upsample_trilinear3d.default _upsample_bilinear2d_aa.default "
        "_upsample_bicubic2d_aa.default max_unpool2d.default max_unpool3d.default",
        _rule("self"),
    ),
    **table(
        "max_pool2d_with_indices_backward.default avg_pool2d_backward.default "
        "avg_pool3d_backward.default _adaptive_avg_pool2d_backward.default "
        "_adaptive_avg_pool3d_backward.default max_pool3d_with_indices_backward.default "
        "adaptive_max_pool2d_backward.default adaptive_max_pool3d_backward.default "
        "fractional_max_pool2d_backward.default reflection_pad1d_backward.default "
        "reflection_pad2d_backward.default reflection_pad3d_backward.default "
        "replication_pad1d_backward.default replication_pad2d_backward.default "
        "replication_pad3d_backward.default",
        _rule("grad_output"),
    ),
    **table(
        "upsample_nearest1d_backward.default upsample_nearest2d_backward.default "
        "upsample_nearest3d_backward.default _upsample_nearest_exact1d_backward.default "
        "_upsample_nearest_exact2d_backward.default _upsample_nearest_exact3d_backward.default "
        "upsample_linear1d_backward.default upsample_bilinear2d_backward.default "
        "upsample_bicubic2d_backward.default upsample_trilinear3d_backward.default "
        "_upsample_bilinear2d_aa_backward.default _upsample_bicubic2d_aa_backward.default",
        _resized_back,
    ),
}
