"""Ring attention: queries and keys that are sharded along their length.

Each rank attends with its queries to its own keys, while those of the rank before it come, and
passes these on: Ring Attention (Liu, Zaharia and Abbeel, 2023). It never has more keys than its
own, those that it attends to and those under way. The results of the blocks are put together by
their sums, see ``attending``; backward, gradients go home to the keys that they are of.

Of a causal mask later ranks have more to do. Where it pays, half of that is done by the rank that
has the keys: it is sent queries, and sends their results back, as in DISTFLASHATTN (Li et al.,
2023). Then each rank has as much to do, and sends no more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from lazygt.graph.node import Node, Ref
from lazygt.passes.sharding.rules.attention_blocks import (
    LENGTH,
    Mixed,
    Schedule,
    Sent,
    Task,
    Turn,
    attended,
    gradients,
    merged,
    of_no_keys,
    packed,
    results_of,
    unpacked,
)
from lazygt.passes.sharding.rules.strategy import Call, Collective, Lowering, Values

if TYPE_CHECKING:
    from lazygt.passes.sharding.builder import Builder

# -- tensors that travel from rank to rank together ------------------------------------------------


class Bundle(NamedTuple):
    """Tensors that travel together, those of one dtype as one.

    They are of [batch, heads, length, features], or without features.

    Attributes:
        widths: their features; None: without.
    """

    widths: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]

    @staticmethod
    def of(metas: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Bundle:
        """Return the bundle of tensors of these shapes and dtypes."""
        widths = tuple([shape[3] if len(shape) > 3 else None for shape, _ in metas])
        return Bundle(widths, tuple([dtype for _, dtype in metas]))

    def row_bytes(self) -> list[int]:
        """Return the bytes of one place of a head, of each joined tensor."""
        return [
            dtype.itemsize * sum([self.widths[at] or 1 for at in places])
            for dtype, places in self._groups().items()
        ]

    def pack(self, build: Builder, tensors: Sequence[Ref]) -> list[Ref]:
        """Join the tensors to those that travel."""
        wide = [
            tensor if width is not None else build.op("aten.unsqueeze.default", tensor, -1)
            for tensor, width in zip(tensors, self.widths, strict=True)
        ]
        return [build.joined([wide[at] for at in places], 3) for places in self._groups().values()]

    def unpack(self, build: Builder, joined: Sequence[Ref]) -> list[Ref]:
        """Take the joined tensors apart again."""
        tensors: dict[int, Ref] = {}
        for whole, places in zip(joined, self._groups().values(), strict=True):
            start = 0
            for at in places:
                width = self.widths[at]
                tensor = build.slice(whole, 3, start, width or 1)
                if width is None:
                    tensor = build.contiguous(build.op("aten.squeeze.dim", tensor, -1))
                tensors[at] = tensor
                start += width or 1
        return [tensors[at] for at in range(len(self.widths))]

    def _groups(self) -> Mapping[torch.dtype, list[int]]:
        groups: dict[torch.dtype, list[int]] = {}
        for at, dtype in enumerate(self.dtypes):
            groups.setdefault(dtype, []).append(at)
        return groups


# -- ring attention: queries and keys that are sharded along their length --------------------------


@dataclass
class _Ring(ABC):
    """Pass of one rank through a schedule.

    Attributes:
        queries, keys: tensors of this rank that others may be sent.
        of_queries, of_keys: their results so far.
    """

    build: Builder
    node: Node
    operands: Sequence[Ref]
    plan: Schedule

    def __post_init__(self) -> None:
        self.args = self.build.bind(self.node, self.operands)
        self.rank = self.build.index
        self.queries, self.keys = self.tensors()
        self.bundles = self._bundle(self.queries), self._bundle(self.keys)

    @abstractmethod
    def tensors(self) -> tuple[list[Ref], list[Ref]]:
        """Return the tensors that travel with queries, and with keys."""

    @abstractmethod
    def attend(
        self, queries: Sequence[Ref], keys: Sequence[Ref], causal: bool
    ) -> tuple[list[Ref], list[Ref]]:
        """Attend with queries to keys; return the results for the queries, and for the keys."""

    @abstractmethod
    def nothing(self) -> tuple[list[Ref], list[Ref]]:
        """Return the results where there is nothing to attend to."""

    @abstractmethod
    def together(self, first: Sequence[Ref], second: Sequence[Ref]) -> list[Ref]:
        """Merge the results of queries for two parts of the keys."""

    def run(self) -> None:
        """Run turn by turn, while the tensors of the next turn are under way."""
        turns = self.plan.turns
        self.packed = self._packed_own()
        coming = self._come(turns[0], *self.packed)
        if self.plan.queries[self.rank] and self.plan.keys[self.rank]:
            results = self.attend(self.queries, self.keys, self.plan.causal)
        else:
            results = self.nothing()
        self.of_queries, self.of_keys = results
        returned: list[Callable[[], None]] = []
        for number, turn in enumerate(turns):
            queries, keys = coming
            if number + 1 < len(turns):
                coming = self._come(turns[number + 1], queries, keys)
            results = self._attended(turn, queries, keys)
            for add in returned:  # of the turn before, which has been under way
                add()
            returned = self._returned(turn, *results)
        for add in returned:
            add()

    def _packed_own(self) -> tuple[list[Ref], list[Ref]]:
        (queries, keys), turns = self.bundles, self.plan.turns
        travel = any(turn.queries for turn in turns)
        packed = queries.pack(self.build, self.queries) if travel else []
        return packed, keys.pack(self.build, self.keys)

    def _bundle(self, tensors: Sequence[Ref]) -> Bundle:
        metas = [self.build.meta(tensor) for tensor in tensors]
        return Bundle.of([(meta.shape, meta.dtype) for meta in metas])

    def _come(
        self, turn: Turn, queries: Sequence[Ref], keys: Sequence[Ref]
    ) -> tuple[list[Ref], list[Ref]]:
        """Send and receive the queries and keys of a turn.

        Sent are those that this rank had in the turn before; where it passes nothing on, it waits
        for nothing.
        """
        own_queries, own_keys = self.packed
        keys = keys if self._gives(turn.keys) else own_keys
        keys = [self._exchanged(joined, turn.keys) for joined in keys]
        first = turn.tasks[0]
        begins = first is not None and first.queries == self.rank
        if begins or not self._gives(turn.queries):
            queries = own_queries
        rows = sum(count for source, _, count in turn.queries if source == self.rank)
        if rows:  # the last of them, where only some are wanted
            queries = [
                self.build.slice(joined, LENGTH, self.build.shape(joined)[LENGTH] - rows, rows)
                for joined in queries
            ]
        return [self._exchanged(joined, turn.queries) for joined in queries], keys

    def _gives(self, sent: Sent) -> bool:
        return any(source == self.rank for source, _, _ in sent)

    def _exchanged(self, value: Ref, sent: Sent) -> Ref:
        """Exchange rows; return the received ones. Without any sends there is no collective."""
        if not self._gives(sent):
            value = self._none_of(value)
        return self.build.send_recv(value, LENGTH, sent) if sent else value

    def _attended(
        self, turn: Turn, queries: Sequence[Ref], keys: Sequence[Ref]
    ) -> tuple[list[Ref], list[Ref]]:
        """Return the results of this rank's task; add those that are its own."""
        task = turn.tasks[self.rank]
        if task is None or task.first == task.last or not self.plan.keys[task.keys]:
            return [*map(self._none_of, self.of_queries)], [*map(self._none_of, self.of_keys)]
        build, (of_queries, of_keys) = self.build, self.bundles
        is_own = task.queries == self.rank
        asking = self._some(self.queries, task) if is_own else of_queries.unpack(build, queries)
        given = self.keys if task.keys == self.rank else of_keys.unpack(build, keys)
        for_queries, for_keys = self.attend(asking, given, causal=False)
        if is_own:
            self._add_to_queries(task, for_queries)
        if task.keys == self.rank:
            self._add_to_keys(for_keys)
        return for_queries, for_keys

    def _some(self, tensors: Sequence[Ref], task: Task) -> list[Ref]:
        count = task.last - task.first
        return [self.build.slice(tensor, LENGTH, task.first, count) for tensor in tensors]

    def _none_of(self, tensor: Ref) -> Ref:
        return self.build.slice(tensor, LENGTH, 0, 0)

    def _returned(
        self, turn: Turn, for_queries: Sequence[Ref], for_keys: Sequence[Ref]
    ) -> list[Callable[[], None]]:
        """Send results of others home; return callbacks that add the received ones."""
        later: list[Callable[[], None]] = []
        sent = turn.returned_queries(self.plan.keys)
        if sent:
            come = self._sent_home(for_queries, sent)
            for rank, task in enumerate(turn.tasks):
                if task and task.queries == self.rank != rank and task.first < task.last:
                    later.append(partial(self._add_home, task, come))
        sent = turn.returned_keys(self.plan.keys)
        if sent and for_keys:
            gradients = self._sent_home(for_keys, sent)
            if any(target == self.rank for _, target, _ in sent):
                later.append(lambda: self._add_to_keys(gradients()))
        return later

    def _sent_home(self, tensors: Sequence[Ref], sent: Sent) -> Callable[[], list[Ref]]:
        """Send results of others home; return a function that unpacks the received ones."""
        if not self._gives(sent):
            tensors = [self._none_of(tensor) for tensor in tensors]
        bundle = self._bundle(tensors)
        come = [self._exchanged(part, sent) for part in bundle.pack(self.build, tensors)]
        return lambda: bundle.unpack(self.build, come)

    def _add_home(self, task: Task, come: Callable[[], list[Ref]]) -> None:
        self._add_to_queries(task, come())

    def _add_to_queries(self, task: Task, come: Sequence[Ref]) -> None:
        build, size = self.build, self.plan.queries[self.rank]
        before, after = Task(0, 0, 0, task.first), Task(0, 0, task.last, size)
        pieces = [self.together(self._some(self.of_queries, task), come)]
        if task.first:
            pieces.insert(0, self._some(self.of_queries, before))
        if task.last < size:
            pieces.append(self._some(self.of_queries, after))
        self.of_queries = [build.joined(rows, LENGTH) for rows in zip(*pieces, strict=True)]

    def _add_to_keys(self, come: Sequence[Ref]) -> None:
        self.of_keys = [
            self.build.op("aten.add.Tensor", known, more)
            for known, more in zip(self.of_keys, come, strict=True)
        ]


