"""Horizontal ops on lists of tensors, the steps of optimizers: their rows, and how they come apart.

A row gives the tensors of a list the same label, those that can have it; the others are R. To
have each tensor choose for itself, unmerge the node first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lazygt.graph.label import Label, Sharded
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Ref
from lazygt.passes.base import Placed, placed, rebuild
from lazygt.passes.build import numbers
from lazygt.passes.forms import ALL, EACH, SPLIT, Form
from lazygt.passes.rules import pointwise, statistics
from lazygt.passes.rules.base import Call, Lower, Metas, R, Row, Rule, S, Values, lower_row

if TYPE_CHECKING:
    from lazygt.passes.build import Builder


#: Steps on whole lists of parameters.
FUSED_STEPS = frozenset(
    f"aten._fused_{name}.{which}"
    for name in ("adam_", "adamw_", "sgd_", "adagrad_")
    for which in ("default", "tensor_lr")
)
#: Horizontal ops to take apart: those that are merged again, and those of which nothing is gained.
FORMS = SPLIT | {
    form.wide: form
    for form in (
        Form("aten._foreach_maximum_.List", "aten.clamp_min_.Tensor", (EACH, EACH)),
        Form("aten._foreach_minimum_.List", "aten.clamp_max_.Tensor", (EACH, EACH)),
        Form("aten._foreach_clamp_min_.Scalar", "aten.clamp_min_.default", (EACH, ALL)),
        Form("aten._foreach_clamp_max_.Scalar", "aten.clamp_max_.default", (EACH, ALL)),
    )
}


def singles(node: Node) -> list[Node]:
    """The ops on one tensor that a horizontal op of ``FORMS`` stands for."""
    form = FORMS[node.op]
    made = []
    for which in range(len(node.args[0])):
        args, kwargs = form.narrow(node.args, which)
        kept = (*kwargs, *node.kwargs)
        fresh = node.fresh[which : which + 1]
        written = node.written[which : which + 1]
        made.append(Node(form.single, args, kept, fresh, node.writes[which : which + 1], written))
    return made


def are_apart(node: Node) -> bool:
    """Whether no tensor of a horizontal op reads or writes what is written as another one's."""
    for part in singles(node):
        others = list(node.writes)
        for value in part.writes:
            others.remove(value)
        if not set(others).isdisjoint((*part.refs(), *part.writes)):
            return False
    return True


def _horizontal(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """For each label that some tensor can have, the rows of all tensors put side by side."""
    if not are_apart(node):
        return []
    rule = statistics.RULES.get(FORMS[node.op].single, pointwise.rows)
    options: list[dict[Label, Row]] = []
    for single in singles(node):
        whole = Row((R,) * len(single.refs()), (R,) * len(single.results))
        rows = [whole, *rule(single, metas, parts)]
        options.append({row.inputs[0]: row for row in reversed(rows)})
    labels = dict.fromkeys(label for rows in options for label in rows if label != R)
    return [
        row for label in labels
        if (row := _side_by_side(node, [rows.get(label, rows[R]) for rows in options])) is not None
    ]  # fmt: skip


def _side_by_side(node: Node, rows: list[Row]) -> Row | None:
    inputs: list[Label] = []
    place = 0
    for kind, arg in zip(FORMS[node.op].takes, node.args, strict=False):
        if not numbers(arg):
            continue
        labels = [row.inputs[place] for row in rows]
        if kind != EACH and set(labels) != {R}:
            return None
        inputs += labels if kind == EACH else labels[:1]
        place += 1
    comm = [one for row in rows for one in row.comm]
    outputs = tuple(label for row in rows for label in row.outputs)
    return Row(tuple(inputs), outputs, _each(rows), tuple(comm))


def _each(rows: Sequence[Row]) -> Lower:
    def lower(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
        local = dict(zip(_positions(node), operands, strict=True))
        made: list[Ref | None] = []
        for which, (single, row) in enumerate(zip(singles(node), rows, strict=True)):
            mine = [local[place, which] if (place, which) in local else local[place, -1]
                    for place in _tensor_places(node)]  # fmt: skip
            made += lower_row(build, row, single, mine)
        return made

    return lower


def _tensor_places(node: Node) -> list[int]:
    return [place for place, arg in enumerate(node.args) if numbers(arg)]


def _positions(node: Node) -> list[tuple[int, int]]:
    """(argument, which of its list) of each of ``node.refs()``; -1: of no list."""
    found = []
    for place in _tensor_places(node):
        arg = node.args[place]
        found += [(place, which) for which in range(len(arg))] if type(arg) is tuple else [
            (place, -1)
        ]  # fmt: skip
    return found


def _fused(node: Node, metas: Metas, parts: int) -> Sequence[Row]:
    """Parameters, gradients and moments split alike; steps and learning rates stay whole."""
    call = Call(node, metas, parts)
    lists = {
        name: [meta for n in found if (meta := metas[n]) is not None]
        for name, arg in call.args.items()
        if type(arg) is tuple and (found := numbers(arg))
    }
    shapes = [meta.shape for meta in lists["self"]]
    rank = max(map(len, shapes), default=0)
    rows = []
    for dim in range(rank):
        labels = {name: _aligned(metas, shapes, dim) for name, metas in lists.items()}
        if S(dim) in labels["self"]:
            written = [_label_of(call, labels, value) for value in node.writes]
            rows.append(call.row(written, **labels))
    return rows


def _aligned(metas: list[TensorMeta], shapes: list[tuple[int, ...]], dim: int) -> list[Label]:
    return [
        Sharded(dim) if meta.shape == shape and dim < len(shape) and shape[dim] > 1 else R
        for meta, shape in zip(metas, shapes, strict=True)
    ]


def _label_of(call: Call, labels: dict[str, list[Label]], value: int) -> Label:
    for name, given in labels.items():
        found = numbers(call.args[name])
        if value in found:
            return given[found.index(value)]
    return R


class Unmerge:
    """One op a tensor, for the ops of ``FORMS`` and the fused steps of optimizers."""

    name = "unmerge"

    def run(self, graph: Graph) -> Graph:
        rows = [part for row in placed(graph) for part in _parts(row)]
        return graph if len(rows) == len(graph.nodes) else rebuild(graph, rows)


def _parts(row: Placed) -> Sequence[Placed]:
    node = row.node
    if node.op in FORMS:
        if not are_apart(node):
            return [row]
        pairs = zip(singles(node), row.results, strict=True)
        return [Placed(single, (result,), row.source) for single, result in pairs]
    if node.op in FUSED_STEPS and len(node.args[0]) > 1 and not node.dynamic:
        return [_step(row, which) for which in range(len(node.args[0]))]
    return [row]


def _step(row: Placed, which: int) -> Placed:
    """A fused step on one of its parameters."""
    node = row.node
    args = tuple([_one_of(arg, which) for arg in node.args])
    taken = {item for arg in args if type(arg) is tuple for item in arg}
    places = [place for place, value in enumerate(node.writes) if Ref(value) in taken]
    made = Node(
        node.op,
        args,
        node.kwargs,
        writes=tuple([node.writes[place] for place in places]),
        written=tuple([node.written[place] for place in places]),
    )
    return Placed(made, [row.results[place] for place in places], row.source)


def _one_of(arg: Arg, which: int) -> Arg:
    """The item of a list that belongs to a parameter; lists may be empty."""
    return arg[which : which + 1] if type(arg) is tuple else arg


RULES: dict[str, Rule] = {
    **dict.fromkeys(FORMS, _horizontal),
    **dict.fromkeys(FUSED_STEPS, _fused),
}
