"""What an annotation of a value means for the values that are made of it, and for those who use it.

A pin holds for the whole step: a view or a cast of a pinned value is pinned to the label that it
has then. What is computed elementwise from stored values alone (a cast, the sum of two weights) is
stored itself: it is computed on the blocks, and gathered to be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.label import COLLECTIVE_OPS, Interleaved, Label
from lazygt.graph.node import Graph, Node
from lazygt.passes.base import view_source
from lazygt.passes.rules import pointwise
from lazygt.passes.rules.base import Metas
from lazygt.passes.sharding.catalogue import Entry
from lazygt.passes.sharding.places import PLACE

_COPIES = frozenset({"aten._to_copy.default", "aten.clone.default"})


@dataclass(frozen=True, slots=True)
class Annotation:
    """The label of a value.

    Attributes:
        kind: of an input, **given**: it is stored so, and may be moved at its cost; **stored**:
            the same, but ops that ``takes_whole`` names gather it (FSDP); **free**: it is not
            stored yet, the label is preferred where others cost the same. **pinned**: it is
            stored, or made, and used so and not otherwise. For a value that an op makes, given
            and free are wishes: they open rows.
    """

    label: Label
    kind: Literal["given", "stored", "free", "pinned"] = "given"


def follow(
    graph: Graph,
    metas: Metas,
    entries: Sequence[Entry],
    numbers: Sequence[int],
    annotations: Mapping[int, Annotation],
) -> dict[int, Annotation]:
    """The annotations, and those that follow from them.

    Args:
        entries: the rows of each kind of node.
        numbers: the kind of each node.
    """
    found = dict(annotations)
    for (node, results), number in zip(graph.numbered(), numbers, strict=True):
        refs = node.refs()
        if not (refs and results) or node.dynamic or found.keys().isdisjoint(refs):
            continue
        made = _made(node, metas, entries[number], found)
        for value, annotation in zip(results, made, strict=False):
            found.setdefault(value, annotation)
    return found


def _made(
    node: Node, metas: Metas, entry: Entry, known: Mapping[int, Annotation]
) -> Sequence[Annotation]:
    """The annotations of a node's results; none where nothing follows."""
    first = known.get(node.refs()[0])
    if first is not None and first.kind == "pinned" and moves_elements(node):
        rows = {row.outputs for row in entry.rows if row.inputs == (first.label,) and not row.comm}
        labels = rows.pop() if len(rows) == 1 else ()
        interleaved = any(isinstance(label, Interleaved) for label in labels)
        return () if interleaved else [Annotation(label, "pinned") for label in labels]
    if is_elementwise(node, metas):
        each = {known.get(value) for value in node.refs() if not _is_number(metas, value)}
        found = each.pop() if len(each) == 1 else None
        return () if found is None or found.kind != "stored" else (found,)
    return ()


def moves_elements(node: Node) -> bool:
    """Whether a node gives its one operand's elements, in whatever order or dtype."""
    if len(node.refs()) != 1 or node.op == PLACE:
        return False
    return node.op in _COPIES or node.op in COLLECTIVE_OPS or view_source(node) is not None


def is_elementwise(node: Node, metas: Metas) -> bool:
    """Whether a pure node computes each element from the operands' elements at its place.

    Operands have the shape of the result, or a single element.
    """
    if len(node.fresh) != 1 or node.writes or not node.refs() or node.op.startswith("lazygt."):
        return False
    (made,) = node.fresh
    if made is None or not (pointwise.is_pointwise(node.op) or node.op in pointwise.RULES):
        return False
    operands = [metas[value] for value in node.refs()]
    return all(
        meta is not None and (meta.shape == made.shape or meta.numel == 1) for meta in operands
    )


def takes_whole(node: Node, value: int, metas: Metas) -> bool:
    """Whether a stored operand is gathered for a node.

    What writes it (an optimizer), and what computes elementwise or from it alone, takes blocks.
    """
    if value in node.writes or node.op in (PLACE, WRITE_BACK) or is_elementwise(node, metas):
        return False
    return len(node.refs()) > 1 or moves_elements(node)


def _is_number(metas: Metas, value: int) -> bool:
    meta = metas[value]
    return meta is not None and meta.numel == 1