class _Forward(_Ring):
    rest: Values = ()

    def tensors(self) -> tuple[list[Ref], list[Ref]]:
        return [self.args["query"]], [self.args["key"], self.args["value"]]

    def attend(
        self, queries: Sequence[Ref], keys: Sequence[Ref], causal: bool
    ) -> tuple[list[Ref], list[Ref]]:
        given = dict(zip(("query", "key", "value"), (*queries, *keys), strict=True))
        mixed, rest = attended(self.build, self.node, self.operands, causal, **given)
        self.rest = self.rest or rest
        return list(mixed), []

    def nothing(self) -> tuple[list[Ref], list[Ref]]:
        none = of_no_keys(self.build, self.node, self.args["query"], self.args["value"])
        return list(none), []

    def together(self, first: Sequence[Ref], second: Sequence[Ref]) -> list[Ref]:
        return list(merged(self.build, Mixed(*first), Mixed(*second)))


class _Backward(_Ring):
    def tensors(self) -> tuple[list[Ref], list[Ref]]:
        gradient = "grad_out" if "grad_out" in self.args else "grad_out_"
        query = self.args["query"]
        sums = unpacked(self.build, self.args["logsumexp"], self.build.shape(query)[LENGTH])
        queries = [query, self.args[gradient], self.args["out"], sums]
        return queries, [self.args["key"], self.args["value"]]

    def attend(
        self, queries: Sequence[Ref], keys: Sequence[Ref], causal: bool
    ) -> tuple[list[Ref], list[Ref]]:
        names = ("query", "grad_out", "out", "logsumexp", "key", "value")
        given = dict(zip(names, (*queries, *keys), strict=True))
        given["logsumexp"] = packed(self.build, self.node.op, given["logsumexp"])
        if "grad_out_" in self.args:
            given["grad_out_"] = given.pop("grad_out")
        every = gradients(self.build, self.node, self.operands, causal, **given)[:3]
        query, *others = [gradient for gradient in every if gradient is not None]
        return [query], others

    def nothing(self) -> tuple[list[Ref], list[Ref]]:
        empty = [
            self.build.full(self.build.shape(tensor), 0, like=tensor)
            for tensor in (self.queries[0], *self.keys)
        ]
        return empty[:1], empty[1:]

    def together(self, first: Sequence[Ref], second: Sequence[Ref]) -> list[Ref]:
        return [self.build.op("aten.add.Tensor", first[0], second[0])]


