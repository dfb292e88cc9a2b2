"""Ring attention with online softmax: queries and keys sharded along their length.

Ring Attention (Liu, Zaharia and Abbeel, 2023): in each turn a rank attends with its queries to one
block of keys, while the next block arrives from the previous rank of the ring. A rank holds at most
three key blocks: its own, the current one and the arriving one. Results over several blocks are
merged by their log-sum-exps (``attention_blocks``). In a backward the gradients of keys and values
are sent back to the owners of the keys.

With a causal mask later ranks have more work. The balanced schedule moves half of the difference to
the rank that owns the keys: that rank receives queries and returns their results, as in
DISTFLASHATTN (Li et al., 2023).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules.attention_blocks import (
    LENGTH,
    Mixed,
    RingSchedule,
    Sent,
    Task,
    Turn,
    merge,
    no_key_result,
    packed,
    results_of,
    run_attention,
    run_backward,
    unpacked,
)
from lazygt.passes.sharding.rules.strategy import Call, Collective, Values

# -- bundles of tensors that are sent together -----------------------------------------------------


class TensorBundle(NamedTuple):
    """Layout of tensors that are sent together, concatenated by dtype along the features.

    The tensors are [batch, heads, length, features] or [batch, heads, length].
    """

    #: number of features of each tensor; None: the tensor has no feature dim
    widths: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]  # dtype of each tensor

    @staticmethod
    def of(metas: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> TensorBundle:
        """Return the bundle of tensors of these shapes and dtypes."""
        widths = tuple([shape[3] if len(shape) > 3 else None for shape, _ in metas])
        return TensorBundle(widths, tuple([dtype for _, dtype in metas]))

    def row_bytes(self) -> list[int]:
        """Return the bytes per head and sequence position of each packed tensor."""
        return [
            dtype.itemsize * sum([self.widths[number] or 1 for number in numbers])
            for dtype, numbers in self._groups().items()
        ]

    def pack(self, build: Builder, tensors: Sequence[Ref]) -> list[Ref]:
        """Concatenate the tensors of each dtype along the features."""
        with_features = [
            tensor if width is not None else build.op("aten.unsqueeze.default", tensor, -1)
            for tensor, width in zip(tensors, self.widths, strict=True)
        ]
        return [
            build.joined([with_features[number] for number in numbers], 3)
            for numbers in self._groups().values()
        ]

    def unpack(self, build: Builder, joined: Sequence[Ref]) -> list[Ref]:
        """Split packed tensors into the tensors of the bundle; inverse of ``pack``."""
        tensors: dict[int, Ref] = {}
        for joined_tensor, numbers in zip(joined, self._groups().values(), strict=True):
            start = 0
            for number in numbers:
                width = self.widths[number]
                tensor = build.slice(joined_tensor, 3, start, width or 1)
                if width is None:
                    tensor = build.contiguous(build.op("aten.squeeze.dim", tensor, -1))
                tensors[number] = tensor
                start += width or 1
        return [tensors[number] for number in range(len(self.widths))]

    def _groups(self) -> Mapping[torch.dtype, list[int]]:
        """Return the numbers of the tensors of each dtype."""
        groups: dict[torch.dtype, list[int]] = {}
        for number, dtype in enumerate(self.dtypes):
            groups.setdefault(dtype, []).append(number)
        return groups


# -- one rank's run through the schedule -----------------------------------------------------------


@dataclass
class _Ring(ABC):
    """Program of one rank for a ring attention schedule.

    Attributes:
        queries, keys: this rank's tensors that may be sent with queries, and with keys.
        query_results, key_results: accumulated results for these queries and keys.
    """

    build: Builder
    node: Node
    operands: Sequence[Ref]
    plan: RingSchedule

    def __post_init__(self) -> None:
        self.args = self.build.bind(self.node, self.operands)
        self.rank = self.build.index
        self.queries, self.keys = self.tensors()
        self.bundles = self._bundle(self.queries), self._bundle(self.keys)

    @abstractmethod
    def tensors(self) -> tuple[list[Ref], list[Ref]]:
        """Return this rank's tensors that are sent with queries, and with keys."""

    @abstractmethod
    def attend(
        self, queries: Sequence[Ref], keys: Sequence[Ref], causal: bool
    ) -> tuple[list[Ref], list[Ref]]:
        """Attend with queries to keys; return the results for the queries, and for the keys."""

    @abstractmethod
    def empty_results(self) -> tuple[list[Ref], list[Ref]]:
        """Return the results if this rank has no own queries or no own keys."""

    @abstractmethod
    def merge_results(self, first: Sequence[Ref], second: Sequence[Ref]) -> list[Ref]:
        """Merge two results of the same queries over disjoint keys."""

    def run(self) -> None:
        """Run all turns; sends for the next turn overlap with the compute of a turn."""
        turns = self.plan.turns
        self.packed = self._pack_own()
        arriving = self._exchange_inputs(turns[0], *self.packed)
        if self.plan.queries[self.rank] and self.plan.keys[self.rank]:
            results = self.attend(self.queries, self.keys, self.plan.causal)
        else:
            results = self.empty_results()
        self.query_results, self.key_results = results
        returned: list[Callable[[], None]] = []
        for number, turn in enumerate(turns):
            queries, keys = arriving
            if number + 1 < len(turns):
                arriving = self._exchange_inputs(turns[number + 1], queries, keys)
            results = self._run_task(turn, queries, keys)
            for add in returned:  # received during this turn's compute
                add()
            returned = self._return_results(turn, *results)
        for add in returned:
            add()

    def _pack_own(self) -> tuple[list[Ref], list[Ref]]:
        """Pack this rank's queries (if any are sent) and keys."""
        (queries, keys), turns = self.bundles, self.plan.turns
        sends_queries = any(turn.queries for turn in turns)
        packed_queries = queries.pack(self.build, self.queries) if sends_queries else []
        return packed_queries, keys.pack(self.build, self.keys)

    def _bundle(self, tensors: Sequence[Ref]) -> TensorBundle:
        """Return the bundle layout of tensors."""
        metas = [self.build.meta(tensor) for tensor in tensors]
        return TensorBundle.of([(meta.shape, meta.dtype) for meta in metas])

    def _exchange_inputs(
        self, turn: Turn, queries: Sequence[Ref], keys: Sequence[Ref]
    ) -> tuple[list[Ref], list[Ref]]:
        """Send and receive the queries and keys of a turn.

        Args:
            queries, keys: packed tensors that this rank received for the previous turn. A rank that
                forwards none sends its own block, so the send does not wait for a receive.

        Returns:
            The packed queries and keys that this rank received.
        """
        own_queries, own_keys = self.packed
        keys = keys if self._is_sender(turn.keys) else own_keys
        keys = [self._exchange_rows(joined, turn.keys) for joined in keys]
        first = turn.tasks[0]
        owns_first_queries = first is not None and first.queries == self.rank
        if owns_first_queries or not self._is_sender(turn.queries):
            queries = own_queries
        rows = sum(count for source, _, count in turn.queries if source == self.rank)
        if rows:  # a receiver of fewer rows gets the last rows
            queries = [
                self.build.slice(joined, LENGTH, self.build.shape(joined)[LENGTH] - rows, rows)
                for joined in queries
            ]
        return [self._exchange_rows(joined, turn.queries) for joined in queries], keys

    def _is_sender(self, sent: Sent) -> bool:
        """Return whether this rank sends rows."""
        return any(source == self.rank for source, _, _ in sent)

    def _exchange_rows(self, value: Ref, sent: Sent) -> Ref:
        """Send rows of ``value``; return the received rows. No sends: no collective."""
        if not self._is_sender(sent):
            value = self._empty_rows(value)
        return self.build.send_recv(value, LENGTH, sent) if sent else value

    def _run_task(
        self, turn: Turn, queries: Sequence[Ref], keys: Sequence[Ref]
    ) -> tuple[list[Ref], list[Ref]]:
        """Run this rank's task of a turn; add results for its own queries and keys.

        Returns:
            The results for the queries and for the keys of the task; empty for an idle rank.
        """
        task = turn.tasks[self.rank]
        if task is None or task.first == task.last or not self.plan.keys[task.keys]:
            no_queries = [*map(self._empty_rows, self.query_results)]
            return no_queries, [*map(self._empty_rows, self.key_results)]
        build, (query_bundle, key_bundle) = self.build, self.bundles
        owns_queries = task.queries == self.rank
        if owns_queries:
            task_queries = self._task_queries(self.queries, task)
        else:
            task_queries = query_bundle.unpack(build, queries)
        task_keys = self.keys if task.keys == self.rank else key_bundle.unpack(build, keys)
        for_queries, for_keys = self.attend(task_queries, task_keys, causal=False)
        if owns_queries:
            self._add_to_queries(task, for_queries)
        if task.keys == self.rank:
            self._add_to_keys(for_keys)
        return for_queries, for_keys

    def _task_queries(self, tensors: Sequence[Ref], task: Task) -> list[Ref]:
        """Slice tensors to the queries of a task."""
        count = task.last - task.first
        return [self.build.slice(tensor, LENGTH, task.first, count) for tensor in tensors]

    def _empty_rows(self, tensor: Ref) -> Ref:
        """Return a tensor with no rows along the length."""
        return self.build.slice(tensor, LENGTH, 0, 0)

    def _return_results(
        self, turn: Turn, for_queries: Sequence[Ref], for_keys: Sequence[Ref]
    ) -> list[Callable[[], None]]:
        """Send results to the owners of the queries and keys.

        Returns:
            Callbacks that add the received results to those of this rank.
        """
        callbacks: list[Callable[[], None]] = []
        sent = turn.returned_queries(self.plan.keys)
        if sent:
            unpack_received = self._send_to_owners(for_queries, sent)
            for rank, task in enumerate(turn.tasks):
                if task and task.queries == self.rank != rank and task.first < task.last:
                    callbacks.append(partial(self._add_received, task, unpack_received))
        sent = turn.returned_keys(self.plan.keys)
        if sent and for_keys:
            unpack_gradients = self._send_to_owners(for_keys, sent)
            if any(target == self.rank for _, target, _ in sent):
                callbacks.append(lambda: self._add_to_keys(unpack_gradients()))
        return callbacks

    def _send_to_owners(self, tensors: Sequence[Ref], sent: Sent) -> Callable[[], list[Ref]]:
        """Send results to their owners; return a function that unpacks the received ones."""
        if not self._is_sender(sent):
            tensors = [self._empty_rows(tensor) for tensor in tensors]
        bundle = self._bundle(tensors)
        packed_tensors = bundle.pack(self.build, tensors)
        received = [self._exchange_rows(tensor, sent) for tensor in packed_tensors]
        return lambda: bundle.unpack(self.build, received)

    def _add_received(self, task: Task, unpack_received: Callable[[], list[Ref]]) -> None:
        """Merge the received results for the queries of a task."""
        self._add_to_queries(task, unpack_received())

    def _add_to_queries(self, task: Task, received: Sequence[Ref]) -> None:
        """Merge results for the queries of a task into ``query_results``."""
        build, size = self.build, self.plan.queries[self.rank]
        before, after = Task(0, 0, 0, task.first), Task(0, 0, task.last, size)
        pieces = [self.merge_results(self._task_queries(self.query_results, task), received)]
        if task.first:
            pieces.insert(0, self._task_queries(self.query_results, before))
        if task.last < size:
            pieces.append(self._task_queries(self.query_results, after))
        self.query_results = [build.joined(rows, LENGTH) for rows in zip(*pieces, strict=True)]

    def _add_to_keys(self, received: Sequence[Ref]) -> None:
        """Add gradients to ``key_results``."""
        self.key_results = [
            self.build.op("aten.add.Tensor", accumulated, summand)
            for accumulated, summand in zip(self.key_results, received, strict=True)
        ]


