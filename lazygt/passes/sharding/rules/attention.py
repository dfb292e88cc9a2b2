"""Fused attention of sequences in blocks, besides its strategies by samples and heads.

Queries in blocks, keys whole: of a causal mask a rank takes the keys before its block, and those of
its block, apart. Keys in blocks, queries whole, as for a token that reads a long cache: each rank
attends with its own keys, and two small reductions put the results together. Both in blocks: keys
go round (``ring``). See ``attending``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Node, Ref
from lazygt.graph.placement import Placement
from lazygt.passes.sharding.rules import ring
from lazygt.passes.sharding.rules.attention_blocks import (
    HEADS,
    LENGTH,
    alignment,
    attended,
    gradients,
    hidden_apart,
    is_plain,
    mask_of,
    merged,
    merged_over_ranks,
    of_no_keys,
    results_of,
    schedule,
)
from lazygt.passes.sharding.rules.strategy import (
    Call,
    Collective,
    Lowering,
    Metas,
    P,
    R,
    Rule,
    S,
    Strategy,
    Values,
    zeros_when_empty,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

#: Bytes of keys and values that any rank may have all of.
_FEW = 256 << 10
#: The other operands of a backward, in blocks as queries are.
_OF_QUERIES = ("grad_out", "grad_out_", "out", "logsumexp")


class _Keys(NamedTuple):
    """Keys that a rank's queries see: those from ``first`` to before ``last``.

    Attributes:
        causal: the n-th query sees n of them, and itself; else all see all.
    """

    first: int
    last: int
    causal: bool


def along_lengths(rules: Mapping[str, Rule], backward: bool = False) -> Mapping[str, Rule]:
    """Return rules with their strategies, and those of queries, or keys, in blocks."""
    return {op: _with_blocks(rule, backward) for op, rule in rules.items()}


def _with_blocks(rule: Rule, backward: bool) -> Rule:
    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        usual = list(rule(node, metas, parts))
        if not is_plain(call):
            return usual
        rounds = _by_both(call, backward)
        whole = [*usual, *_by_queries(call, backward)]
        if rounds or not _is_worth_it(call):
            whole = [_for_whole_keys(call, strategy) for strategy in whole]
        return [*whole, *_by_keys(call, backward), *rounds]

    return strategies


def _for_whole_keys(call: Call, strategy: Strategy) -> Strategy:
    """Return the strategy, if it has queries in blocks, for keys that come whole.

    The keys are not gathered for it.
    """
    names = [name for name, arg in call.args.items() if type(arg) is Ref]
    of = dict(zip(names, strategy.inputs, strict=True))
    if of["query"] != S(LENGTH) or of["key"] != R:
        return strategy
    return replace(strategy, given=tuple(map(names.index, ("key", "value"))))


def _is_worth_it(call: Call) -> bool:
    """Return whether blocks of queries may be better than a split by heads.

    They may where heads don't divide among the ranks, or where to gather all keys sends less than
    to exchange for heads.
    """
    query, key, value = (call.meta(name) for name in ("query", "key", "value"))
    if any(meta.shape[HEADS] % call.parts for meta in (query, key)):
        return True
    keys = key.nbytes + value.nbytes
    return call.parts * keys < 2 * query.nbytes + keys


# -- queries in blocks, of a causal mask -----------------------------------------------------------


def _by_queries(call: Call, backward: bool) -> list[Strategy]:
    queries, keys = call.shape("query")[LENGTH], call.shape("key")[LENGTH]
    if not (call["is_causal"] and _divides(call)):
        return []
    lower = _backward(queries, keys) if backward else _forward(queries, keys)
    strategy = call.strategy(_results(call, backward, P), **_of_queries(call)).by(lower)
    if _are_many(call) and queries == keys:
        share = schedule(queries, keys, call.parts, causal=True, balanced=False).share
        strategy = replace(strategy, share=share)
    return [zeros_when_empty(call, strategy)]


def _divides(call: Call) -> bool:
    """Return whether queries have blocks, each with sums of its own, and no better way."""
    queries, aligned = call.shape("query")[LENGTH], alignment(call.node.op)
    fits = queries > 1 and (aligned == 1 or not queries % (aligned * call.parts))
    return fits and mask_of(call.args) is None and _is_worth_it(call)


def _are_many(call: Call) -> bool:
    """Return whether keys and values are too large to be put together on each rank."""
    return call.meta("key").nbytes + call.meta("value").nbytes > _FEW


def _of_queries(call: Call) -> dict[str, Placement]:
    """Return the placements of the operands that lie as the queries, in blocks."""
    return {name: S(LENGTH) for name in ("query", *_OF_QUERIES) if call.has(name)}


def _results(call: Call, backward: bool, of_keys: Placement) -> list[Placement]:
    """Return the placements of results of queries in blocks.

    Args:
        of_keys: the placement of the gradients of keys and values.
    """
    results: list[Placement] = [S(LENGTH), of_keys, of_keys]
    if not backward:  # with the sums, if they were asked for
        results = [S(LENGTH), S(LENGTH) if call.result(1).numel else R]
    return [*results, *[R] * len(call.node.results)][: len(call.node.results)]


def _seen(build: Builder, queries: int, keys: int) -> list[_Keys]:
    """Return the keys that this rank's block of queries sees."""
    start, stop = (min(bound, keys) for bound in build.bounds(queries))
    seen = _Keys(0, start, causal=False), _Keys(start, stop, causal=True)
    return [some for some in seen if some.first < some.last]


