"""What is to be computed: metas, nodes and graphs. No device, no worker, no I/O."""

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node, Param, Ref

__all__ = ["Graph", "Node", "Param", "Ref", "TensorMeta"]
