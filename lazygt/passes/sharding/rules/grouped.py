"""Products of groups of rows, each with a matrix of its own: the experts of a mixture.

Groups lie one after the other along a dim, and say where they end. Of a block of that dim they end
within the block, or at its borders. The kernel wants rows of whole 16 bytes: shorter rows of a rank
are filled up with zeros.
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

#: By the ranks of both operands: the rule, and the dims of the operands that groups lie along.
_TEXTS = {
    (2, 3): ("* !m k, * !e k n, !e -> !m n", (0, None)),
    (2, 2): ("* m !k, * !k n, !e -> !e m n", (1, 0)),
    (3, 2): ("* !e m k, * k !n, !e -> m !n", (None, 1)),
    (3, 3): ("* e m k, * e k n -> e m n", (None, None)),
}
_ALIGNED = 16


def _grouped_mm(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
    call = Call(node, metas, parts)
    ranks = len(call.shape("self")), len(call.shape("mat2"))
    if ranks not in _TEXTS or call.has("bias") or (ranks != (3, 3)) != call.has("offs"):
        return ()
    text, along = _TEXTS[ranks]
    return [*map(_filled_up, [*strategies_by(call, text), *_groups_in_blocks(call, along)])]


def _groups_in_blocks(call: Call, along: Sequence[int | None]) -> list[Strategy]:
    """Return the strategy for blocks of the dim that groups lie along.

    Where that is summed over, it is one of partial sums.
    """
    named = dict(zip(("self", "mat2"), along, strict=True))
    placements: dict[str, Placement] = {
        name: S(dim) for name, dim in named.items() if dim is not None
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


def _filled_up(strategy: Strategy) -> Strategy:
    """Return the strategy for blocks that are empty, or have rows of no whole 16 bytes."""
    inner = strategy.lower

    def program(build: Builder, strategy: Strategy, node: Node, operands: Sequence[Ref]) -> Values:
        (result,) = node.results
        assert result is not None
        if not all(build.meta(value).numel for value in operands[:2]):
            return (zeros(build, result, strategy.outputs[0]),)
        wide = [_wide(build, operands[0], 1), _wide(build, operands[1], 2)]
        (product,) = lower_strategy(build, strategy.by(inner), node, [*wide, *operands[2:]])
        assert product is not None
        for dim, count in enumerate(build.local(result.shape, strategy.outputs[0])):
            product = build.slice(product, dim, 0, count)
        return (product,)

    if inner is None or isinstance(inner, LocalLowering):
        return strategy.by(LocalLowering(program))
    return strategy.by(lambda build, node, operands: program(build, strategy, node, operands))


def _wide(build: Builder, value: Ref, dims: int) -> Ref:
    """Return an operand with its last dims filled up, laid out as the kernel takes it."""
    meta = build.meta(value)
    unit = max(_ALIGNED // meta.dtype.itemsize, 1)
    pads = [pad for size in meta.shape[: -dims - 1 : -1] for pad in (0, -size % unit)]
    if any(pads):
        value = build.op("aten.constant_pad_nd.default", value, tuple(pads), 0)
    strides = build.meta(value).stride
    rows_lie_apart = all(stride == 1 or stride % unit == 0 for stride in strides)
    return value if 1 in strides[-2:] and rows_lie_apart else build.contiguous(value)


RULES: dict[str, Rule] = {**table("_grouped_mm.default", _grouped_mm)}
