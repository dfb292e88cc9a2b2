"""Context-parallel strategies of fused attention: queries or keys sharded along their length.

These strategies come besides those that shard batch or heads (``table``).

- Queries sharded, keys replicated: with a causal mask, a rank attends to the keys before its block
  without a mask and to the keys of its block with one, and merges both results.
- Keys sharded, queries replicated, as in decoding with a long key/value cache: each rank attends to
  its own keys, and two small all-reduces merge the results (flash decoding).
- Both sharded: ring attention, in ``ring``.

Kernels and the merge of partial results are in ``attention_blocks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import prod
from typing import NamedTuple

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules import ring
from lazygt.passes.sharding.rules.attention_blocks import (
    HEADS,
    LENGTH,
    alignment,
    has_dropout,
    mask_hidden_queries,
    mask_of,
    merge,
    merge_over_ranks,
    no_key_result,
    results_of,
    run_attention,
    run_backward,
    schedule,
)
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Collective,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    pad,
    zeros_when_empty,
)

#: Keys and values of at most this many bytes may be replicated on every rank.
_REPLICABLE_BYTES = 256 << 10
#: Operands of a backward that are sharded like the queries.
_QUERY_SHARDED = ("grad_out", "grad_out_", "out", "logsumexp")


class _KeyRange(NamedTuple):
    """Range ``[first, last)`` of the keys that a rank's queries attend to."""

    first: int
    last: int
    causal: bool  # the n-th query attends to keys 0..n of the range; else to all of them


def with_length_strategies(rules: Mapping[str, Rule], backward: bool = False) -> Mapping[str, Rule]:
    """Extend attention rules by the strategies with queries or keys sharded along the length."""
    return {op: partial(_with_length_strategies, rule, backward) for op, rule in rules.items()}


def _with_length_strategies(rule: Rule, backward: bool, call: Call) -> Sequence[Strategy]:
    """Return the strategies of a rule, and those along the length."""
    batch_or_heads = rule(call)
    if has_dropout(call):
        return batch_or_heads
    ring_strategies = _ring_strategies(call, backward)
    strategies = [*batch_or_heads, *_query_sharded(call, backward)]
    if ring_strategies or not _may_beat_head_sharding(call):
        strategies = [_require_replicated_keys(call, strategy) for strategy in strategies]
    return [*strategies, *_key_sharded(call, backward), *ring_strategies]


def _require_replicated_keys(call: Call, strategy: Strategy) -> Strategy:
    """Require already replicated keys if the strategy shards the queries.

    Propagation then gathers no keys for this strategy.
    """
    names = [name for name, arg in call.args.items() if type(arg) is Ref]
    placement_by_name = dict(zip(names, strategy.inputs, strict=True))
    if placement_by_name["query"] != S(LENGTH) or placement_by_name["key"] != R:
        return strategy
    return replace(strategy, preplaced=tuple(map(names.index, ("key", "value"))))


def _may_beat_head_sharding(call: Call) -> bool:
    """Return whether sharded queries may be cheaper than sharded heads.

    True if the heads do not divide evenly among the ranks, or if an all-gather of the keys sends
    less than an all-to-all from length to heads.
    """
    query, key, value = (call.meta(name) for name in ("query", "key", "value"))
    if any(meta.shape[HEADS] % call.axis_size for meta in (query, key)):
        return True
    keys = key.nbytes + value.nbytes
    return call.axis_size * keys < 2 * query.nbytes + keys


# -- queries sharded, keys replicated, causal mask -------------------------------------------------


def _query_sharded(call: Call, backward: bool) -> list[Strategy]:
    """Return the strategy with sharded queries and replicated keys, for a causal mask."""
    queries, keys = call.shape("query")[LENGTH], call.shape("key")[LENGTH]
    if not (call["is_causal"] and _can_shard_queries(call)):
        return []
    lower = (
        partial(_lower_backward, queries, keys)
        if backward
        else partial(_lower_forward, queries, keys)
    )
    outputs = _result_placements(call, backward, P)
    strategy = call.strategy(outputs, **_query_placements(call)).by(lower)
    if _exceed_replicable(call) and queries == keys:
        share = schedule(queries, keys, call.axis_size, causal=True, balanced=False).share
        strategy = replace(strategy, share=share)
    return [zeros_when_empty(call, strategy)]


def _can_shard_queries(call: Call) -> bool:
    """Return whether the queries may be sharded along their length.

    The blocks must fit the kernel's alignment of the log-sum-exps, and there must be no mask.
    """
    queries, aligned = call.shape("query")[LENGTH], alignment(call.node.op)
    fits = queries > 1 and (aligned == 1 or not queries % (aligned * call.axis_size))
    return fits and mask_of(call.args) is None and _may_beat_head_sharding(call)


def _exceed_replicable(call: Call) -> bool:
    """Return whether keys and values are too large to be replicated on each rank."""
    return call.meta("key").nbytes + call.meta("value").nbytes > _REPLICABLE_BYTES


def _query_placements(call: Call) -> dict[str, Placement]:
    """Return the placements of the operands that are sharded like the queries."""
    return {name: S(LENGTH) for name in ("query", *_QUERY_SHARDED) if call.has(name)}


def _result_placements(call: Call, backward: bool, key_gradients: Placement) -> list[Placement]:
    """Return the placements of the results if the queries are sharded.

    Args:
        key_gradients: the placement of the gradients of keys and values.
    """
    results: list[Placement] = [S(LENGTH), key_gradients, key_gradients]
    if not backward:  # the log-sum-exps are empty unless requested
        results = [S(LENGTH), S(LENGTH) if call.result(1).numel else R]
    return [*results, *[R] * len(call.node.results)][: len(call.node.results)]