class _Forward(_Ring):
    """Ring attention forward; accumulates values and log-sum-exps of the queries."""

    other_results: Values = ()

    def tensors(self) -> tuple[list[Ref], list[Ref]]:
        return [self.args["query"]], [self.args["key"], self.args["value"]]

    def attend(
        self, queries: Sequence[Ref], keys: Sequence[Ref], causal: bool
    ) -> tuple[list[Ref], list[Ref]]:
        tensors = dict(zip(("query", "key", "value"), (*queries, *keys), strict=True))
        result, other_results = run_attention(
            self.build, self.node, self.operands, causal, **tensors
        )
        self.other_results = self.other_results or other_results
        return list(result), []

    def empty_results(self) -> tuple[list[Ref], list[Ref]]:
        result = no_key_result(self.build, self.node, self.args["query"], self.args["value"])
        return list(result), []

    def merge_results(self, first: Sequence[Ref], second: Sequence[Ref]) -> list[Ref]:
        return list(merge(self.build, Mixed(*first), Mixed(*second)))


class _Backward(_Ring):
    """Ring attention backward; accumulates gradients of queries, keys and values."""

    def tensors(self) -> tuple[list[Ref], list[Ref]]:
        grad_out = "grad_out" if "grad_out" in self.args else "grad_out_"
        query = self.args["query"]
        sums = unpacked(self.build, self.args["logsumexp"], self.build.shape(query)[LENGTH])
        queries = [query, self.args[grad_out], self.args["out"], sums]
        return queries, [self.args["key"], self.args["value"]]

    def attend(
        self, queries: Sequence[Ref], keys: Sequence[Ref], causal: bool
    ) -> tuple[list[Ref], list[Ref]]:
        names = ("query", "grad_out", "out", "logsumexp", "key", "value")
        tensors = dict(zip(names, (*queries, *keys), strict=True))
        tensors["logsumexp"] = packed(self.build, self.node.op, tensors["logsumexp"])
        if "grad_out_" in self.args:
            tensors["grad_out_"] = tensors.pop("grad_out")
        gradients = run_backward(self.build, self.node, self.operands, causal, **tensors)[:3]
        query_gradient, *key_value_gradients = [g for g in gradients if g is not None]
        return [query_gradient], key_value_gradients

    def empty_results(self) -> tuple[list[Ref], list[Ref]]:
        zeros = [
            self.build.full(self.build.shape(tensor), 0, like=tensor)
            for tensor in (self.queries[0], *self.keys)
        ]
        return zeros[:1], zeros[1:]

    def merge_results(self, first: Sequence[Ref], second: Sequence[Ref]) -> list[Ref]:
        return [self.build.op("aten.add.Tensor", first[0], second[0])]


