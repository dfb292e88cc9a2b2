"""Seconds of each node of a graph: its counted work, by the cost models of ``machine.prices``.

family       cost model
matmul       tiles of the result for matrix products; flops at the machine's rate for others
             (convolutions, attention)
pointwise    elements at the rate of the op's kind, or bytes, whichever takes longer
memory       bytes
view         nothing

A compiled fused group is one kernel, with the arithmetic of all members, and its inputs and outputs
counted once. An uncompiled group is one kernel for each member.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazygt.graph.cost import Cost, base_name, family, member_costs, product_sizes
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.machine import Machine
from lazygt.machine.prices import matmul_seconds, moving_seconds

_ITEMSIZES = {8: "f64", 4: "f32", 2: "bf16", 1: "f8"}
#: (substring of an op's name, the machine's rate for it); the first match counts.
_KINDS = (
    ("gelu", "gelu"), ("softmax", "softmax"), ("norm", "norm"),
    *((part, "exp") for part in ("exp", "log", "tanh", "sigmoid", "silu", "erf", "sin", "cos",
                                 "pow", "mish", "elu", "softplus", "cross_entropy", "loss")),
)  # fmt: skip


class Product(NamedTuple):
    """Matrix products, ``batch`` of [m, k] x [k, n]; other ops have only ``flops``.

    ``sizes`` is (m, n, k, batch), or zeros.
    """

    dtype: str
    flops: int
    sizes: tuple[int, int, int, int] = (0, 0, 0, 0)

    def seconds(self, machine: Machine) -> float:
        """Return the seconds without the launch."""
        if not any(self.sizes):
            return self.flops / machine.matmul.rate_of(self.dtype)
        return matmul_seconds(machine, self.dtype, *self.sizes)


class Kernel(NamedTuple):
    """Work of one launch, for any machine.

    Attributes:
        elements: (one of ``machine.model.FAMILIES``, number of elements) for each pointwise op.
        nbytes: bytes read and written.
        compiled: True for the kernel of a fused group.
    """

    products: tuple[Product, ...]
    elements: tuple[tuple[str, int], ...]
    nbytes: int
    compiled: bool = False

    @property
    def flops(self) -> int:
        """Number of all arithmetic operations."""
        return sum(product.flops for product in self.products) + sum(
            count for _, count in self.elements
        )

    def seconds(self, machine: Machine) -> float:
        """Return the seconds without the launch."""
        work = sum(product.seconds(machine) for product in self.products)
        work += sum(count / machine.pointwise[kind] for kind, count in self.elements)
        return max(work, moving_seconds(machine, self.nbytes))


def kernels_of(graph: Graph, *, compiled: bool = True) -> list[tuple[Kernel, ...]]:
    """List the kernels of each node; none for views and collectives.

    Args:
        compiled: True if fused groups are compiled.
    """
    kernels, metas = [], graph.values
    for node, costs in zip(graph.nodes, member_costs(graph), strict=True):
        if node.body is None:
            kernels.append(_plain(node, costs[0], metas))
        elif compiled:
            kernels.append((_fused(node.body, costs),))
        else:
            members = kernels_of(node.body)
            kernels.append(tuple([kernel for member in members for kernel in member]))
    return kernels


def node_seconds(graph: Graph, machine: Machine) -> list[float]:
    """Return the seconds of each node without its launch; 0 for collectives."""
    return [sum(kernel.seconds(machine) for kernel in kernels) for kernels in kernels_of(graph)]


def _plain(node: Node, cost: Cost, metas: Sequence[TensorMeta | None]) -> tuple[Kernel, ...]:
    """Return the kernel of an unfused node; none for views and collectives."""
    if not cost.launches or family(node) == "collective":
        return ()
    return (Kernel(*_arithmetic([(node, cost.flops)], metas), cost.bytes),)


def _fused(body: Graph, costs: Sequence[Cost]) -> Kernel:
    """Return the one kernel of a compiled fused group."""
    members = [(member, cost.flops) for member, cost in zip(body.nodes, costs, strict=True)]
    work = _arithmetic(members, body.values)
    return Kernel(*work, sum(cost.bytes for cost in costs), compiled=True)


def _arithmetic(
    members: Iterable[tuple[Node, int]], metas: Sequence[TensorMeta | None]
) -> tuple[tuple[Product, ...], tuple[tuple[str, int], ...]]:
    """Return the matrix products of ops, and the elements of the others."""
    products, elements = [], []
    for node, flops in members:
        kind = family(node)
        if kind == "matmul":
            products.append(_product(node, flops, metas))
        elif kind not in ("memory", "view", "collective"):
            elements.append((pointwise_family(node), flops))
    return tuple(products), tuple(elements)


def _product(node: Node, flops: int, metas: Sequence[TensorMeta | None]) -> Product:
    """Return the work of a matmul, a convolution or an attention."""
    operands = [meta for value in node.refs() if (meta := metas[value]) is not None]
    sizes = product_sizes(node, metas)
    return Product(_dtype(operands), flops, *([] if sizes is None else [sizes]))


def _dtype(operands: Sequence[TensorMeta]) -> str:
    """Return the first operand's dtype; half precision of either kind has one rate."""
    return _ITEMSIZES.get(operands[0].dtype.itemsize, "f32") if operands else "f32"


def pointwise_family(node: Node) -> str:
    """Return an op's family, one of ``machine.model.FAMILIES``."""
    name = base_name(node.op)
    default = "reduction" if family(node) == "reduction" else "add"
    return next((kind for substring, kind in _KINDS if substring in name), default)
