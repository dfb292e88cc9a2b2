"""Per-tensor slices (lanes) of horizontal ops: the work on one tensor of each list.

    _foreach_mul_([a, b], 0.9)               a.mul_(0.9)       b.mul_(0.9)
    _foreach_add_([a, b], [c, d])            a.add_(c)         b.add_(d)
                                             lane 0            lane 1

The lanes of a group are one program on vectors of several lengths, so compiled code for a few of
them serves every group of that program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from lazygt.graph.fusion import is_fusible, is_pointwise, numbers_of
from lazygt.graph.meta import TensorMeta, intern, typed_key
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, map_arg, ref

# -- forms of horizontal ops -----------------------------------------------------------------------
# ``aten._foreach_mul_.ScalarList([a, b], [2, 3])`` is ``a.mul_(2)`` and ``b.mul_(3)``. On a CPU
# torch runs the horizontal op as those calls, so both give the same bits.

EACH, ALL = "each", "all"


class ForeachForm(NamedTuple):
    """Correspondence of the arguments of a horizontal op and its op on one tensor."""

    wide: str  # the horizontal overload
    single: str  # the overload for one tensor
    #: for each positional argument of ``wide``: EACH, a list with one item for each tensor, or ALL,
    #: one argument for every tensor
    arg_kinds: tuple[str, ...]
    keyword: str = ""  # the keyword of ``single`` for the last positional argument of ``wide``

    def is_plain(self, node: Node) -> bool:
        """Return whether a node has one result for each tensor, in order, and no extra argument."""
        targets = tuple(arg.index for arg in node.args[0])
        count = len(targets)
        results = (
            node.writes == targets and not node.fresh if node.writes else len(node.fresh) == count
        )
        return results and len(node.args) <= len(self.arg_kinds)

    def narrow(
        self, args: tuple[Arg, ...], which: int
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Return the (args, kwargs) of ``single`` for tensor ``which``, from those of ``wide``."""
        # the last argument may be absent: it has a default
        arguments = tuple(
            arg[which] if kind is EACH else arg
            for kind, arg in zip(self.arg_kinds, args, strict=False)
        )
        if self.keyword and len(arguments) == len(self.arg_kinds):
            return arguments[:-1], ((self.keyword, arguments[-1]),)
        return arguments, ()

    def widen(
        self, calls: Sequence[tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]]
    ) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
        """Return the (args, kwargs) of ``wide``, from the calls of ``single`` on each tensor."""
        argument_lists = []
        for args, kwargs in calls:
            argument_lists.append(
                (*args, dict(kwargs).get(self.keyword, 1)) if self.keyword else args
            )
        shared = () if self.keyword else calls[0][1]
        return tuple(zip(*argument_lists, strict=True)), shared


def _forms() -> list[ForeachForm]:
    """Return the forms of all horizontal ops that have an op on one tensor."""
    unary, binary, ternary = (EACH,), (EACH, EACH), (EACH, EACH, EACH)
    forms = []
    for name in ("add", "sub", "mul", "div"):
        for end in ("", "_"):
            wide, single = f"aten._foreach_{name}{end}", f"aten.{name}{end}.Tensor"
            forms += [
                ForeachForm(f"{wide}.List", single, binary),
                ForeachForm(f"{wide}.ScalarList", single, binary),
                ForeachForm(f"{wide}.Scalar", single, (EACH, ALL)),
            ]
            if name != "sub":
                forms.append(ForeachForm(f"{wide}.Tensor", single, (EACH, ALL)))
    for name in ("addcmul", "addcdiv"):
        for end in ("", "_"):
            wide, single = f"aten._foreach_{name}{end}", f"aten.{name}{end}.default"
            forms += [
                ForeachForm(f"{wide}.ScalarList", single, (*ternary, EACH), keyword="value"),
                ForeachForm(f"{wide}.Scalar", single, (*ternary, ALL), keyword="value"),
            ]
    for end in ("", "_"):
        forms += [
            ForeachForm(f"aten._foreach_lerp{end}.ScalarList", f"aten.lerp{end}.Scalar", ternary),
            ForeachForm(
                f"aten._foreach_lerp{end}.Scalar", f"aten.lerp{end}.Scalar", (*binary, ALL)
            ),
            ForeachForm(f"aten._foreach_lerp{end}.List", f"aten.lerp{end}.Tensor", ternary),
            ForeachForm(
                f"aten._foreach_pow{end}.ScalarList", f"aten.pow{end}.{_POWER[end]}", binary
            ),
            ForeachForm(
                f"aten._foreach_pow{end}.Scalar", f"aten.pow{end}.{_POWER[end]}", (EACH, ALL)
            ),
        ]
        for name in _ONE_ARGUMENT:
            foreach, single = f"aten._foreach_{name}{end}.default", f"aten.{name}{end}.default"
            forms.append(ForeachForm(foreach, single, unary))
    return [
        *forms,
        ForeachForm("aten._foreach_maximum.List", "aten.maximum.default", binary),
        ForeachForm("aten._foreach_minimum.List", "aten.minimum.default", binary),
        ForeachForm("aten._foreach_zero_.default", "aten.zero_.default", unary),
        ForeachForm("aten._foreach_copy_.default", "aten.copy_.default", binary),
        ForeachForm("aten._foreach_norm.Scalar", "aten.linalg_vector_norm.default", (EACH, ALL)),
    ]


