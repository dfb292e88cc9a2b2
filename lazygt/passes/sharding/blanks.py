"""Memory that nobody has written yet."""

from __future__ import annotations

from dataclasses import replace

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Graph, Node


def is_blank(node: Node) -> bool:
    """Whether a node makes memory that nobody has written yet."""
    return ".empty" in node.op or ".new_empty" in node.op


def blank(meta: TensorMeta) -> Node:
    """The node that makes such memory."""
    kwargs = (("dtype", meta.dtype), ("device", DEVICE))
    return Node("aten.empty_strided.default", (meta.shape, meta.stride), kwargs, (meta,))


def unlikened(graph: Graph) -> Graph:
    """The graph in which such memory is made of its shape, not in the likeness of a value."""
    nodes = list(graph.nodes)
    for number, node in enumerate(nodes):
        if is_blank(node) and node.refs() and (meta := node.fresh[0]) is not None:
            nodes[number] = blank(meta)
    return replace(graph, nodes=tuple(nodes))
