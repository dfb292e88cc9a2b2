"""Cost models: seconds of collectives, of kernels and of a graph's nodes, from a machine's figures.

family of op  cost model
matmul        tiles of the result for matrix products; flops at the machine's rate for others
              (convolutions, attention)
pointwise     elements at the rate of the op's kind, or bytes, whichever takes longer
memory        bytes
view          nothing

A compiled fused group is one kernel, with the arithmetic of all members, and its inputs and outputs
counted once. An uncompiled group is one kernel for each member.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazygt.graph.collectives import goes_by_sockets, ring_bytes, socket_bytes
from lazygt.graph.cost import Cost, base_name, family, member_costs, product_sizes
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.machine.model import Carrier, LinkFigures, Machine

#: Collectives of indexed rows: ranks exchange counts, indices and rows (three rounds), and some
#: ranks have more rows than others (skew).
_INDEXED = ("take_rows", "put_rows")
_ROUNDS, _SKEW = 3, 2


def collective_seconds(machine: Machine, kind: str, nbytes: int, ranks: int) -> float:
    """Return the seconds of one collective between ranks of a host.

    The ranks are on several hosts if the machine's ``share`` is below 1. A collective on one rank
    takes no time.

    Args:
        kind: such as ``all_reduce``, as in ``Communication``.
        nbytes: payload, as in ``Communication``.
    """
    if ranks == 1:
        return 0.0
    if machine.share < 1 and machine.collectives.network:
        return _between_hosts(machine, kind, nbytes, ranks, max(round(machine.share * ranks), 1))
    carrier, sent = machine.collectives.local, ring_bytes(kind, nbytes, ranks)
    if machine.collectives.sockets and goes_by_sockets(kind, nbytes, ranks):
        carrier, sent = machine.collectives.sockets, socket_bytes(kind, nbytes, ranks)
    link = link_for(carrier, sent)
    if kind in _INDEXED:
        return _ROUNDS * link.start(ranks) + _SKEW * sent / link.bandwidth
    return link.seconds(sent, ranks)


def axis_group_seconds(machine: Machine, kind: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Return the seconds of one collective between ranks of a mesh.

    Consecutive ranks share a host, up to the machine's ranks per host.

    Args:
        ranks: the ranks of the axis group, numbered in the mesh.
    """
    ranks_here = max(Counter(int(rank // machine.collectives.ranks) for rank in ranks).values())
    if ranks_here == len(ranks) or not machine.collectives.network:
        return collective_seconds(machine, kind, nbytes, len(ranks))
    return _between_hosts(machine, kind, nbytes, len(ranks), ranks_here)


def _between_hosts(machine: Machine, kind: str, nbytes: int, ranks: int, ranks_here: int) -> float:
    """Return the seconds of one collective across hosts.

    Every rank has its own link into the network, so as many rings run in parallel as the group has
    ranks on a host (``ranks_here``); they are no faster than a ring inside a host.

    Args:
        nbytes: payload, as in ``Communication``.
        ranks: number of ranks.
        ranks_here: ranks on the host with the most of them.
    """
    sent = ring_bytes(kind, nbytes, ranks)
    link = link_for(machine.collectives.network, sent)
    local = link_for(machine.collectives.local, sent)
    rings = 1 if kind in ("send_recv", "all_to_all") else ranks_here
    bandwidth = min(link.bandwidth * rings, local.bandwidth)
    return link._replace(bandwidth=bandwidth).seconds(sent, ranks)


def link_for(carrier: Carrier, sent: float) -> LinkFigures:
    """Return the entry of a carrier for a number of sent bytes."""
    return next(link for link in carrier if sent <= link.up_to)


def matmul_seconds(machine: Machine, dtype: str, m: int, n: int, k: int, batch: int = 1) -> float:
    """Return the seconds of ``batch`` products of [m, k] and [k, n], without the launch.

    Roofline with tile quantization: results are computed in full tiles, ``units`` at a time, and
    each tile costs ``depth`` additional steps of the sum. The result is at least the time in which
    memory moves the operands and results.

    Args:
        dtype: a name such as ``bf16``, see ``machine.model.DTYPES``.
    """
    model = machine.matmul
    flops = tiled_flops(
        model.tile_rows, model.tile_columns, model.units, model.depth, m, n, k, batch
    )
    rate = model.rate_of(dtype)
    nbytes = batch * (m * k + k * n + m * n) * _ITEMSIZES[dtype]
    return max(flops / rate, moving_seconds(machine, nbytes))


def tiled_flops(
    tile_rows: float, tile_columns: float, units: float, depth: float, m: int, n: int, k: int,
    batch: int = 1,
) -> float:  # fmt: skip
    """Return the flops of ``batch`` products of [m, k] and [k, n] in full tiles and rounds.

    Args:
        tile_rows, tile_columns, units, depth: see ``machine.model.FIGURES``.
    """
    tiles = batch * math.ceil(m / tile_rows) * math.ceil(n / tile_columns)
    rounds = math.ceil(tiles / units) * units
    return 2 * rounds * tile_rows * tile_columns * (k + depth)


_ITEMSIZES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8": 1, "i8": 1}


def moving_seconds(machine: Machine, nbytes: float) -> float:
    """Return the seconds to read and write a number of bytes, by cache or memory bandwidth."""
    memory = machine.memory
    cached = nbytes <= memory.cache
    return nbytes / (memory.cache_bandwidth if cached else memory.bandwidth)


# -- kernels of a graph ----------------------------------------------------------------------------

_DTYPES = {8: "f64", 4: "f32", 2: "bf16", 1: "f8"}
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
    return _DTYPES.get(operands[0].dtype.itemsize, "f32") if operands else "f32"


def pointwise_family(node: Node) -> str:
    """Return an op's family, one of ``machine.model.FAMILIES``."""
    name = base_name(node.op)
    default = "reduction" if family(node) == "reduction" else "add"
    return next((kind for substring, kind in _KINDS if substring in name), default)