_POWER = {"": "Tensor_Scalar", "_": "Scalar"}
_ONE_ARGUMENT = ("abs", "sqrt", "neg", "exp", "log", "sign", "reciprocal", "rsqrt", "sigmoid",
                 "tanh", "round", "floor", "ceil")  # fmt: skip

#: Horizontal overload -> its form.
SPLIT: dict[str, ForeachForm] = {form.wide: form for form in _forms()}
#: (overload for one tensor, True if the horizontal one takes a list of numbers) -> form.
MERGE: dict[tuple[str, bool], ForeachForm] = {
    (form.single, form.wide.endswith(".ScalarList")): form
    for form in SPLIT.values()
    if ALL not in form.arg_kinds
}


# -- per-tensor slices -----------------------------------------------------------------------------

#: Number of lanes that one call of compiled code computes; the last call may have fewer.
LANES = 8


class Lanes(NamedTuple):
    """A group of horizontal ops, lane by lane."""

    lane: Graph  # the first lane's members
    #: for each lane the inputs of the body that are the lane's inputs
    operands: tuple[tuple[int, ...], ...]
    params: tuple[tuple[int, ...], ...]  # for each lane the numbers of the body that are the lane's
    #: for each output of the body its lane, and its position in the lane's outputs
    outputs: tuple[tuple[int, int], ...]
    length: int  # elements of a lane's tensors, on average


def lane_count(node: Node) -> int:
    """Return the number of per-tensor slices of a node; 0 for an op that has none."""
    form = SPLIT.get(node.op)
    if form is None or not form.is_plain(node) or not is_pointwise(form.single):
        return 0
    return len(node.args[0])


def slice_node(node: Node, index: int) -> Node:
    """Return the node on tensor ``index`` of a horizontal node."""
    form = SPLIT[node.op]
    args, kwargs = form.narrow(node.args, index)
    return Node(form.single, args, (*node.kwargs, *kwargs), node.fresh[index : index + 1],
                node.writes[index : index + 1], node.written[index : index + 1])  # fmt: skip


def lanes_of(
    body: Graph, row_major: Callable[[TensorMeta], bool] = TensorMeta.is_contiguous
) -> Lanes | None:
    """Return the per-tensor slices of a body; None if they differ, or an op is not horizontal.

    Args:
        row_major: predicate of a meta: the tensor has row-major strides in memory.
    """
    counts = {lane_count(node) for node in body.nodes}
    if len(counts) != 1 or 0 in counts:
        return None
    metas = body.values
    lanes = [_Lane(body, metas, which) for which in range(counts.pop())]
    output_positions: dict[int, None] = {}
    lane_values = {
        value: (lane.position, number) for lane in lanes for value, number in lane.numbers.items()
    }
    for value in body.outputs:
        if value not in lane_values:
            return None
        output_positions.setdefault(lane_values[value][1])
    graphs = [lane.graph(tuple(output_positions)) for lane in lanes]
    first = graphs[0]
    if len({_program(graph) for graph in graphs}) > 1:
        return None
    if not all(is_fusible(node, first.values) for node in first.nodes):
        return None
    if not all(_are_equal_vectors(graph, row_major) for graph in graphs):
        return None
    order = {number: position for position, number in enumerate(output_positions)}
    return Lanes(
        first,
        tuple(tuple(lane.operands) for lane in lanes),
        tuple(tuple(lane.params) for lane in lanes),
        tuple((lane_values[value][0], order[lane_values[value][1]]) for value in body.outputs),
        sum(graph.inputs[0].numel for graph in graphs) // len(graphs),
    )


class _Lane:
    """One per-tensor slice of a body, with values renumbered."""

    def __init__(self, body: Graph, metas: Sequence[TensorMeta | None], position: int) -> None:
        self.body, self.metas, self.position = body, metas, position
        self.nodes = [slice_node(node, position) for node in body.nodes]
        self.params = list(dict.fromkeys(p.index for n in self.nodes for _, p in numbers_of(n)))
        results = [values[position] for _, values in body.numbered()]
        read = dict.fromkeys(v for n in self.nodes for v in (*n.refs(), *n.writes))
        computed = set(results)
        self.operands = [value for value in read if value not in computed]
        #: value of the body -> value of the lane
        self.numbers = {value: number for number, value in enumerate([*self.operands, *results])}

    def graph(self, outputs: tuple[int, ...]) -> Graph:
        """Return the slice as a graph with these values of the slice as outputs."""
        nodes = [_renumbered(node, self.numbers, self.params.index) for node in self.nodes]
        inputs = tuple(meta for value in self.operands if (meta := self.metas[value]) is not None)
        kinds = tuple(self.body.params[index] for index in self.params)
        return Graph(inputs, kinds, tuple(nodes), outputs)


