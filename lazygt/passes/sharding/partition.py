"""Lowering of the whole program to each rank's: blocks of values, and collectives.

One mesh axis at a time. Every rank of the axis gets a graph of its own, since blocks may differ in
size; all of them meet in the same collectives in the same order, because they are written by the
same walk over the same global graph. A collective stands where a placement changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lazygt.graph.meta import contiguous_stride
from lazygt.graph.node import Graph, Node, Ref, map_arg, ref
from lazygt.graph.placement import Cut, Partial, Placement, Replicate, StridedShard, local_meta
from lazygt.passes.sharding.builder import Builder
from lazygt.passes.sharding.rules.base import Strategy, lower_strategy

R = Replicate()


@dataclass(frozen=True, slots=True)
class Choice:
    """Strategies and placements that were chosen for a graph on one axis.

    Attributes:
        strategies: of each node.
        kept: value -> the placements that its users find, in the order to make them; a value that
            is not here is used as it was made.
        inputs: the placement that each input comes with.
        gradients: shape -> the placement of an output of that shape that would be partial, as the
            gradient of a parameter that is stored in blocks is; others are reduced whole.
    """

    strategies: Sequence[Strategy]
    kept: Mapping[int, tuple[Placement, ...]]
    inputs: Sequence[Placement]
    gradients: Mapping[tuple[int, ...], Placement] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """Local program of one rank of an axis, with the placement of each of its outputs.

    Attributes:
        values: for each value of the whole program: placement -> number of the local value that has
            it; the placement that it was made with is the first.
        alike: whether every rank of the axis has the same program.
        settled: whether it would be the same program if ``outputs`` were wanted.
    """

    graph: Graph
    outputs: tuple[Placement, ...]
    values: tuple[Mapping[Placement, int], ...] = ()
    alike: bool = False
    settled: bool = False


def partition(
    graph: Graph,
    choice: Choice,
    axis: str,
    parts: int,
    index: int,
    wanted: Mapping[int, Placement] | None = None,
) -> LocalProgram:
    """Return the program of rank ``index`` of ``parts`` on ``axis``.

    Args:
        wanted: output value -> the placement that it must have. Others have the placement that they
            were made with; a partial sum is reduced, see ``Choice.gradients``.
    """
    return _Partitioner(graph, choice, axis, parts, index).run(wanted or {})


class _Partitioner:
    def __init__(self, graph: Graph, choice: Choice, axis: str, parts: int, index: int) -> None:
        self.graph, self.choice, self.values = graph, choice, graph.values
        placed = list(zip(graph.inputs, choice.inputs, strict=True))
        metas = [local_meta(meta, placement, parts, index) for meta, placement in placed]
        self.build = Builder(metas, graph.params, axis=axis, parts=parts, index=index)
        for meta, placement in placed:  # the builder notes where ranks have blocks of other sizes
            self.build.local(meta.shape, placement)
        #: value -> placement -> the local value
        self.have: list[dict[Placement, Ref]] = [
            {placement: ref(number)} for number, placement in enumerate(choice.inputs)
        ]
        self.lines: list[str] = []
        self.origins: list[int] = []
        self.settled = False

    def run(self, wanted: Mapping[int, Placement]) -> LocalProgram:
        placements: tuple[Placement, ...] = ()
        outputs: list[Ref] = []
        for number, (node, strategy) in enumerate(
            zip(self.graph.nodes, self.choice.strategies, strict=True)
        ):
            if node.dynamic:  # it stays the last node, and nothing else is made of its results
                placements, outputs = self._outputs(wanted)
            operands = [
                self.get(v, placement)
                for v, placement in zip(node.refs(), strategy.inputs, strict=True)
            ]
            results = self._node(node, strategy, operands)
            for result, placement in zip(results, strategy.outputs, strict=True):
                self.have.append({} if result is None else {placement: result})
            self._from(number)
        if len(placements) < len(self.graph.outputs):
            placements, outputs = self._outputs(wanted)
        self._from(max(len(self.graph.nodes) - 1, 0))
        whole = self.build.graph(outputs)
        lined = replace(whole, lines=tuple(self.lines), origins=tuple(self.origins))
        alike = not self.build.differs
        return LocalProgram(lined, placements, self._numbers(), alike, self.settled)

    def _numbers(self) -> tuple[Mapping[Placement, int], ...]:
        return tuple(
            [{placement: at.index for placement, at in have.items()} for have in self.have]
        )

    def _node(
        self, node: Node, strategy: Strategy, operands: Sequence[Ref]
    ) -> Sequence[Ref | None]:
        if strategy.lower is None and (node.op.startswith("lazygt.") or node.dynamic):
            return self._as_it_is(node, operands)
        return lower_strategy(self.build, strategy, node, operands)

    def _as_it_is(self, node: Node, operands: Sequence[Ref]) -> Sequence[Ref | None]:
        """Add a node that runs on whole operands: without a schema, or with dynamic results."""
        renamed = dict(zip(node.refs(), operands, strict=True))
        args = map_arg(node.args, lambda arg: renamed[arg.index] if type(arg) is Ref else arg)
        kwargs = tuple(
            (k, map_arg(a, lambda arg: renamed[arg.index] if type(arg) is Ref else arg))
            for k, a in node.kwargs
        )
        writes = tuple(renamed[value].index for value in node.writes)
        return self.build.add(
            Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)
        )

    def get(self, value: int, placement: Placement) -> Ref:
        """Return a value with a placement, moved there if it is not."""
        have = self.have[value]
        local = have.get(placement)
        if local is not None:
            return local
        base = self._base(value)
        source = R if R in have else base
        meta = self.values[value]
        assert meta is not None
        local = self.build.convert(have[source], meta.shape, source, placement)
        have[placement] = local
        return local

    def _base(self, value: int) -> Placement:
        """Return the placement that a value is kept with; convert the value to it if needed."""
        have = self.have[value]
        first = next(iter(have))
        kept = self.choice.kept.get(value)
        if kept and kept[0] not in have:
            meta = self.values[value]
            assert meta is not None
            have[kept[0]] = self.build.convert(have[first], meta.shape, first, kept[0])
        return kept[0] if kept else first

    def _outputs(self, wanted: Mapping[int, Placement]) -> tuple[tuple[Placement, ...], list[Ref]]:
        """Return the placements of the graph's outputs, and the values that have them."""
        before = len(self.build.nodes)
        placements = tuple([self._final(value, wanted) for value in self.graph.outputs])
        self.settled = len(self.build.nodes) == before
        return placements, [
            self._stored(v, la) for v, la in zip(self.graph.outputs, placements, strict=True)
        ]

    def _stored(self, value: int, placement: Placement) -> Ref:
        """Return an output with the strides that its readers expect: see ``local_meta``."""
        local = self.get(value, placement)
        whole, have = self.values[value], self.build.meta(local)
        assert whole is not None
        stride = contiguous_stride(have.shape) if isinstance(placement, Cut) else whole.stride
        if len(stride) != len(have.shape) or have.conj or have.neg or have.lies_as(stride):
            return local
        return self.build.restrided(local, stride)

    def _final(self, value: int, wanted: Mapping[int, Placement]) -> Placement:
        if value in wanted:
            return wanted[value]
        if next(iter(self.have[value])) == R:
            return R  # it is whole at no cost: blocks would lead where nobody asked for them
        base = self._base(value)
        if not isinstance(base, Partial | StridedShard):
            return base
        candidates = (la for la in self.have[value] if not isinstance(la, Partial | StridedShard))
        meta = self.values[value]
        assert meta is not None
        home = R if isinstance(base, StridedShard) else self.choice.gradients.get(meta.shape, R)
        return next(candidates, home)

    def _from(self, number: int) -> None:
        """Give the nodes added since the last call the source line of node ``number``."""
        added = len(self.build.nodes) - len(self.origins)
        self.origins += [self.graph.origin(number)] * added
        self.lines += [self.graph.line(number)] * added
