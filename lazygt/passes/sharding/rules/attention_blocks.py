"""Attention kernels on some queries and some keys, and the merge of their results.

Each gives for a query the mean of values, and the logarithm of its sum of exponentials. From these
the mean over all keys follows, exact but for rounding, as flash attention does it block by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lazygt.graph.node import DEVICE, Arg, Node, Ref
from lazygt.graph.placement import block_size
from lazygt.passes.sharding.rules.strategy import Call, R, Values, zeros

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

# -- schedule of a ring attention: queries and keys that meet on each rank in each turn ------------

#: (from, to, rows) of the sends between ranks at one time.
Sent = tuple[tuple[int, int, int], ...]


class Task(NamedTuple):
    """One rank's work in a turn: queries of one rank attend to keys of one rank.

    Attributes:
        queries, keys: their ranks.
        first, last: the range of those queries.
    """

    queries: int
    keys: int
    first: int
    last: int


@dataclass(frozen=True)
class Turn:
    """Work of all ranks between two exchanges.

    Attributes:
        tasks: of each rank; None: it has none.
        keys: the blocks of keys that come to them before.
        queries: the queries that come to them before.
    """

    tasks: tuple[Task | None, ...]
    keys: Sent
    queries: Sent

    def returned_keys(self, sizes: Sequence[int]) -> Sent:
        """Return the sends of results for keys to the owners of the keys."""
        return tuple(sorted(
            (rank, task.keys, sizes[task.keys])
            for rank, task in self._done(sizes) if task.keys != rank
        ))  # fmt: skip

    def returned_queries(self, sizes: Sequence[int]) -> Sent:
        """Return the sends of results for queries to the owners of the queries."""
        return tuple(sorted(
            (rank, task.queries, task.last - task.first)
            for rank, task in self._done(sizes) if task.queries != rank
        ))  # fmt: skip

    def _done(self, sizes: Sequence[int]) -> Iterator[tuple[int, Task]]:
        for rank, task in enumerate(self.tasks):
            if task is not None and task.first < task.last and sizes[task.keys]:
                yield rank, task


@dataclass(frozen=True)
class Schedule:
    """Turns after the first one, in which each rank's queries attend to its own keys.

    Attributes:
        queries, keys: number of them on each rank.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool
    turns: tuple[Turn, ...]

    @property
    def share(self) -> float:
        """Part of the work that the busiest rank does."""
        diagonal = 0.5 if self.causal else 1.0
        work = [q * k * diagonal for q, k in zip(self.queries, self.keys, strict=True)]
        for turn in self.turns:
            for rank, task in enumerate(turn.tasks):
                if task is not None:
                    work[rank] += (task.last - task.first) * self.keys[task.keys]
        return max(work) / (sum(self.queries) * sum(self.keys) * diagonal)


@lru_cache(maxsize=1024)
def schedule(queries: int, keys: int, parts: int, causal: bool, balanced: bool) -> Schedule:
    """Build the schedule; of a causal mask there are as many keys as queries.

    Args:
        balanced: ranks with fewer keys to attend to do it for others.
    """
    of_queries, of_keys = (
        tuple([block_size(size, parts, rank) for rank in range(parts)]) for size in (queries, keys)
    )
    last = parts // 2 if balanced else parts - 1
    turns = [_turn(number, of_queries, of_keys, causal, balanced) for number in range(1, last + 1)]
    return Schedule(of_queries, of_keys, causal, tuple(turns))


def _turn(
    number: int, queries: Sequence[int], keys: Sequence[int], causal: bool, balanced: bool
) -> Turn:
    """Build a turn: each rank attends to the keys of the one ``number`` places before it.

    Of a causal mask those are later keys for the first ranks. If it is balanced, the queries of the
    later ranks come to these instead: halfway round two ranks stand opposite each other, and each
    does half.
    """
    parts = len(queries)
    tasks: list[Task | None] = []
    for rank in range(parts):
        other = (rank - number) % parts
        helped = causal and other > rank
        owner = other if helped else rank
        half = queries[owner] // 2 if balanced and 2 * number == parts else None
        first = half or 0 if helped else 0
        last = queries[owner] if helped or half is None else half
        task = Task(owner, rank if helped else other, first, last)
        tasks.append(None if helped and not balanced else task)
    moved = [
        ((rank - 1) % parts, rank, keys[task.keys])
        for rank, task in enumerate(tasks) if task is not None and task.keys != rank
    ]  # fmt: skip
    # queries begin with the first rank, and are passed on
    asked = [
        (rank - 1 if rank else task.queries, rank, task.last - task.first)
        for rank, task in enumerate(tasks) if task is not None and task.queries != rank
    ]  # fmt: skip
    return Turn(tuple(tasks), _sent(moved), _sent(asked))