def _renumbered(node: Node, values: Mapping[int, int], param: Callable[[int], int]) -> Node:
    """Return a node with other numbers for its values and params."""

    def leaf(arg: Arg) -> Arg:
        if type(arg) is Ref:
            return ref(values[arg.index])
        return Param(param(arg.index)) if type(arg) is Param else arg

    kwargs = tuple((name, map_arg(arg, leaf)) for name, arg in node.kwargs)
    writes = tuple(values[value] for value in node.writes)
    return replace(node, args=map_arg(node.args, leaf), kwargs=kwargs, writes=writes)


def _program(graph: Graph) -> tuple[object, ...]:
    """Return everything of a slice but its sizes, as a key."""
    nodes = [(n.op, typed_key(n.args), typed_key(n.kwargs), n.writes) for n in graph.nodes]
    dtypes = [None if meta is None else meta.dtype for meta in graph.values]
    return graph.params, tuple(nodes), tuple(dtypes), len(graph.inputs)


def _are_equal_vectors(graph: Graph, row_major: Callable[[TensorMeta], bool]) -> bool:
    """Return whether all tensors of a slice can be seen as vectors of one length."""
    shape = graph.inputs[0].shape
    return 0 not in shape and all(
        meta is not None and meta.shape == shape and not (meta.conj or meta.neg) and row_major(meta)
        for meta in {*graph.values}
    )


# -- slices joined to one graph --------------------------------------------------------------------


def join_slices(lane: Graph, count: int, length: int) -> Graph:
    """Return the graph of ``count`` copies of a slice, one after another, on vectors of one length.

    Args:
        lane: the slice.
    """
    width, members = len(lane.inputs), len(lane.nodes)
    nodes: list[Node] = []
    outputs: list[int] = []
    for which in range(count):
        values = dict(enumerate([*range(which * width, (which + 1) * width),
                                 *range(count * width + which * members,
                                        count * width + (which + 1) * members)]))  # fmt: skip
        first = which * len(lane.params)
        nodes += [_renumbered(node, values, first.__add__) for node in lane.nodes]
        outputs += [values[value] for value in lane.outputs]
    return vectors(Graph(lane.inputs * count, lane.params * count, tuple(nodes), tuple(outputs)),
                   [length] * count)  # fmt: skip


def vectors(graph: Graph, lengths: Sequence[int]) -> Graph:
    """Return a graph of slices on vectors, one length for each slice in order."""

    def vector(meta: TensorMeta | None, length: int) -> TensorMeta:
        assert meta is not None
        return intern((length,), (1,), meta.dtype)

    width, members = len(graph.inputs) // len(lengths), len(graph.nodes) // len(lengths)
    inputs = tuple(vector(m, lengths[n // width]) for n, m in enumerate(graph.inputs))
    nodes = tuple(
        replace(
            node,
            fresh=tuple(vector(meta, lengths[number // members]) for meta in node.fresh),
            written=tuple(vector(meta, lengths[number // members]) for meta in node.written),
        )
        for number, node in enumerate(graph.nodes)
    )
    return replace(graph, inputs=inputs, nodes=nodes)


def merge_slices(graph: Graph, count: int) -> Graph:
    """Return a graph of ``count`` slices as one of horizontal ops: the inverse of ``lanes_of``."""
    first, members = len(graph.inputs), len(graph.nodes) // count
    values = dict(enumerate(range(first)))
    for number in range(len(graph.nodes)):
        values[first + number] = first + number % members * count + number // members
    nodes = [_renumbered(node, values, int) for node in graph.nodes]
    wide = tuple(_wide([nodes[n] for n in range(member, len(nodes), members)])
                 for member in range(members))  # fmt: skip
    return Graph(graph.inputs, graph.params, wide, tuple(values[v] for v in graph.outputs))


def _wide(nodes: Sequence[Node]) -> Node:
    """Return the horizontal node of the same op on several tensors."""
    op, last = nodes[0].op, nodes[0].args[-1]
    numbers = type(last) is not Ref or any(name == "value" for name, _ in nodes[0].kwargs)
    form = MERGE.get((op, numbers)) or MERGE[op, not numbers]
    args, kwargs = form.widen([(node.args, node.kwargs) for node in nodes])
    return Node(
        form.wide,
        args,
        kwargs,
        tuple(meta for node in nodes for meta in node.fresh),
        tuple(value for node in nodes for value in node.writes),
        tuple(meta for node in nodes for meta in node.written),
    )
