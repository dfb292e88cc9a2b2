"""Every strategy of an op against eager torch: blocks in, local programs in lockstep, results put
together as the placements say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from operator import itemgetter
from typing import Any

import torch

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.collectives import rows_payload
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref, verify
from lazygt.graph.ops import OPAQUE_RESULTS
from lazygt.graph.placement import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    EXCHANGES_OF_ROWS,
    REDUCE_SCATTER,
    Partial,
    Replicate,
    Shard,
    StridedShard,
)
from lazygt.passes.sharding.choose.catalogue import strided_strategies
from lazygt.passes.sharding.lower.builder import Builder
from lazygt.passes.sharding.rules import Collective, Strategy, slicing, strategies_of
from lazygt.passes.sharding.rules.strategy import Call, lower_strategy
from tests.passes.sharding.rules.blocks import Tensor, blocks, joined
from tests.passes.sharding.rules.lockstep import AXIS, lockstep, run_node

PARTS = (2, 3, 4)
#: outer, inner and widths of interleaved placements
INTERLEAVED = (
    *((2, 1, ()), (3, 1, ()), (4, 1, ()), (1, 2, ()), (2, 2, ())),
    *((3, 1, (2, 1)), (4, 1, (1, 2, 1)), (5, 1, (1, 4))),
)
#: Results that are places of elements, of which torch leaves open those of equal elements.
PLACES = {f"aten.{op}": (1,) for op in ("topk.default", "kthvalue.default", "median.dim")}
#: Ops whose kernels make mean and variance in one pass.
WELFORD = {f"aten.{op}" for op in (
    "var_mean.correction", "std_mean.correction", "native_layer_norm.default",
    "native_layer_norm_backward.default", "native_group_norm.default",
    "native_group_norm_backward.default")}  # fmt: skip
#: What rounding of subnormal numbers may lose.
SMALLEST = 8 * torch.finfo(torch.float64).smallest_normal * torch.finfo(torch.float64).eps


class Case:
    """One call of an op on whole tensors.

    Args:
        op: overload name without ``aten.``.
        args, kwargs: tensors where the node has values.
        params: run-time numbers, for Param among the arguments.
        writing: see ``Builder.node``.
        shapes_only: results whose numbers mean nothing, such as those of ``empty``.
    """

    def __init__(
        self,
        op: str,
        *args: Any,
        params: Sequence[Any] = (),
        writing: bool = False,
        shapes_only: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        self.tensors: list[Tensor] = []
        self.params, self.shapes_only = tuple(params), set(shapes_only)
        args, kwargs = self._values(args), {k: self._values(v) for k, v in kwargs.items()}
        kinds = [type(param).__name__ for param in self.params]
        build = Builder(
            [TensorMeta.of(t) for t in self.tensors], kinds, axis=AXIS, parts=1, index=0
        )
        if op == WRITE_BACK:
            build.add(Node(op, args, (), (build.metas[0],)))
        else:
            build.node(f"aten.{op}", args, tuple(kwargs.items()), writing)
        (self.node,) = build.nodes
        self.metas = list(build.metas)
        self.kinds = kinds

    @staticmethod
    def of_node(graph: Graph, node: Node, values: list[Any], params: Sequence[Any]) -> Case:
        """A node of a graph, with what was computed of the graph's values."""
        case = object.__new__(Case)
        case.tensors, case.params, case.shapes_only = values, tuple(params), set()
        case.node, case.metas, case.kinds = node, list(graph.values), list(graph.params)
        return case

    def _values(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            self.tensors.append(arg)
            return Ref(len(self.tensors) - 1)
        if isinstance(arg, (list, tuple)):
            return tuple(self._values(item) for item in arg)
        return arg

    @cached_property
    def expected(self) -> list[Tensor | None]:
        """What eager torch gives: the fresh results, then the new versions of what is written.

        Run once for all strategies.
        """
        return run_node(self.node, self.tensors, self.params)

    def strategies(self, parts: int) -> tuple[Strategy, ...]:
        """All strategies of the op."""
        return strategies_of(self.node, self.metas, parts)

    def interleaved(self, parts: int) -> list[Strategy]:
        """The strategies that take operands interleaved, in several ways."""
        strategies, refs = self.strategies(parts), self.node.refs()
        found = {}
        for strategy in strategies:
            for place, placement in enumerate(strategy.inputs):
                if not isinstance(placement, Shard):
                    continue
                size = self.metas[refs[place]].shape[placement.dim]
                for outer, inner, widths in INTERLEAVED:
                    if size % (outer * inner) == 0 and size > outer * inner:
                        wanted = StridedShard(placement.dim, outer, inner, widths)
                        made = strided_strategies(
                            self.node, self.metas, parts, strategies, place, wanted
                        )
                        found.update({(one.inputs, one.outputs): one for one in made})
        return [*found.values(), *self._put_among(parts)]

    def _put_among(self, parts: int) -> list[Strategy]:
        """The strategies that put a gradient into a dim that is interleaved."""
        if self.node.op not in slicing.PUTS_AMONG:
            return []
        call = Call(self.node, self.metas, parts)
        shape = call.result().shape
        wanted = [
            StridedShard(dim, outer, inner, widths)
            for dim, size in enumerate(shape)
            for outer, inner, widths in INTERLEAVED
            if size % outer == 0
        ]
        made = [slicing.put_among(call, placement) for placement in wanted]
        return [strategy for strategy in made if strategy is not None]

    def check(self, parts: int, strategy: Strategy) -> None:
        """Assert that one strategy is right."""
        assert len(strategy.inputs) == len(self.node.refs())
        assert len(strategy.outputs) == len(self.node.results)
        self._written_labels(strategy)
        graphs, blocks = self.local(parts, strategy)
        for of_rank in met(graphs):
            assert of_rank == sorted(map(str, strategy.comm)), f"{self.node.op}: {strategy.comm}"
        got = lockstep(graphs, blocks, self.params)
        expected = self.expected
        for number, (want, placement) in enumerate(zip(expected, strategy.outputs, strict=True)):
            if want is None:
                continue
            pieces = [values.pop(0) for values in got]
            if number in OPAQUE_RESULTS.get(self.node.op, ()):
                continue  # only the op's own backward could make anything of it
            if number in self.shapes_only:
                pieces = [torch.zeros_like(piece) for piece in pieces]
                want = torch.zeros_like(want)
            made = joined(pieces, placement, tuple(want.shape), parts)
            what = f"{self.node.op} result {number}, {parts} ranks, strategy {strategy}"
            assert made.dtype == want.dtype, f"{what}: {made.dtype} instead of {want.dtype}"
            if number in PLACES.get(self.node.op, ()):
                made, want = (self._elements(places) for places in (made, want))
            self._assert_close(made, want, strategy, what)

    def _elements(self, places: Tensor) -> Tensor:
        """The elements at places along the dim of the op; equal ones are as good."""
        (value,), call = self.tensors, Call(self.node, self.metas, 1)
        dim = call.dim("dim", value.dim())
        kept = places if places.dim() == value.dim() else places.unsqueeze(dim)
        return value.gather(dim, kept)

    def _assert_close(self, made: Tensor, want: Tensor, strategy: Strategy, what: str) -> None:
        """Rounding is all that may differ: relative to the largest number of the result, or to 1
        where operands are not all smaller."""
        operands = [self.tensors[number] for number in self.node.refs()]
        close = 5e-4 if torch.float32 in {t.dtype for t in operands} else 1e-9
        if self._is_nan_or_infinite(strategy):
            is_finite = want.isfinite()
            assert torch.equal(made.isfinite(), is_finite), f"{what}: {made} instead of {want}"
            made, want = made[is_finite], want[is_finite]
        real = [t for t in operands if t.is_floating_point() or t.is_complex()]
        largest = max((largest_of(t) or 1.0 for t in real), default=1.0)  # zeros have summands
        unit = max(largest_of(want), min(1.0, largest))
        torch.testing.assert_close(
            made, want, equal_nan=True, rtol=close, atol=close * unit + SMALLEST,
            msg=partial(_told, what),
        )  # fmt: skip

    def _is_nan_or_infinite(self, strategy: Strategy) -> bool:
        """Whether a result that is not finite may be NaN or infinite.

        A factor that applies to summands makes ``a/0 + b/0``, which is NaN where ``(a + b)/0`` may
        be infinite. The moving mean of Welford's algorithm is NaN after an infinite element, and
        infinite where that is the last.
        """
        return Partial("sum") in strategy.inputs or self.node.op in WELFORD

    def _written_labels(self, strategy: Strategy) -> None:
        """A written operand and its new version have the same placement; but for what is written
        over, of which ranks had parts."""
        if self.node.op == "aten.copy_.default" and isinstance(strategy.inputs[0], Partial):
            assert strategy.outputs[0] in (strategy.inputs[0], Replicate())
            return
        versions = strategy.outputs[len(self.node.fresh) :]
        for target, placement in zip(self.node.writes, versions, strict=True):
            places = [i for i, number in enumerate(self.node.refs()) if number == target]
            assert any(strategy.inputs[i] == placement for i in places), (
                f"{self.node.op}: {strategy}"
            )

    def local(self, parts: int, strategy: Strategy) -> tuple[list[Graph], list[list[Tensor]]]:
        """Each rank's graph for a strategy, and its operands."""
        operands = [self.tensors[number] for number in self.node.refs()]
        cut = [
            blocks(t, placement, parts)
            for t, placement in zip(operands, strategy.inputs, strict=True)
        ]
        graphs, mine = [], []
        for rank in range(parts):
            mine.append([pieces[rank] for pieces in cut])
            metas = [TensorMeta.of(t) for t in mine[-1]]
            build = Builder(metas, self.kinds, axis=AXIS, parts=parts, index=rank)
            results = lower_strategy(
                build, strategy, self.node, [Ref(i) for i in range(len(operands))]
            )
            graph = build.graph([value for value in results if value is not None])
            verify(graph)
            graphs.append(graph)
        return graphs, mine


def largest_of(value: Tensor) -> float:
    """The largest finite magnitude."""
    if not (value.is_floating_point() or value.is_complex()) or not value.numel():
        return 0.0
    return float(value.abs().double().nan_to_num(0, 0, 0).max())


#: What goes from rank to rank is more for some than for others.
_OF_ROWS = ("send_recv", "take_rows", "put_rows")
_REDUCE_OPS = {ALL_REDUCE: itemgetter(1), REDUCE_SCATTER: itemgetter(2)}


def met(graphs: Sequence[Graph]) -> list[list[str]]:
    """The collectives in each rank's graph, as a strategy says them, sorted; of rows that go from
    rank to rank those of the rank that sends most."""
    ranks = [
        [_collective(graph, node) for node in graph.nodes if node.op in COLLECTIVES]
        for graph in graphs
    ]
    most = [max(each, key=lambda one: one.nbytes) for each in zip(*ranks, strict=True)]
    return [
        sorted([
            str(largest if one.kind in _OF_ROWS else one)
            for one, largest in zip(mine, most, strict=True)
        ])
        for mine in ranks
    ]  # fmt: skip


def _collective(graph: Graph, node: Node) -> Collective:
    payload = node.results[0] if node.op == ALL_GATHER else graph.values[node.args[0].index]
    assert payload is not None
    nbytes = payload.nbytes
    if node.op in EXCHANGES_OF_ROWS:
        nbytes = rows_payload([graph.values[value] for value in node.refs()])
    reduce_op = _REDUCE_OPS.get(node.op, lambda args: "sum")(node.args)
    return Collective(node.op.removeprefix("lazygt."), nbytes, reduce_op)


def _told(what: str, message: str) -> str:
    return f"{what}: {message}"


def check(case: Case, parts: int) -> None:
    """Assert that all strategies of a call are right."""
    for strategy in (*case.strategies(parts), *case.interleaved(parts)):
        case.check(parts, strategy)
