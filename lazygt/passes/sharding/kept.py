"""What is said of the values of a program: where they are kept, as placements and inputs tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.label import Anyhow, Label, Replicated, Sharded
from lazygt.graph.mesh import Mesh, Stored
from lazygt.graph.node import Graph, Node, Ref, ref
from lazygt.passes.build import Builder
from lazygt.passes.rules.base import Row, Values, splittable
from lazygt.passes.rules.views import PARTIALS
from lazygt.passes.sharding.annotations import Annotation
from lazygt.passes.sharding.places import ENTER, PLACE, stored_by

R = Replicated()


def kept_values(graph: Graph, mesh: Mesh, inputs: Sequence[Stored]) -> dict[int, Stored]:
    """The values with a place of their own: inputs, those that were placed, what is made of
    nothing (a weight before its first values), and new versions of all these."""
    found = dict(enumerate(inputs))
    whole = Stored((R,) * len(mesh.names))
    for node, results in graph.numbered():
        if node.op == PLACE:
            found[results[0]] = stored_by(node)
        elif node.op == ENTER and node.args[0].index in found:
            found[results[0]] = found[node.args[0].index]
        elif not node.refs():
            found.update(dict.fromkeys(results, whole))
        targets = node.args[:1] if node.op == WRITE_BACK else map(ref, node.writes)
        versions = results if node.op == WRITE_BACK else results[len(node.fresh) :]
        for target, version in zip(targets, versions, strict=False):
            if target.index in found:
                found[version] = found[target.index]
    return found


def annotations_on(
    graph: Graph, kept: Mapping[int, Stored], mesh: Mesh, at: int
) -> dict[int, Annotation]:
    """What the user has said of a graph's values, for one axis."""
    found = {}
    for value, each in kept.items():
        label = each.labels[at]
        if isinstance(label, Anyhow):
            continue
        if each.unit is not None and each.unit.axis == mesh.names[at] and label != R:
            found[value] = Annotation(label, "stored")
        elif each.pinned:
            found[value] = Annotation(label, "pinned")
        elif value < len(graph.inputs) and label != R:
            found[value] = Annotation(label)
    for node, results in graph.numbered():
        label = kept[results[0]].labels[at] if node.op == PLACE else Anyhow()
        if not isinstance(label, Anyhow):
            found.setdefault(results[0], Annotation(label, "free"))
    return found


def place_rows(node: Node, at: int) -> Sequence[Row]:
    """The rows of a placement on axis number ``at``.

    One in blocks is made right here: what stands behind it can then cut them again on another axis.
    """
    (meta,) = node.fresh
    assert meta is not None
    wanted = stored_by(node).labels[at]
    labels: list[Label] = [R, *(Sharded(dim) for dim in splittable(meta.shape))]
    if isinstance(wanted, Sharded):
        labels = [wanted]
    elif isinstance(wanted, Anyhow):
        labels += PARTIALS
    return [Row((label,), (label,), _place_here) for label in labels]


def _place_here(build: Builder, node: Node, operands: Sequence[Ref]) -> Values:
    (value,) = operands
    return build.add(Node(PLACE, (value, *node.args[1:]), (), (build.meta(value),)))
