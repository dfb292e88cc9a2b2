"""Embedding lookups, embedding bags, and their gradients.

Lookups are sharded by tokens, by features, or by table rows (vocabulary parallel): each rank looks
up the rows of its block, and the result is partial. Bags are sharded by features or by table rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import Placement, Shard
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.factors import strategies_by
from lazygt.passes.sharding.rules.indexing import (
    put_rows,
    read_owned,
    take_strategies,
    to_local_indices,
    with_row_exchange,
)
from lazygt.passes.sharding.rules.strategy import (
    Call,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    lower_strategy,
    shardable_dims,
    table,
    zeros,
)

# -- grouped matrix products (``_grouped_mm``), as in mixtures of experts --------------------------
# The groups are consecutive along one dim, with their ends in ``offs``. If that dim is sharded,
# the ends are shifted and clamped to a rank's block. The kernel requires rows of a multiple of 16
# bytes, so shorter local rows are padded with zeros.

#: Numbers of dims of both operands -> rule text, and the dim of each operand along the groups.
_RULE_BY_RANKS = {
    (2, 3): ("* !m k, * !e k n, !e -> !m n", (0, None)),
    (2, 2): ("* m !k, * !k n, !e -> !e m n", (1, 0)),
    (3, 2): ("* !e m k, * k !n, !e -> m !n", (None, 1)),
    (3, 3): ("* e m k, * e k n -> e m n", (None, None)),
}
_ALIGNMENT_BYTES = 16


def _grouped_mm(call: Call) -> Sequence[Strategy]:
    """Return the strategies of ``_grouped_mm``."""
    ranks = call.rank, len(call.shape("mat2"))
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

    return strategy.wrapped(program)


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


# -- embedding lookups, embedding bags, and their gradients ----------------------------------------


def _embedding(call: Call) -> Sequence[Strategy]:
    """Return the strategies of embedding: by tokens, features, table rows, or row exchange."""
    count, features = call.shape("weight")
    strategies = [
        call.strategy(S(dim), indices=S(dim)) for dim in shardable_dims(call.shape("indices"))
    ]
    if features > 1:
        strategies.append(call.strategy(S(len(call.shape("indices"))), weight=S(1)))
    if count > 1:
        lower = read_owned(
            *(0, count),
            lambda build, table, index: build.op("aten.embedding.default", table, index),
            lambda build, mask: build.op("aten.unsqueeze.default", mask, -1),
        )
        strategies.append(call.strategy(P, weight=S(0)).by(lower))
    strategies += take_strategies(call, "weight", "indices")
    return [*strategies, call.strategy(P, weight=P)]


def _embedding_backward(call: Call) -> Sequence[Strategy]:
    """Return the strategies of an embedding's backward.

    Scaling by token frequency needs the full batch, so tokens and rows are not sharded then.
    """
    count, features = call["num_weights"], call.shape("grad_output")[-1]
    tokens = shardable_dims(call.shape("indices")) if not call["scale_grad_by_freq"] else []
    strategies = [call.strategy(P, grad_output=S(dim), indices=S(dim)) for dim in tokens]
    if features > 1:
        strategies.append(call.strategy(S(1), grad_output=S(len(call.shape("indices")))))
    if count > 1 and not call["scale_grad_by_freq"]:
        strategies.append(call.strategy(S(0)).by(partial(_lower_row_gradient, count)))
        is_sparse = 8 * prod(call.shape("indices")) <= count  # otherwise many rows have a gradient
        strategies += [_send_gradients(call, dim) for dim in tokens] if is_sparse else []
    return [*strategies, call.strategy(P, grad_output=P)]


def _lower_row_gradient(count: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Compute the gradient of this rank's table rows.

    Tokens of other ranks are accumulated into an extra last row, which is dropped.

    Args:
        count: number of rows of the table.
    """
    args = build.bind(node, operands)
    padding, block = args["padding_idx"], build.block(count)
    local_indices, outside = to_local_indices(build, args["indices"], count)
    padded = build.op("aten.eq.Scalar", args["indices"], padding)
    outside = build.op("aten.logical_or.default", outside, padded)
    local_indices = build.op("aten.masked_fill.Scalar", local_indices, outside, block)
    changes = {"indices": local_indices, "num_weights": block + 1, "padding_idx": -1}
    (gradient,) = build.rerun(node, operands, **changes)
    return (build.op("aten.slice.Tensor", gradient, 0, 0, block),)


