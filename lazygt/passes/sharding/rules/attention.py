"""Causal attention of queries in blocks: a rank takes the keys before its block, and those of its
block, apart.

What comes of both is put together by their sums of exponentials: that is exact but for rounding.
Later blocks see more keys, so the last rank has the most to do; where ranks can have as many heads
each, and exchange less for it, this is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.rules.base import (
    Call,
    Lowering,
    Metas,
    P,
    Rule,
    S,
    Strategy,
    Values,
    zeros_when_empty,
)

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

_HEADS, _LENGTH = 1, 2  #: dims of queries, keys and values


class _Keys(NamedTuple):
    """Keys that a rank's queries see: those from ``first`` to before ``last``.

    Attributes:
        causal: the n-th query sees n of them, and itself; else all see all.
    """

    first: int
    last: int
    causal: bool


def causal(rules: Mapping[str, Rule], backward: bool = False) -> Mapping[str, Rule]:
    """Rules with their strategies, and for causal masks those of queries in blocks."""
    return {op: _with_blocks(rule, backward) for op, rule in rules.items()}


def _with_blocks(rule: Rule, backward: bool) -> Rule:
    lowered, outputs = (_backward, (S(_LENGTH), P, P)) if backward else (_forward, S(_LENGTH))
    blocks = ["query", *(["grad_out", "out", "logsumexp"] if backward else [])]

    def strategies(node: Node, metas: Metas, parts: int) -> Sequence[Strategy]:
        call = Call(node, metas, parts)
        usual = list(rule(node, metas, parts))
        plain = call["dropout_p"] == 0 and not call.has("attn_mask")
        if not (call["is_causal"] and plain and _is_worth_it(call)):
            return usual
        strategy = call.strategy(outputs, **dict.fromkeys(blocks, S(_LENGTH)))
        sizes = call.shape("query")[_LENGTH], call.shape("key")[_LENGTH]
        return [*usual, zeros_when_empty(call, strategy.by(lowered(*sizes)))]

    return strategies


def _is_worth_it(call: Call) -> bool:
    """Whether ranks can't have as many heads each, or send less for all keys than for those."""
    query, key, value = (call.meta(name) for name in ("query", "key", "value"))
    if query.shape[_LENGTH] < 2:
        return False
    if any(meta.shape[_HEADS] % call.parts for meta in (query, key)):
        return True
    keys = key.nbytes + value.nbytes
    return call.parts * keys < 2 * query.nbytes + keys


def _seen(build: Builder, queries: int, keys: int) -> list[_Keys]:
    """The keys that this rank's block of queries sees."""
    start, stop = (min(bound, keys) for bound in build.bounds(queries))
    seen = _Keys(0, start, causal=False), _Keys(start, stop, causal=True)
    return [some for some in seen if some.first < some.last]


def _some(build: Builder, operands: Sequence[Ref], key: int, some: _Keys) -> list[Ref]:
    """The operands with some of the keys and of their values, which stand at ``key`` and after."""
    cut = [
        build.op("aten.slice.Tensor", operands[key + at], _LENGTH, some.first, some.last)
        for at in range(2)
    ]
    return [*operands[:key], *cut, *operands[key + 2 :]]


def _forward(queries: int, keys: int) -> Lowering:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        results = [
            _attended(build, node, _some(build, operands, 1, some), some)
            for some in _seen(build, queries, keys)
        ]
        return reduce(lambda one, other: _merged(build, one, other), results)

    return lower


def _attended(build: Builder, node: Node, operands: Sequence[Ref], some: _Keys) -> tuple[Ref, ...]:
    results = build.rerun(node, operands, is_causal=some.causal)
    return tuple([result for result in results if result is not None])


def _merged(build: Builder, first: tuple[Ref, ...], second: tuple[Ref, ...]) -> tuple[Ref, ...]:
    """Two results over different keys, each with the logarithm of its sum, as one over all."""
    dtype = build.meta(first[0]).dtype
    sums = build.op("aten.logaddexp.default", first[1], second[1])
    weighted = []
    for result, its_sums in (first, second):
        weight = build.op("aten.exp.default", build.op("aten.sub.Tensor", its_sums, sums))
        weight = build.op("aten.unsqueeze.default", weight, -1)
        weighted.append(build.op("aten.mul.Tensor", result, weight))
    merged = build.op("aten.add.Tensor", *weighted)
    if build.meta(merged).dtype != dtype:
        merged = build.op("aten._to_copy.default", merged, dtype=dtype)
    return merged, sums


def _backward(queries: int, keys: int) -> Lowering:
    """With the whole result and its sums, some keys have their gradients, and their part of that
    of the queries."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        of_query: list[Ref] = []
        of_keys: tuple[list[Ref], list[Ref]] = ([], [])
        for some in _seen(build, queries, keys):
            chosen = _some(build, operands, 2, some)
            query, *others = _attended(build, node, chosen, some)
            of_query.append(query)
            for gradients, gradient in zip(of_keys, others, strict=True):
                gradients.append(gradient)
        last = _seen(build, queries, keys)[-1].last
        return (
            reduce(lambda a, b: build.op("aten.add.Tensor", a, b), of_query),
            *[_among_zeros(build, gradients, keys - last) for gradients in of_keys],
        )

    return lower


def _among_zeros(build: Builder, gradients: Sequence[Ref], unseen: int) -> Ref:
    """The gradients of the keys that were seen, and of those after them."""
    whole = (
        build.op("aten.cat.default", tuple(gradients), _LENGTH) if gradients[1:] else gradients[0]
    )
    if not unseen:
        return whole
    padded: Ref = build.op("aten.constant_pad_nd.default", whole, (0, 0, 0, unseen), 0)
    return padded
