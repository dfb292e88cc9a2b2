"""Computations as data: metas, nodes and graphs. No device, no worker, no I/O."""

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Param, Ref, print_graph
from lazygt.graph.text import parse_graph

__all__ = ["Graph", "Node", "Param", "Ref", "TensorMeta", "parse_graph", "print_graph"]