def forward(plan: RingSchedule, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run a ring attention forward."""
    ring = _Forward(build, node, operands, plan)
    ring.run()
    return results_of(build, node, Mixed(*ring.query_results), ring.other_results)


def backward(plan: RingSchedule, build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    """Run a ring attention backward."""
    ring = _Backward(build, node, operands, plan)
    ring.run()
    return *ring.query_results, *ring.key_results, *[None] * (len(node.results) - 3)


def comm(call: Call, plan: RingSchedule, is_backward: bool) -> list[Collective]:
    """Return the collectives of a schedule for the cost model, in bytes of the largest sender."""
    query, key, value = (call.meta(name) for name in ("query", "key", "value"))
    sums = call.meta("logsumexp") if is_backward else call.result(1)
    query_like = [(query.shape, query.dtype)]
    forward_results = [
        ((*query.shape[:3], value.shape[3]), query.dtype),
        (query.shape[:3], sums.dtype),
    ]
    key_like = [(key.shape, key.dtype), (value.shape, value.dtype)]
    key_bundle = TensorBundle.of(key_like)
    query_bundle = TensorBundle.of(
        [*query_like, forward_results[0], *forward_results] if is_backward else query_like
    )
    result_bundle = TensorBundle.of(query_like if is_backward else forward_results)
    query_heads, key_heads = (meta.shape[0] * meta.shape[1] for meta in (query, key))
    exchanges: list[Collective] = []
    for turn in plan.turns:
        exchanges += _send_recv_costs(key_bundle, key_heads, turn.keys)
        exchanges += _send_recv_costs(query_bundle, query_heads, turn.queries)
        exchanges += _send_recv_costs(result_bundle, query_heads, turn.returned_queries(plan.keys))
        if is_backward:
            exchanges += _send_recv_costs(key_bundle, key_heads, turn.returned_keys(plan.keys))
    return exchanges


def _send_recv_costs(bundle: TensorBundle, heads: int, sent: Sent) -> list[Collective]:
    """Return the collectives of one exchange of a bundle."""
    if not sent:
        return []
    rows = [sum(count for source, _, count in sent if source == rank) for rank, _, _ in sent]
    return [Collective("send_recv", max(rows) * heads * nbytes) for nbytes in bundle.row_bytes()]