def _key_ranges(build: Builder, queries: int, keys: int) -> list[_KeyRange]:
    """Return the key ranges that this rank's block of queries attends to.

    These are the keys before the block (no mask) and the keys of the block (causal).
    """
    start, stop = (min(bound, keys) for bound in build.bounds(queries))
    ranges = _KeyRange(0, start, causal=False), _KeyRange(start, stop, causal=True)
    return [key_range for key_range in ranges if key_range.first < key_range.last]


def _sliced_keys(
    build: Builder, node: Node, operands: Sequence[Ref], key_range: _KeyRange
) -> dict[str, Ref]:
    """Slice the keys and values of a range."""
    args = build.bind(node, operands)
    count = key_range.last - key_range.first
    return {
        name: build.slice(args[name], LENGTH, key_range.first, count) for name in ("key", "value")
    }


def _lower_forward(
    queries: int, keys: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run a forward with sharded queries: one kernel per key range, merged."""
    results = []
    for key_range in _key_ranges(build, queries, keys):
        sliced = _sliced_keys(build, node, operands, key_range)
        results.append(run_attention(build, node, operands, key_range.causal, **sliced))
    partial_result = reduce(
        lambda a, b: merge(build, a, b), [partial_result for partial_result, _ in results]
    )
    return results_of(build, node, partial_result, results[0][1])


def _lower_backward(
    queries: int, keys: int, build: Builder, node: Node, operands: Sequence[Ref]
) -> Values:
    """Run a backward with sharded queries.

    Each key range gives the gradients of its keys and values, and a summand of the gradient of the
    queries.
    """
    query_gradients: list[Ref] = []
    key_value_gradients: tuple[list[Ref], list[Ref]] = ([], [])
    for key_range in _key_ranges(build, queries, keys):
        sliced = _sliced_keys(build, node, operands, key_range)
        query, *key_value = run_backward(build, node, operands, key_range.causal, **sliced)[:3]
        assert query is not None
        query_gradients.append(query)
        for collected, gradient in zip(key_value_gradients, key_value, strict=True):
            assert gradient is not None
            collected.append(gradient)
    last = _key_ranges(build, queries, keys)[-1].last
    return (
        reduce(lambda a, b: build.op("aten.add.Tensor", a, b), query_gradients),
        *[_padded_gradient(build, collected, keys - last) for collected in key_value_gradients],
        *[None] * (len(node.results) - 3),
    )


def _padded_gradient(build: Builder, gradients: Sequence[Ref], unseen: int) -> Ref:
    """Join the gradients of the attended keys; append zeros for the ``unseen`` keys."""
    joined = build.joined(gradients, LENGTH)
    return pad(build, joined, LENGTH, 0, unseen) if unseen else joined


# -- queries and keys sharded: ring attention ------------------------------------------------------


def _ring_strategies(call: Call, backward: bool) -> list[Strategy]:
    """Return the ring attention strategies, with queries and keys sharded.

    With a causal mask there are two: one balances the work of the ranks, one sends the least.
    """
    queries, keys = (call.shape(name)[LENGTH] for name in ("query", "key"))
    causal = call["is_causal"]
    if min(queries, keys) < 2 or (causal and queries != keys):
        return []
    if not (_can_shard_queries(call) and _exceed_replicable(call)):
        return []
    blocks = {**_query_placements(call), "key": S(LENGTH), "value": S(LENGTH)}
    strategy = call.strategy(_result_placements(call, backward, S(LENGTH)), **blocks)
    program = ring.backward if backward else ring.forward
    strategies = []
    for balanced in (True, False) if causal else (False,):
        plan = schedule(queries, keys, call.axis_size, causal, balanced)
        lowered = strategy.by(partial(program, plan), ring.comm(call, plan, backward))
        strategies.append(replace(lowered, share=plan.share, overlapped_turns=len(plan.turns)))
    return strategies


# -- keys sharded, queries replicated: flash decoding ----------------------------------------------


def _key_sharded(call: Call, backward: bool) -> list[Strategy]:
    """Return the strategy with sharded keys and replicated queries, without a causal mask."""
    keys, mask = call.shape("key")[LENGTH], mask_of(call.args)
    if call["is_causal"] or keys < 2 or (mask is not None and call.shape(mask)[-1] != keys):
        return []
    blocks: dict[str, Placement] = {"key": S(LENGTH), "value": S(LENGTH)}
    if mask is not None:
        blocks[mask] = S(len(call.shape(mask)) - 1)
    if backward:
        mask_placement = blocks.get(mask or "", R)
        outputs = (P, S(LENGTH), S(LENGTH), mask_placement)[: len(call.node.results)]
        strategy = call.strategy(outputs, **blocks).by(run_backward)
        return [zeros_when_empty(call, strategy)]
    logsumexp, num_queries = call.result(1), prod(call.shape("query")[: LENGTH + 1])
    nbytes = num_queries * logsumexp.dtype.itemsize
    comm = (
        Collective("all_reduce", nbytes, "max"),
        Collective("all_reduce", nbytes * (call.shape("value")[3] + 1)),
    )
    return [call.strategy(R, **blocks).by(_lower_key_sharded, comm)]


def _lower_key_sharded(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Attend to the own block of keys, then merge the results over the ranks."""
    args = build.bind(node, operands)
    mask, counts = mask_of(args), None
    other_results: Values = ()
    if build.shape(args["key"])[LENGTH]:
        partial_result, other_results = run_attention(build, node, operands)
        if mask is not None:
            partial_result, counts = mask_hidden_queries(build, partial_result, args[mask])
    else:
        partial_result = no_key_result(build, node, args["query"], args["value"])
    partial_result = merge_over_ranks(build, partial_result, mask is not None, counts)
    return results_of(build, node, partial_result, other_results)
