"""Attention on blocks of queries and keys, and the merge of the partial results.

An attention kernel returns for each query the softmax-weighted mean of the values and the
log-sum-exp of the scores. Two such results over disjoint keys merge into the result over all keys
(online softmax, as in flash attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import block_size
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.strategy import Call, R, Values, zeros

# -- schedule of a ring attention: the query and key blocks of each rank in each turn --------------

#: (source rank, target rank, number of rows) of the sends of one exchange.
Sent = tuple[tuple[int, int, int], ...]


class Task(NamedTuple):
    """One rank's work in a turn: queries of one rank attend to keys of one rank."""

    queries: int  # queries, keys: the ranks that own the query block and the key block
    keys: int
    first: int  # first, last: the range ``[first, last)`` within the query block
    last: int


@dataclass(frozen=True)
class Turn:
    """Work of all ranks between two exchanges."""

    tasks: tuple[Task | None, ...]  # the task of each rank; None: the rank is idle
    keys: Sent  # the sends of key blocks before the turn
    queries: Sent  # the sends of queries before the turn

    def returned_keys(self, sizes: Sequence[int]) -> Sent:
        """Return the sends of results for keys to the owners of the keys."""
        return tuple(sorted(
            (rank, task.keys, sizes[task.keys])
            for rank, task in self._nonempty_tasks(sizes) if task.keys != rank
        ))  # fmt: skip

    def returned_queries(self, sizes: Sequence[int]) -> Sent:
        """Return the sends of results for queries to the owners of the queries."""
        return tuple(sorted(
            (rank, task.queries, task.last - task.first)
            for rank, task in self._nonempty_tasks(sizes) if task.queries != rank
        ))  # fmt: skip

    def _nonempty_tasks(self, sizes: Sequence[int]) -> Iterator[tuple[int, Task]]:
        """Yield (rank, task) of the nonempty tasks; ``sizes`` are the keys per rank."""
        for rank, task in enumerate(self.tasks):
            if task is not None and task.first < task.last and sizes[task.keys]:
                yield rank, task


@dataclass(frozen=True)
class RingSchedule:
    """Schedule of a ring attention.

    In turn 0 each rank's queries attend to its own keys; ``turns`` are the later ones.
    """

    queries: tuple[int, ...]  # queries, keys: number of queries and keys of each rank
    keys: tuple[int, ...]
    causal: bool
    turns: tuple[Turn, ...]

    @property
    def share(self) -> float:
        """Fraction of the total work on the busiest rank."""
        diagonal = 0.5 if self.causal else 1.0
        work = [q * k * diagonal for q, k in zip(self.queries, self.keys, strict=True)]
        for turn in self.turns:
            for rank, task in enumerate(turn.tasks):
                if task is not None:
                    work[rank] += (task.last - task.first) * self.keys[task.keys]
        return max(work) / (sum(self.queries) * sum(self.keys) * diagonal)


@lru_cache(maxsize=1024)
def schedule(queries: int, keys: int, axis_size: int, causal: bool, balanced: bool) -> RingSchedule:
    """Build the schedule of a ring attention over ``axis_size`` ranks.

    Args:
        causal: causal mask; then ``queries == keys``.
        balanced: ranks with little causal work compute for ranks with much (DISTFLASHATTN).
    """
    queries_of_rank, keys_of_rank = (
        tuple([block_size(size, axis_size, rank) for rank in range(axis_size)])
        for size in (queries, keys)
    )
    num_turns = axis_size // 2 if balanced else axis_size - 1
    turns = [
        _turn(number, queries_of_rank, keys_of_rank, causal, balanced)
        for number in range(1, num_turns + 1)
    ]
    return RingSchedule(queries_of_rank, keys_of_rank, causal, tuple(turns))


def _turn(
    number: int, queries: Sequence[int], keys: Sequence[int], causal: bool, balanced: bool
) -> Turn:
    """Build a turn: each rank attends to the keys of the rank ``number`` positions before it.

    With a causal mask those keys are masked for the first ranks. In a balanced schedule these ranks
    compute for the later ranks instead, whose queries are sent to them. In the middle turn of an
    even ring two ranks form a pair, and each computes half of the queries.
    """
    axis_size = len(queries)
    tasks: list[Task | None] = []
    for rank in range(axis_size):
        key_rank = (rank - number) % axis_size
        is_masked = causal and key_rank > rank
        owner = key_rank if is_masked else rank
        half = queries[owner] // 2 if balanced and 2 * number == axis_size else None
        first = half or 0 if is_masked else 0
        last = queries[owner] if is_masked or half is None else half
        task = Task(owner, rank if is_masked else key_rank, first, last)
        tasks.append(None if is_masked and not balanced else task)
    key_sends = [
        ((rank - 1) % axis_size, rank, keys[task.keys])
        for rank, task in enumerate(tasks) if task is not None and task.keys != rank
    ]  # fmt: skip
    # rank 0 receives the queries from their owner; the other ranks, from their predecessor
    query_sends = [
        (rank - 1 if rank else task.queries, rank, task.last - task.first)
        for rank, task in enumerate(tasks) if task is not None and task.queries != rank
    ]  # fmt: skip
    return Turn(tuple(tasks), _nonempty_sends(key_sends), _nonempty_sends(query_sends))