def _send_gradients(call: Call, dim: int) -> Strategy:
    """Return the strategy that sends each token's gradient to the owner of its table row.

    Args:
        dim: sharded dim of the indices.
    """
    table = call.result()

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        args = build.bind(node, operands)
        gradient, indices = args["grad_output"], args["indices"]
        padded = build.op("aten.eq.Scalar", indices, args["padding_idx"])
        padded = build.op("aten.unsqueeze.default", padded, -1)
        gradient = build.op("aten.masked_fill.Scalar", gradient, padded, 0)
        zeros = build.full((build.block(table.shape[0]), table.shape[1]), 0, like=gradient)
        return (put_rows(build, zeros, table, [indices], gradient, added=True),)

    return with_row_exchange(
        call.strategy(S(0), grad_output=S(dim), indices=S(dim)).by(lower),
        *(call, "put_rows", "indices", table, call.shape("indices"), dim),
    )


#: torch's modes of embedding bags.
_SUM, _MEAN, _MAX = range(3)


def _bag(call: Call) -> Sequence[Strategy]:
    """Return the strategies of embedding bags: sharded by features or by table rows.

    The results after the first depend on the replicated indices alone.
    """
    rest: list[Placement] = [R] * (len(call.node.results) - 1)
    if call["mode"] == _MAX:
        return ()
    strategies = [call.strategy([P, *rest], weight=P)]
    count, features = call.shape("weight")
    if features > 1:
        strategies.append(call.strategy([S(1), *rest], weight=S(1)))
    if count > 1 and call["padding_idx"] < 0:
        strategies.append(call.strategy([P, *rest], weight=S(0)).by(partial(_lower_bags, count)))
    return strategies


def _lower_bags(count: int, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Compute bag sums (or means) over this rank's table rows.

    Rows of other ranks are replaced by zero rows. A weight of 0 would not do, since 0 times an
    infinite element of the substituted row is NaN.
    """
    args = build.bind(node, operands)
    table, indices, sample_weights = args["weight"], args["indices"], args["per_sample_weights"]
    local_indices, outside = to_local_indices(build, indices, count)
    if not build.block(count):
        table = build.full((1, build.shape(table)[1]), 0, like=table)
    if sample_weights is not None:
        sample_weights = build.op("aten.masked_fill.Scalar", sample_weights, outside, 0)
    rows = build.op("aten.embedding.default", table, local_indices)
    outside = build.op("aten.unsqueeze.default", outside, -1)
    rows = build.op("aten.masked_fill.Scalar", rows, outside, 0)
    row_numbers = build.op("aten.arange.default", build.shape(indices)[0],
                      dtype=build.meta(indices).dtype, device=DEVICE)  # fmt: skip
    bag_args = {**args, "weight": rows, "indices": row_numbers}
    sums, *other_results = _run_bags(
        build, node, {**bag_args, "mode": _SUM, "per_sample_weights": sample_weights}
    )
    if args["mode"] == _MEAN:
        first_column = build.slice(rows, 1, 0, 1)
        _, *other_results = _run_bags(build, node, {**bag_args, "weight": first_column})
        sizes = build.op("aten.clamp_min.default", other_results[1], 1)
        sums = build.op("aten.div.Tensor", sums, build.op("aten.unsqueeze.default", sizes, -1))
    return (sums, *other_results)


def _run_bags(build: Builder, node: Node, args: Mapping[str, Arg]) -> Sequence[Ref]:
    """Run the node's op on other arguments."""
    results: Sequence[Ref] = build.op(node.op, *args.values())
    return results


def _bag_backward(call: Call) -> Sequence[Strategy]:
    """Return the strategies of the backward of bags: by features or by table rows."""
    if call["mode"] == _MAX or call.args.get("sparse"):
        return ()
    strategies = [call.strategy(P, grad=P)]
    if call.shape("grad")[1] > 1:
        strategies.append(call.strategy(S(1), grad=S(1)))
    if call["num_weights"] > 1:
        strategies.append(call.strategy(S(0)).by(partial(_lower_row_gradient, call["num_weights"])))
    return strategies


RULES: dict[str, Rule] = {
    **table("embedding.default", _embedding),
    **table("embedding_dense_backward.default", _embedding_backward),
    **table("_embedding_bag.default _embedding_bag_forward_only.default", _bag),
    **table("_embedding_bag_backward.default _embedding_bag_dense_backward.default", _bag_backward),
    **table("_grouped_mm.default", _grouped_mm),
}
