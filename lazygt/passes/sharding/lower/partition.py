"""Local programs of the ranks of one mesh axis, from the chosen strategies and placements.

Every rank of the axis gets a graph of its own, since shards may differ in size. All ranks run the
same collectives in the same order, because their graphs are written by the same walk over the same
global graph. A collective is inserted where a placement changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lazygt.graph.meta import TensorMeta, contiguous_stride
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.graph.placement import Cut, Partial, Placement, Replicate, StridedShard, local_meta
from lazygt.passes.sharding.lower.builder import Builder, with_operands
from lazygt.passes.sharding.rules.strategy import Strategy, lower_strategy

R = Replicate()


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen strategies and placements of a graph on one axis."""

    strategies: Sequence[Strategy]  # of each node
    #: value -> the placements provided for its users, in order of conversion; any other value is
    #: used with the placement that it was produced with
    provided: Mapping[int, tuple[Placement, ...]]
    inputs: Sequence[Placement]  # the placement of each input
    #: shape -> the placement for partial outputs of that shape, such as gradients of sharded
    #: parameters; other partial outputs are all-reduced
    gradients: Mapping[tuple[int, ...], Placement] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LocalProgram:
    """Local program of one rank of an axis, with the placement of each of its outputs."""

    graph: Graph
    outputs: tuple[Placement, ...]
    #: for each value of the global program: placement -> number of the local value with that
    #: placement; the placement that it was produced with is the first
    values: tuple[Mapping[Placement, int], ...] = ()
    is_rank_independent: bool = False  # whether every rank of the axis has the same program
    #: whether requesting ``outputs`` as the wanted placements gives the same program
    settled: bool = False


def partition(
    graph: Graph,
    choice: Choice,
    axis: str,
    axis_size: int,
    index: int,
    wanted: Mapping[int, Placement] | None = None,
) -> LocalProgram:
    """Return the program of rank ``index`` of ``axis_size`` on ``axis``.

    Args:
        wanted: output value -> its required placement. Other outputs have the placement that they
            were produced with; partial ones are reduced, see ``Choice.gradients``.
    """
    return _Partitioner(graph, choice, axis, axis_size, index).run(wanted or {})


