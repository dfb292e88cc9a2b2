"""Every row of an op against eager torch: blocks in, local programs in lockstep, results put
together as the labels say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.label import (
    ALL_GATHER,
    ALL_REDUCE,
    MEETINGS,
    REDUCE_SCATTER,
    Interleaved,
    Sharded,
)
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Ref
from lazygt.graph.ops import OPAQUE_RESULTS
from lazygt.graph.verify import verify
from lazygt.passes.build import Builder
from lazygt.passes.rules import Collective, Row, rows_of
from lazygt.passes.rules.base import lower_row
from lazygt.passes.rules.interleaved import interleaved_rows
from tests.passes.rules.blocks import Tensor, blocks, joined
from tests.passes.rules.lockstep import AXIS, lockstep, run_node

PARTS = (2, 3, 4)


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

    def expected(self) -> list[Tensor | None]:
        """What eager torch gives: the fresh results, then the new versions of what is written."""
        return run_node(self.node, self.tensors, self.params)

    def rows(self, parts: int) -> tuple[Row, ...]:
        """All rows of the op."""
        return rows_of(self.node, self.metas, parts)

    def interleaved(self, parts: int) -> list[Row]:
        """The rows that take operands interleaved, in several ways."""
        rows, refs = self.rows(parts), self.node.refs()
        found = {}
        for row in rows:
            for place, label in enumerate(row.inputs):
                if not isinstance(label, Sharded):
                    continue
                size = self.metas[refs[place]].shape[label.dim]
                for outer, inner in ((2, 1), (3, 1), (4, 1), (1, 2), (2, 2)):
                    if size % (outer * inner) == 0 and size > outer * inner:
                        wanted = Interleaved(label.dim, outer, inner)
                        made = interleaved_rows(self.node, self.metas, parts, rows, place, wanted)
                        found.update({(one.inputs, one.outputs): one for one in made})
        return list(found.values())

    def check(self, parts: int, row: Row) -> None:
        """Assert that one row is right."""
        assert len(row.inputs) == len(self.node.refs())
        assert len(row.outputs) == len(self.node.results)
        self._written_labels(row)
        graphs, blocks = self.local(parts, row)
        for graph in graphs:
            assert met(graph) == sorted(map(str, row.comm)), f"{self.node.op}: {row.comm}"
        got = lockstep(graphs, blocks, self.params)
        expected = self.expected()
        for number, (want, label) in enumerate(zip(expected, row.outputs, strict=True)):
            if want is None:
                continue
            pieces = [values.pop(0) for values in got]
            if number in OPAQUE_RESULTS.get(self.node.op, ()):
                continue  # only the op's own backward could make anything of it
            if number in self.shapes_only:
                pieces = [torch.zeros_like(piece) for piece in pieces]
                want = torch.zeros_like(want)
            made = joined(pieces, label, tuple(want.shape), parts)
            what = f"{self.node.op} result {number}, {parts} ranks, row {row}"
            assert made.dtype == want.dtype, f"{what}: {made.dtype} instead of {want.dtype}"
            dtypes = {self.tensors[number].dtype for number in self.node.refs()}
            close = 5e-4 if torch.float32 in dtypes else 1e-9
            torch.testing.assert_close(
                made, want, equal_nan=True, rtol=close, atol=close, msg=partial(_told, what)
            )

    def _written_labels(self, row: Row) -> None:
        """A written operand and its new version have the same label."""
        versions = row.outputs[len(self.node.fresh) :]
        for target, label in zip(self.node.writes, versions, strict=True):
            places = [i for i, number in enumerate(self.node.refs()) if number == target]
            assert any(row.inputs[i] == label for i in places), f"{self.node.op}: {row}"

    def local(self, parts: int, row: Row) -> tuple[list[Graph], list[list[Tensor]]]:
        """Each rank's graph for a row, and its operands."""
        operands = [self.tensors[number] for number in self.node.refs()]
        cut = [blocks(t, label, parts) for t, label in zip(operands, row.inputs, strict=True)]
        graphs, mine = [], []
        for rank in range(parts):
            mine.append([pieces[rank] for pieces in cut])
            metas = [TensorMeta.of(t) for t in mine[-1]]
            build = Builder(metas, self.kinds, axis=AXIS, parts=parts, index=rank)
            results = lower_row(build, row, self.node, [Ref(i) for i in range(len(operands))])
            graph = build.graph([value for value in results if value is not None])
            verify(graph)
            graphs.append(graph)
        return graphs, mine


_REDUCE_OPS = {ALL_REDUCE: itemgetter(1), REDUCE_SCATTER: itemgetter(2)}


def met(graph: Graph) -> list[str]:
    """The collectives in a rank's graph, as a row says them, sorted."""
    metas, found = graph.values, []
    for node in graph.nodes:
        if node.op in MEETINGS:
            kind = node.op.removeprefix("lazygt.")
            payload = node.results[0] if node.op == ALL_GATHER else metas[node.args[0].index]
            assert payload is not None
            reduce_op = _REDUCE_OPS.get(node.op, lambda args: "sum")(node.args)
            found.append(str(Collective(kind, payload.nbytes, reduce_op)))
    return sorted(found)


def _told(what: str, message: str) -> str:
    return f"{what}: {message}"


def check(case: Case, parts: int) -> None:
    """Assert that all rows of a call are right."""
    for row in (*case.rows(parts), *case.interleaved(parts)):
        case.check(parts, row)
