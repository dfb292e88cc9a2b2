"""Grouped matrix products (``_grouped_mm``): one matrix per group of rows, as in MoE experts.

The groups are consecutive along one dim, with their ends in ``offs``. If that dim is sharded, the
ends are shifted and clamped to a rank's block. The kernel requires rows of a multiple of 16 bytes,
so shorter local rows are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement, Shard
from lazygt.passes.sharding.rules.factors import strategies_by
from lazygt.passes.sharding.rules.strategy import (
    Call,
    LocalLowering,
    Metas,
    P,
    Rule,
    S,
    Strategy,
    Values,
    lower_strategy,
    table,
    zeros,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: Numbers of dims of both operands -> rule text, and the dim of each operand along the groups.
_RULE_BY_RANKS = {
    (2, 3): ("* !m k, * !e k n, !e -> !m n", (0, None)),
    (2, 2): ("* m !k, * !k n, !e -> !e m n", (1, 0)),
    (3, 2): ("* !e m k, * k !n, !e -> m !n", (None, 1)),
    (3, 3): ("* e m k, * e k n -> e m n", (None, None)),
}
_ALIGNMENT_BYTES = 16


def _grouped_mm(node: Node, metas: Metas, axis_size: int) -> Sequence[Strategy]:
    """Return the strategies of ``_grouped_mm``."""
    call = Call(node, metas, axis_size)
    ranks = len(call.shape("self")), len(call.shape("mat2"))
    if ranks not in _RULE_BY_RANKS or call.has("bias") or (ranks != (3, 3)) != call.has("offs"):
        return ()
    text, group_dims = _RULE_BY_RANKS[ranks]
    return [*map(_with_padding, [*strategies_by(call, text), *_sharded_groups(call, group_dims)])]


def _sharded_groups(call: Call, group_dims: Sequence[int | None]) -> list[Strategy]:
    """Return the strategy that shards the dim along the groups.

    The result is partial if that dim is summed over.

    Args:
        group_dims: dim of each operand along the groups; None: the operand has no such dim.
    """
    dim_by_operand = dict(zip(("self", "mat2"), group_dims, strict=True))
    placements: dict[str, Placement] = {
        name: S(dim) for name, dim in dim_by_operand.items() if dim is not None
    }
    if not placements:
        return []
    name, first = next(iter(placements.items()))
    assert isinstance(first, Shard)
    size = call.shape(name)[first.dim]
    if size < 2:
        return []
    output = P if len(placements) == 2 else S(0 if name == "self" else 1)

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        start, stop = build.bounds(size)
        ends = build.op("aten.sub.Scalar", operands[2], start)
        ends = build.op("aten.clamp.default", ends, 0, stop - start)
        return build.rerun(node, [*operands[:2], ends])

    return [call.strategy(output, **placements).by(lower)]


def _with_padding(strategy: Strategy) -> Strategy:
    """Extend a strategy to empty blocks, and to blocks with rows of no multiple of 16 bytes."""
    kernel_program = strategy.lower

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        (result,) = node.results
        assert result is not None
        if not all(build.meta(value).numel for value in operands[:2]):
            return (zeros(build, result, strategy.outputs[0]),)
        padded = [_padded_operand(build, operands[0], 1), _padded_operand(build, operands[1], 2)]
        (product,) = lower_strategy(
            build, strategy.by(kernel_program), node, [*padded, *operands[2:]]
        )
        assert product is not None
        for dim, count in enumerate(build.local(result.shape, strategy.outputs[0])):
            product = build.slice(product, dim, 0, count)
        return (product,)

    if kernel_program is None or isinstance(kernel_program, LocalLowering):
        return strategy.by(LocalLowering(program))
    return strategy.by(lambda build, node, operands: program(build, strategy, node, operands))


def _padded_operand(build: Builder, value: Ref, dims: int) -> Ref:
    """Zero-pad the last ``dims`` dims to multiples of 16 bytes, in strides valid for the kernel."""
    meta = build.meta(value)
    elements = max(_ALIGNMENT_BYTES // meta.dtype.itemsize, 1)
    pads = [pad for size in meta.shape[: -dims - 1 : -1] for pad in (0, -size % elements)]
    if any(pads):
        value = build.op("aten.constant_pad_nd.default", value, tuple(pads), 0)
    strides = build.meta(value).stride
    rows_lie_apart = all(stride == 1 or stride % elements == 0 for stride in strides)
    return value if 1 in strides[-2:] and rows_lie_apart else build.contiguous(value)


RULES: dict[str, Rule] = {**table("_grouped_mm.default", _grouped_mm)}