class _Partitioner:
    """Writer of the local graph of one rank, in one walk over the global graph."""

    def __init__(self, graph: Graph, choice: Choice, axis: str, axis_size: int, index: int) -> None:
        self.graph, self.choice, self.values = graph, choice, graph.values
        placed_inputs = list(zip(graph.inputs, choice.inputs, strict=True))
        metas = [local_meta(meta, placement, axis_size, index) for meta, placement in placed_inputs]
        self.build = Builder(metas, graph.params, axis=axis, parts=axis_size, index=index)
        # the builder records whether shard sizes differ between ranks
        for meta, placement in placed_inputs:
            self.build.local(meta.shape, placement)
        #: value -> placement -> the local value
        self.local_values: list[dict[Placement, Ref]] = [
            {placement: ref(number)} for number, placement in enumerate(choice.inputs)
        ]
        self.lines: list[str] = []
        self.origins: list[int] = []
        self.settled = False

    def run(self, wanted: Mapping[int, Placement]) -> LocalProgram:
        """Return the local program; ``wanted`` as in ``partition``."""
        placements: tuple[Placement, ...] = ()
        outputs: list[Ref] = []
        for number, (node, strategy) in enumerate(
            zip(self.graph.nodes, self.choice.strategies, strict=True)
        ):
            if node.dynamic:  # stays the last node, so all outputs are converted before it
                placements, outputs = self._outputs(wanted)
            operands = [
                self.get(v, placement)
                for v, placement in zip(node.refs(), strategy.inputs, strict=True)
            ]
            results = self._add_node(node, strategy, operands)
            for result, placement in zip(results, strategy.outputs, strict=True):
                self.local_values.append({} if result is None else {placement: result})
            self._set_source_lines(number)
        if len(placements) < len(self.graph.outputs):
            placements, outputs = self._outputs(wanted)
        self._set_source_lines(max(len(self.graph.nodes) - 1, 0))
        local_graph = self.build.graph(outputs)
        graph = replace(local_graph, lines=tuple(self.lines), origins=tuple(self.origins))
        is_rank_independent = not self.build.differs
        return LocalProgram(
            graph, placements, self._value_numbers(), is_rank_independent, self.settled
        )

    def _value_numbers(self) -> tuple[Mapping[Placement, int], ...]:
        """Return ``LocalProgram.values``."""
        return tuple(
            [
                {placement: local.index for placement, local in placements.items()}
                for placements in self.local_values
            ]
        )

    def _add_node(
        self, node: Node, strategy: Strategy, operands: Sequence[Ref]
    ) -> Sequence[Ref | None]:
        """Add the local nodes of a node, on operands placed as its strategy requires."""
        if strategy.lower is None and (node.op.startswith("lazygt.") or node.dynamic):
            return self._add_unsharded(node, operands)
        return lower_strategy(self.build, strategy, node, operands)

    def _add_unsharded(self, node: Node, operands: Sequence[Ref]) -> Sequence[Ref | None]:
        """Add a node without a schema, or with dynamic results, on replicated operands."""
        args, kwargs = with_operands(node, operands)
        local_operands = dict(zip(node.refs(), operands, strict=True))
        writes = tuple(local_operands[value].index for value in node.writes)
        return self.build.add(
            Node(node.op, args, kwargs, node.fresh, writes, node.written, node.dynamic)
        )

    def get(self, value: int, placement: Placement) -> Ref:
        """Return a value with a placement; convert it if needed."""
        converted = self.local_values[value]
        local = converted.get(placement)
        if local is not None:
            return local
        base = self._base_placement(value)
        source = R if R in converted else base
        local = converted[placement] = self._converted(value, source, placement)
        return local

    def _converted(self, value: int, have: Placement, want: Placement) -> Ref:
        """Return a value converted from a placement that it has to another."""
        local = self.local_values[value][have]
        return self.build.convert(local, self._meta(value).shape, have, want)

    def _meta(self, value: int) -> TensorMeta:
        """Return the global meta of a value."""
        meta = self.values[value]
        assert meta is not None
        return meta

    def _base_placement(self, value: int) -> Placement:
        """Return the first placement provided for a value's users; convert the value if needed."""
        converted = self.local_values[value]
        produced = next(iter(converted))
        provided = self.choice.provided.get(value)
        if provided and provided[0] not in converted:
            converted[provided[0]] = self._converted(value, produced, provided[0])
        return provided[0] if provided else produced

    def _outputs(self, wanted: Mapping[int, Placement]) -> tuple[tuple[Placement, ...], list[Ref]]:
        """Return the placements of the graph's outputs, and the local output values."""
        before = len(self.build.nodes)
        placements = tuple([self._output_placement(value, wanted) for value in self.graph.outputs])
        self.settled = len(self.build.nodes) == before
        return placements, [
            self._restrided_output(value, placement)
            for value, placement in zip(self.graph.outputs, placements, strict=True)
        ]

    def _restrided_output(self, value: int, placement: Placement) -> Ref:
        """Return an output with the strides that its readers expect; see ``local_meta``."""
        local = self.get(value, placement)
        actual = self.build.meta(local)
        is_cut = isinstance(placement, Cut)
        stride = contiguous_stride(actual.shape) if is_cut else self._meta(value).stride
        if (
            len(stride) != len(actual.shape)
            or actual.conj
            or actual.neg
            or actual.has_same_layout(stride)
        ):
            return local
        return self.build.restrided(local, stride)

    def _output_placement(self, value: int, wanted: Mapping[int, Placement]) -> Placement:
        """Return the placement of an output: neither partial nor interleaved."""
        if value in wanted:
            return wanted[value]
        if next(iter(self.local_values[value])) == R:
            return R  # replicated at no cost: no reason to shard
        base = self._base_placement(value)
        if not isinstance(base, Partial | StridedShard):
            return base
        candidates = (
            placement
            for placement in self.local_values[value]
            if not isinstance(placement, Partial | StridedShard)
        )
        shape = self._meta(value).shape
        fallback = R if isinstance(base, StridedShard) else self.choice.gradients.get(shape, R)
        return next(candidates, fallback)

    def _set_source_lines(self, number: int) -> None:
        """Give the nodes added since the last call the source line of node ``number``."""
        added = len(self.build.nodes) - len(self.origins)
        self.origins += [self.graph.origin(number)] * added
        self.lines += [self.graph.line(number)] * added