def _nonempty_sends(sends: Sequence[tuple[int, int, int]]) -> Sent:
    """Sort sends; drop those of no rows."""
    return tuple(sorted(send for send in sends if send[2]))


# -- attention kernels on blocks of queries and keys, and the merge of their results ---------------

HEADS, LENGTH = 1, 2  #: dims of queries, keys and values
#: GPU kernels that pad the log-sum-exps to a multiple of this many queries, with infinity.
_ALIGNED = {"efficient": 32}
#: A mask value below this absorbs any float32 score that it is added to.
_SWALLOWS = -1e8


class Mixed(NamedTuple):
    """Attention result of a block of queries over a block of keys."""

    values: Ref  # softmax-weighted mean of the values: [batch, heads, queries, features]
    sums: Ref  # log-sum-exp of the scores: [batch, heads, queries]


def mask_of(args: Mapping[str, Arg]) -> str | None:
    """Return the name of the additive mask argument; None: the call has no mask."""
    return next((name for name in ("attn_mask", "attn_bias") if type(args.get(name)) is Ref), None)


def alignment(op: str) -> int:
    """Return the multiple of queries to which a kernel pads the log-sum-exps."""
    return next((count for name, count in _ALIGNED.items() if name in op), 1)


def run_attention(
    build: Builder, node: Node, operands: Sequence[Ref], causal: bool = False, **replaced: Ref
) -> tuple[Mixed, Values]:
    """Run an attention kernel; return values with log-sum-exps, and its other results.

    Args:
        replaced: operands that replace those of the node, by argument name.
    """
    changes: dict[str, Any] = {**replaced, "is_causal": causal}
    if "compute_log_sumexp" in build.bind(node, operands):
        changes["compute_log_sumexp"] = True
    values, sums, *other_results = build.rerun(node, operands, **changes)
    assert values is not None
    assert sums is not None
    return Mixed(values, unpacked(build, sums, build.shape(values)[LENGTH])), other_results


def unpacked(build: Builder, sums: Ref, queries: int) -> Ref:
    """Convert a kernel's log-sum-exps to [batch, heads, queries]; inverse of ``packed``."""
    if len(build.shape(sums)) > 3:
        sums = build.op("aten.squeeze.dim", sums, -1)
    return build.slice(sums, LENGTH, 0, queries)


def packed(build: Builder, op: str, sums: Ref) -> Ref:
    """Convert log-sum-exps [batch, heads, queries] to the layout of an op's kernel."""
    if "cudnn" in op:
        sums = build.op("aten.unsqueeze.default", sums, -1)
    missing = -build.shape(sums)[LENGTH] % alignment(op)
    if missing:
        sums = build.op("aten.constant_pad_nd.default", sums, (0, missing), float("inf"))
    return sums


def results_of(build: Builder, node: Node, mixed: Mixed, other_results: Values = ()) -> Values:
    """Return the results of the node in its own layout.

    The log-sum-exps are empty if the node does not request them.

    Args:
        other_results: the kernel's results after the log-sum-exps. Empty if this rank ran no
            kernel; the node's results are then zeros.
    """
    logsumexp = node.results[1]
    assert logsumexp is not None
    if not other_results:
        other_results = [
            None if meta is None else zeros(build, meta, R) for meta in node.results[2:]
        ]
    if logsumexp.numel:
        return mixed.values, packed(build, node.op, mixed.sums), *other_results
    empty = build.full((*build.shape(mixed.values)[:LENGTH], 0), 0, like=mixed.sums)
    return mixed.values, empty, *other_results


def no_key_result(build: Builder, node: Node, query: Ref, value: Ref) -> Mixed:
    """Return the attention result over no keys: values 0, log-sum-exp -inf."""
    logsumexp = node.results[1]
    assert logsumexp is not None
    queries, features = build.shape(query)[:3], build.shape(value)[3]
    zero_values = build.full((*queries, features), 0, like=query)
    minus_infinity = build.op("aten.full.default", queries, float("-inf"), dtype=logsumexp.dtype,
                       device=DEVICE)  # fmt: skip
    return Mixed(zero_values, minus_infinity)