def _sent(moves: Sequence[tuple[int, int, int]]) -> Sent:
    return tuple(sorted(move for move in moves if move[2]))


# -- attention kernels on some queries and some keys, and the merge of their results ---------------

HEADS, LENGTH = 1, 2  #: dims of queries, keys and values
#: Kernels for GPUs that leave sums for so many queries, the rest of them infinite.
_ALIGNED = {"efficient": 32}
#: A mask below this leaves nothing of a score that it is added to in float32.
_SWALLOWS = -1e8


class Mixed(NamedTuple):
    """Results of some queries on some keys.

    Attributes:
        values: the mean of values, weighted.
        sums: logarithms of the sums of weights, one a query.
    """

    values: Ref
    sums: Ref


def mask_of(args: Mapping[str, Arg]) -> str | None:
    """Return the argument that is added to scores, if there is one."""
    return next((name for name in ("attn_mask", "attn_bias") if type(args.get(name)) is Ref), None)


def alignment(op: str) -> int:
    """Return the number of queries that a kernel leaves sums of at once."""
    return next((count for name, count in _ALIGNED.items() if name in op), 1)


def attended(
    build: Builder, node: Node, operands: Sequence[Ref], causal: bool = False, **given: Ref
) -> tuple[Mixed, Values]:
    """Run a kernel; return its mixed values, and its other results.

    Args:
        given: operands by argument, where they are others.
    """
    changes: dict[str, Any] = {**given, "is_causal": causal}
    if "compute_log_sumexp" in build.bind(node, operands):
        changes["compute_log_sumexp"] = True
    values, sums, *rest = build.rerun(node, operands, **changes)
    assert values is not None
    assert sums is not None
    return Mixed(values, unpacked(build, sums, build.shape(values)[LENGTH])), rest


def unpacked(build: Builder, sums: Ref, queries: int) -> Ref:
    """Return sums as kernels leave them, as one a query."""
    if len(build.shape(sums)) > 3:
        sums = build.op("aten.squeeze.dim", sums, -1)
    return build.slice(sums, LENGTH, 0, queries)


def packed(build: Builder, op: str, sums: Ref) -> Ref:
    """Return one sum a query, as the kernels of an op leave them."""
    if "cudnn" in op:
        sums = build.op("aten.unsqueeze.default", sums, -1)
    missing = -build.shape(sums)[LENGTH] % alignment(op)
    if missing:
        sums = build.op("aten.constant_pad_nd.default", sums, (0, missing), float("inf"))
    return sums


def results_of(build: Builder, node: Node, mixed: Mixed, rest: Values = ()) -> Values:
    """Return the results of a node; its kernel may have been asked for no sums.

    Args:
        rest: the others of some kernel; nothing where this rank has called none.
    """
    wanted = node.results[1]
    assert wanted is not None
    if not rest:
        rest = [None if meta is None else zeros(build, meta, R) for meta in node.results[2:]]
    if wanted.numel:
        return mixed.values, packed(build, node.op, mixed.sums), *rest
    none = build.full((*build.shape(mixed.values)[:LENGTH], 0), 0, like=mixed.sums)
    return mixed.values, none, *rest


def of_no_keys(build: Builder, node: Node, query: Ref, value: Ref) -> Mixed:
    """Return the results of queries on no keys."""
    sums = node.results[1]
    assert sums is not None
    queries, features = build.shape(query)[:3], build.shape(value)[3]
    empty = build.full((*queries, features), 0, like=query)
    of_none = build.op("aten.full.default", queries, float("-inf"), dtype=sums.dtype,
                       device=DEVICE)  # fmt: skip
    return Mixed(empty, of_none)