def forward(plan: Schedule) -> Lowering:
    """Return the program of a forward."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        ring = _Forward(build, node, operands, plan)
        ring.run()
        return results_of(build, node, Mixed(*ring.of_queries), ring.rest)

    return lower


def backward(plan: Schedule) -> Lowering:
    """Return the program of a backward."""

    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        ring = _Backward(build, node, operands, plan)
        ring.run()
        return *ring.of_queries, *ring.of_keys, *[None] * (len(node.results) - 3)

    return lower


def comm(call: Call, plan: Schedule, is_backward: bool) -> list[Collective]:
    """Return the collectives of a schedule, in bytes of the rank that sends most."""
    query, key, value = (call.meta(name) for name in ("query", "key", "value"))
    sums = call.meta("logsumexp") if is_backward else call.result(1)
    asked = [(query.shape, query.dtype)]
    mixed = [((*query.shape[:3], value.shape[3]), query.dtype), (query.shape[:3], sums.dtype)]
    kept = [(key.shape, key.dtype), (value.shape, value.dtype)]
    of_keys = Bundle.of(kept)
    of_queries = Bundle.of([*asked, mixed[0], *mixed] if is_backward else asked)
    returned = Bundle.of(asked if is_backward else mixed)
    heads, shared = (meta.shape[0] * meta.shape[1] for meta in (query, key))
    exchanges: list[Collective] = []
    for turn in plan.turns:
        exchanges += _exchanges(of_keys, shared, turn.keys)
        exchanges += _exchanges(of_queries, heads, turn.queries)
        exchanges += _exchanges(returned, heads, turn.returned_queries(plan.keys))
        if is_backward:
            exchanges += _exchanges(of_keys, shared, turn.returned_keys(plan.keys))
    return exchanges


def _exchanges(bundle: Bundle, heads: int, sent: Sent) -> list[Collective]:
    if not sent:
        return []
    rows = [sum(count for source, _, count in sent if source == rank) for rank, _, _ in sent]
    return [Collective("send_recv", max(rows) * heads * nbytes) for nbytes in bundle.row_bytes()]
