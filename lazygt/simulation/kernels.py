"""How long each node of a graph computes: its counted work, by the laws of ``machine.prices``.

family       law
matmul       tiles of the result for products of matrices; flops at the machine's rate for others
             (convolutions, attention)
pointwise    elements at the rate of the op's kind, or bytes, whichever takes longer; the members of
             a fused group one after another, its bytes once
memory       bytes
view         nothing
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from lazygt.graph.cost import Cost, base_name, family, member_costs
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.machine import Machine
from lazygt.machine.prices import matmul_seconds, moving_seconds

#: Operands that are multiplied: the places of the two matrices among an op's tensors.
_PRODUCTS: Mapping[str, tuple[int, int]] = {
    "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2),
}  # fmt: skip
_ITEMSIZES = {8: "f64", 4: "f32", 2: "bf16", 1: "f8"}
#: Which of the machine's rates an op goes by, where its name has one of these parts.
_KINDS = (
    ("gelu", "gelu"), ("softmax", "softmax"), ("norm", "norm"),
    *((part, "exp") for part in ("exp", "log", "tanh", "sigmoid", "silu", "erf", "sin", "cos",
                                 "pow", "mish", "elu", "softplus", "cross_entropy", "loss")),
)  # fmt: skip


def node_seconds(graph: Graph, machine: Machine) -> list[float]:
    """Seconds that each node of a graph computes, without its launch; nothing for what ranks
    exchange."""
    metas = graph.values
    return [
        _seconds(node, costs, metas, machine)
        for node, costs in zip(graph.nodes, member_costs(graph), strict=True)
    ]


def product_flops(graph: Graph) -> Counter[str]:
    """Arithmetic operations of matrix products and the like, by dtype as the machine names it."""
    metas, flops = graph.values, Counter[str]()
    for node, costs in zip(graph.nodes, member_costs(graph), strict=True):
        if family(node) == "matmul":
            flops[_dtype(node, metas)] += sum(cost.flops for cost in costs)
    return flops


def _seconds(
    node: Node, costs: Sequence[Cost], metas: Sequence[TensorMeta | None], machine: Machine
) -> float:
    if node.body is not None:
        inner = node.body.values
        work = sum(
            _arithmetic(member, cost.flops, inner, machine)
            for member, cost in zip(node.body.nodes, costs, strict=True)
        )
        return max(work, moving_seconds(machine, sum(cost.bytes for cost in costs)))
    (cost,) = costs
    if not cost.launches or family(node) == "collective":
        return 0.0
    work = _arithmetic(node, cost.flops, metas, machine)
    return max(work, moving_seconds(machine, cost.bytes))


def _arithmetic(
    node: Node, flops: int, metas: Sequence[TensorMeta | None], machine: Machine
) -> float:
    """What a node computes, were memory fast enough."""
    kind = family(node)
    if kind == "matmul":
        return _product(node, flops, metas, machine)
    if kind in ("memory", "view", "collective"):
        return 0.0
    return flops / machine.pointwise[pointwise_family(node)]


def _product(node: Node, flops: int, metas: Sequence[TensorMeta | None], machine: Machine) -> float:
    operands = [meta for value in node.refs() if (meta := metas[value]) is not None]
    dtype = _dtype(node, metas)
    places = _PRODUCTS.get(base_name(node.op))
    if places is None or len(operands) <= max(places):
        return flops / machine.matmul.rate.get(dtype, machine.matmul.rate["f32"])
    left, right = (operands[place].shape for place in places)
    return matmul_seconds(machine, dtype, left[-2], right[-1], left[-1], math.prod(left[:-2]))


def _dtype(node: Node, metas: Sequence[TensorMeta | None]) -> str:
    """Of its first operand; half precision of either kind has one rate."""
    first = next((meta for value in node.refs() if (meta := metas[value]) is not None), None)
    return "f32" if first is None else _ITEMSIZES.get(first.dtype.itemsize, "f32")


def pointwise_family(node: Node) -> str:
    """Which of ``machine.schema.FAMILIES`` an op is of."""
    name = base_name(node.op)
    usual = "reduction" if family(node) == "reduction" else "add"
    return next((kind for part, kind in _KINDS if part in name), usual)