def gradients(
    build: Builder, node: Node, operands: Sequence[Ref], causal: bool = False, **given: Ref
) -> Values:
    """Return the gradients of some queries and keys, by the whole result and its sums."""
    args = {**build.bind(node, operands), **given}
    changes: dict[str, Any] = {**given, "is_causal": causal}
    for name, operand in (("max_q", "query"), ("max_k", "key")):
        if name in args:
            changes[name] = build.shape(args[operand])[LENGTH]
    return build.rerun(node, operands, **changes)


def merged(build: Builder, first: Mixed, second: Mixed) -> Mixed:
    """Merge the results of queries on two sets of keys."""
    dtype = build.meta(first.values).dtype
    sums = build.op("aten.logaddexp.default", first.sums, second.sums)
    weighted = []
    for result, its_sums in (first, second):
        weight = build.op("aten.exp.default", build.op("aten.sub.Tensor", its_sums, sums))
        weight = build.op("aten.unsqueeze.default", weight, -1)
        weighted.append(build.op("aten.mul.Tensor", result, weight))
    whole = build.op("aten.add.Tensor", *weighted)
    return Mixed(_as(build, whole, dtype), sums)


def merged_over_ranks(
    build: Builder, mixed: Mixed, masked: bool, counts: Ref | None = None
) -> Mixed:
    """Merge the results of queries on each rank's keys, by two small reductions.

    Args:
        masked: queries may see no key of any rank; they give zeros.
        counts: see ``hidden_apart``.
    """
    values, sums = mixed
    top = build.all_reduce(sums, "max")
    if masked:
        top = _filled(build, top, float("-inf"), 0)
    weight = build.op("aten.exp.default", build.op("aten.sub.Tensor", sums, top))
    if counts is not None:
        weight = build.op("aten.mul.Tensor", weight, counts)
    weight = build.op("aten.unsqueeze.default", weight, -1)
    weighted = build.op("aten.mul.Tensor", values, weight)
    both = build.all_reduce(build.op("aten.cat.default", (weighted, weight), 3))
    features = build.shape(values)[3]
    total = build.slice(both, 3, features, 1)
    if masked:
        total = _filled(build, total, 0, 1)
    whole = build.op("aten.div.Tensor", build.slice(both, 3, 0, features), total)
    total = build.op("aten.squeeze.dim", build.op("aten.log.default", total), -1)
    sums = build.op("aten.add.Tensor", top, total)
    return Mixed(_as(build, whole, build.meta(values).dtype), sums)


def hidden_apart(build: Builder, mixed: Mixed, mask: Ref) -> tuple[Mixed, Ref]:
    """Set sums to -inf where a mask hides all keys; return them, and numbers of keys.

    Kernels say otherwise there. Where the mask leaves nothing of scores, sums lose the number of
    keys as well, so it is returned; elsewhere 1.
    """
    top = build.op("aten.amax.default", mask, (-1,))
    alike = build.op("aten.eq.Tensor", mask, build.op("aten.unsqueeze.default", top, -1))
    counts = build.op("aten.sum.dim_IntList", alike, (-1,))
    counted = build.op("aten.ge.Scalar", top, _SWALLOWS)
    counts = build.op("aten.masked_fill.Scalar", counts, counted, 1)
    hidden = build.op("aten.eq.Scalar", top, float("-inf"))
    sums = build.op("aten.masked_fill.Scalar", mixed.sums, hidden, float("-inf"))
    return Mixed(mixed.values, sums), counts


def _filled(build: Builder, value: Ref, where: float, number: float) -> Ref:
    equal = build.op("aten.eq.Scalar", value, where)
    filled: Ref = build.op("aten.masked_fill.Scalar", value, equal, number)
    return filled


def _as(build: Builder, value: Ref, dtype: Any) -> Ref:
    if build.meta(value).dtype == dtype:
        return value
    cast: Ref = build.op("aten._to_copy.default", value, dtype=dtype)
    return cast


def is_plain(call: Call) -> bool:
    """Return whether parts of it can be put together: where no dropout is drawn."""
    return bool(call["dropout_p"] == 0)