def run_backward(
    build: Builder, node: Node, operands: Sequence[Ref], causal: bool = False, **replaced: Ref
) -> Values:
    """Run a backward kernel on blocks, with the ``out`` and log-sum-exps over all keys.

    Args:
        replaced: operands that replace those of the node, by argument name.
    """
    args = {**build.bind(node, operands), **replaced}
    changes: dict[str, Any] = {**replaced, "is_causal": causal}
    for name, operand in (("max_q", "query"), ("max_k", "key")):
        if name in args:
            changes[name] = build.shape(args[operand])[LENGTH]
    return build.rerun(node, operands, **changes)


def merge(build: Builder, first: Mixed, second: Mixed) -> Mixed:
    """Merge the results over two disjoint sets of keys (online softmax)."""
    dtype = build.meta(first.values).dtype
    sums = build.op("aten.logaddexp.default", first.sums, second.sums)
    weighted = []
    for values, values_sums in (first, second):
        weight = build.op("aten.exp.default", build.op("aten.sub.Tensor", values_sums, sums))
        weight = build.op("aten.unsqueeze.default", weight, -1)
        weighted.append(build.op("aten.mul.Tensor", values, weight))
    merged_values = build.op("aten.add.Tensor", *weighted)
    return Mixed(_cast(build, merged_values, dtype), sums)


def merge_over_ranks(
    build: Builder, mixed: Mixed, masked: bool, counts: Ref | None = None
) -> Mixed:
    """Merge the results over each rank's keys by two all-reduces: maximum, then weighted sums.

    Args:
        masked: whether all keys of a query may be masked; the result is then zero.
        counts: see ``mask_hidden_queries``.
    """
    values, sums = mixed
    maximum = build.all_reduce(sums, "max")
    if masked:
        maximum = _replace_equal(build, maximum, float("-inf"), 0)
    weight = build.op("aten.exp.default", build.op("aten.sub.Tensor", sums, maximum))
    if counts is not None:
        weight = build.op("aten.mul.Tensor", weight, counts)
    weight = build.op("aten.unsqueeze.default", weight, -1)
    weighted = build.op("aten.mul.Tensor", values, weight)
    summed = build.all_reduce(build.op("aten.cat.default", (weighted, weight), 3))
    features = build.shape(values)[3]
    total = build.slice(summed, 3, features, 1)
    if masked:
        total = _replace_equal(build, total, 0, 1)
    values_over_ranks = build.op("aten.div.Tensor", build.slice(summed, 3, 0, features), total)
    total = build.op("aten.squeeze.dim", build.op("aten.log.default", total), -1)
    sums = build.op("aten.add.Tensor", maximum, total)
    return Mixed(_cast(build, values_over_ranks, build.meta(values).dtype), sums)


def mask_hidden_queries(build: Builder, mixed: Mixed, mask: Ref) -> tuple[Mixed, Ref]:
    """Set the log-sum-exp to -inf for queries that have all keys masked.

    Kernels return another number there. A huge finite mask absorbs the scores, so the log-sum-exp
    also loses the number of keys.

    Returns:
        The corrected result, and per query the number of keys with the absorbing mask; 1 elsewhere.
    """
    largest = build.op("aten.amax.default", mask, (-1,))
    is_largest = build.op("aten.eq.Tensor", mask, build.op("aten.unsqueeze.default", largest, -1))
    counts = build.op("aten.sum.dim_IntList", is_largest, (-1,))
    not_absorbing = build.op("aten.ge.Scalar", largest, _SWALLOWS)
    counts = build.op("aten.masked_fill.Scalar", counts, not_absorbing, 1)
    hidden = build.op("aten.eq.Scalar", largest, float("-inf"))
    sums = build.op("aten.masked_fill.Scalar", mixed.sums, hidden, float("-inf"))
    return Mixed(mixed.values, sums), counts


def _replace_equal(build: Builder, value: Ref, target: float, replacement: float) -> Ref:
    """Replace the elements equal to ``target`` by ``replacement``."""
    equal = build.op("aten.eq.Scalar", value, target)
    filled: Ref = build.op("aten.masked_fill.Scalar", value, equal, replacement)
    return filled


def _cast(build: Builder, value: Ref, dtype: Any) -> Ref:
    """Cast a value to a dtype, if needed."""
    if build.meta(value).dtype == dtype:
        return value
    cast: Ref = build.op("aten._to_copy.default", value, dtype=dtype)
    return cast


def has_dropout(call: Call) -> bool:
    """Return whether the call draws dropout; its blocks then cannot be merged."""
    return bool(call["dropout_p"] != 0)