def _some(build: Builder, node: Node, operands: Sequence[Ref], some: _Keys) -> dict[str, Ref]:
    """Return some of the keys and of their values."""
    args = build.bind(node, operands)
    count = some.last - some.first
    return {name: build.slice(args[name], LENGTH, some.first, count) for name in ("key", "value")}


def _forward(queries: int, keys: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        every = [
            attended(build, node, operands, some.causal, **_some(build, node, operands, some))
            for some in _seen(build, queries, keys)
        ]
        mixed = reduce(lambda a, b: merged(build, a, b), [mixed for mixed, _ in every])
        return results_of(build, node, mixed, every[0][1])

    return lower


def _backward(queries: int, keys: int) -> Lowering:
    """Return the lowering of a backward, with the whole result and its sums.

    Each part of the keys gives their gradients, and its part of that of the queries.
    """

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        of_query: list[Ref] = []
        of_keys: tuple[list[Ref], list[Ref]] = ([], [])
        for some in _seen(build, queries, keys):
            chosen = _some(build, node, operands, some)
            query, *others = gradients(build, node, operands, some.causal, **chosen)[:3]
            assert query is not None
            of_query.append(query)
            for known, gradient in zip(of_keys, others, strict=True):
                assert gradient is not None
                known.append(gradient)
        last = _seen(build, queries, keys)[-1].last
        return (
            reduce(lambda a, b: build.op("aten.add.Tensor", a, b), of_query),
            *[_among_zeros(build, known, keys - last) for known in of_keys],
            *[None] * (len(node.results) - 3),
        )

    return lower


def _among_zeros(build: Builder, gradients: Sequence[Ref], unseen: int) -> Ref:
    """Return the gradients of the keys that were seen, and of those after them."""
    whole = build.joined(gradients, LENGTH)
    if not unseen:
        return whole
    padded: Ref = build.op("aten.constant_pad_nd.default", whole, (0, 0, 0, unseen), 0)
    return padded


# -- queries and keys in blocks --------------------------------------------------------------------


def _by_both(call: Call, backward: bool) -> list[Strategy]:
    """Return the strategies in which keys go round.

    Of a causal mask there are two: ranks have as much to do each, or send the least.
    """
    queries, keys, causal = (
        call.shape("query")[LENGTH],
        call.shape("key")[LENGTH],
        call["is_causal"],
    )
    if min(queries, keys) < 2 or (causal and queries != keys):
        return []
    if not (_divides(call) and _are_many(call)):
        return []
    blocks = {**_of_queries(call), "key": S(LENGTH), "value": S(LENGTH)}
    strategy = call.strategy(_results(call, backward, S(LENGTH)), **blocks)
    program = ring.backward if backward else ring.forward
    strategies = []
    for balanced in (True, False) if causal else (False,):
        plan = schedule(queries, keys, call.parts, causal, balanced)
        lowered = strategy.by(program(plan), ring.comm(call, plan, backward))
        strategies.append(replace(lowered, share=plan.share, beside=len(plan.turns)))
    return strategies


# -- keys in blocks --------------------------------------------------------------------------------


def _by_keys(call: Call, backward: bool) -> list[Strategy]:
    keys, mask = call.shape("key")[LENGTH], mask_of(call.args)
    if call["is_causal"] or keys < 2 or (mask is not None and call.shape(mask)[-1] != keys):
        return []
    blocks: dict[str, Placement] = {"key": S(LENGTH), "value": S(LENGTH)}
    if mask is not None:
        blocks[mask] = S(len(call.shape(mask)) - 1)
    if backward:
        of_mask = blocks.get(mask or "", R)
        outputs = (P, S(LENGTH), S(LENGTH), of_mask)[: len(call.node.results)]
        strategy = call.strategy(outputs, **blocks).by(gradients)
        return [zeros_when_empty(call, strategy)]
    sums, numbers = call.result(1), prod(call.shape("query")[: LENGTH + 1])
    nbytes = numbers * sums.dtype.itemsize
    comm = (
        Collective("all_reduce", nbytes, "max"),
        Collective("all_reduce", nbytes * (call.shape("value")[3] + 1)),
    )
    return [call.strategy(R, **blocks).by(_over_keys, comm)]


def _over_keys(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    args = build.bind(node, operands)
    mask, counts = mask_of(args), None
    rest: Values = ()
    if build.shape(args["key"])[LENGTH]:
        mixed, rest = attended(build, node, operands)
        if mask is not None:
            mixed, counts = hidden_apart(build, mixed, args[mask])
    else:
        mixed = of_no_keys(build, node, args["query"], args["value"])
    mixed = merged_over_ranks(build, mixed, mask is not None, counts)
    return results_of(build, node, mixed, rest)
