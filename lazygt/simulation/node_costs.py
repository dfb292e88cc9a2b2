"""Costs of a plan's nodes on a machine: their seconds, and the memory of a rank over a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lazygt.graph.cost import Cost, base_name, family, member_costs, product_sizes
from lazygt.graph.liveness import Change, alive_changes, extent_bytes, homes_of
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import COLLECTIVES, LAUNCH, LAUNCH_, WAIT
from lazygt.machine import Machine
from lazygt.machine.prices import matmul_seconds, moving_seconds
from lazygt.runtime.plan import Schedule
from lazygt.submit.memory_categories import GRADIENTS, OPTIMIZER, OTHER, PARAMETERS

# -- seconds ---------------------------------------------------------------------------------------
# Counted work, by the cost models of ``machine.prices``:
#
# family       cost model
# matmul       tiles of the result for matrix products; flops at the machine's rate for others
#              (convolutions, attention)
# pointwise    elements at the rate of the op's kind, or bytes, whichever takes longer
# memory       bytes
# view         nothing
#
# A compiled fused group is one kernel, with the arithmetic of all members, and its inputs and
# outputs counted once. An uncompiled group is one kernel for each member.

_ITEMSIZES = {8: "f64", 4: "f32", 2: "bf16", 1: "f8"}
#: (substring of an op's name, the machine's rate for it); the first match counts.
_RATES = (
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
    return next((kind for substring, kind in _RATES if substring in name), default)


# -- memory ----------------------------------------------------------------------------------------
# category     bytes of
# parameters   values that optimizers update, and other ``nn.Parameter``s, as they are stored
# gradients    the ``.grad`` of parameters once the run is over, and the values from which it is
#              made by reducing, casting and summing
# optimizer    an optimizer's state
# gathered     copies of parameters: all-gathered, in another dtype, transposed
# activations  other values of a run, of the forward and of the backward
# other        batches, random states, intermediate values of an update
#
# The client knows the categories of a plan's inputs and outputs
# (``lazygt.submit.memory_categories``). Those of values between them are inferred by propagation:
# backwards from gradients, and forwards from parameters.

GATHERED, ACTIVATIONS, _UPDATES = "gathered", "activations", "updates"
#: All categories, in the order of reports.
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, OTHER)
#: Ops, besides views, that pass the category of gradients from a result to operands of its size.
_SUMS = frozenset(
    {"add", "mul", "div", "_to_copy", "clone", "copy", "neg", "_foreach_mul", "where"}
)
#: Ops, besides views, that copy or convert: their result is ``gathered`` if all operands are.
_COPIES = frozenset({"_to_copy", "clone", "copy", "contiguous"})
_EXCHANGES = COLLECTIVES | {LAUNCH, LAUNCH_, WAIT}


class KnownCategories(NamedTuple):
    """Categories of a plan's inputs and outputs, as known to the client.

    Attributes:
        inputs, outputs: categories by position; ``other`` if unknown.
        retained: positions of inputs that stay alive after the run.
    """

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    retained: frozenset[int] = frozenset()


class LiveMemory(NamedTuple):
    """Live bytes of one category and line.

    Attributes:
        kind: the category.
        line: the user's line that computed the values; empty if they existed before the run.
    """

    kind: str
    line: str
    nbytes: int


class Memory(NamedTuple):
    """Memory of a rank during the run of a plan.

    Attributes:
        peak: maximum bytes alive at once.
        line: the user's line that runs at the peak.
        kinds: bytes by category at the peak; their sum is ``peak``.
        lines: the same by category and line, the largest first.
        history: (node, bytes of each of KINDS) from this node on, for nodes that change them.
    """

    peak: int
    line: str
    kinds: dict[str, int]
    lines: tuple[LiveMemory, ...]
    history: tuple[tuple[int, tuple[int, ...]], ...]


def memory_of(graph: Graph, categories: KnownCategories = KnownCategories()) -> Memory:  # noqa: B008 - nothing is known
    """Compute the live bytes of a rank at each node of a graph by liveness, and their peak.

    Values that the graph does not read are not counted.
    """
    homes = homes_of(graph)  # value -> the first value in the same memory
    category_of = value_kinds(graph, homes, categories)
    frees = [
        [value for value in dropped if value not in categories.retained]
        for dropped in Schedule.of(graph).frees
    ]
    sizes = list(map(extent_bytes, graph.values))
    inputs = [Change(home, sizes[home]) for home in sorted(set(homes[: len(graph.inputs)]))]
    changes = list(alive_changes(graph, frees, homes))

    alive = Counter(dict.fromkeys(KINDS, 0))
    _apply(alive, inputs, category_of)
    peak, peak_node, kinds = sum(alive.values()), None, dict(alive)
    history = [(0, tuple(alive.values()))]
    pending_frees: Sequence[Change] = ()
    for number, (allocated, dropped) in enumerate(changes):
        if pending_frees or allocated:
            _apply(alive, pending_frees, category_of)
            _apply(alive, allocated, category_of)
            history.append((number, tuple(alive.values())))
        pending_frees = dropped
        if peak_node is None or sum(alive.values()) > peak:
            peak, peak_node, kinds = sum(alive.values()), number, dict(alive)
    changes_to_peak = changes[: 0 if peak_node is None else peak_node + 1]
    lines = _lines(graph, inputs, changes_to_peak, category_of)
    return Memory(
        peak, "" if peak_node is None else graph.line(peak_node), kinds, lines, tuple(history)
    )


def _apply(alive: Counter[str], changes: Sequence[Change], category_of: Sequence[str]) -> None:
    """Add the changes to the live bytes by category, in place."""
    for change in changes:
        alive[_category(change, category_of)] += change.nbytes


def _category(change: Change, category_of: Sequence[str]) -> str:
    """Return the category of a change of memory; values packed for sending are ``other``."""
    return OTHER if change.packed else category_of[change.home]


def _lines(
    graph: Graph,
    inputs: Sequence[Change],
    changes: Sequence[tuple[Sequence[Change], Sequence[Change]]],
    category_of: Sequence[str],
) -> tuple[LiveMemory, ...]:
    """Sum the live bytes at the last node of ``changes`` by category and line.

    Args:
        inputs: allocations of the inputs.
        changes: (allocations, frees) of each node; the frees of the last one are still alive.
    """
    producer = dict(_makers(graph))
    alive: Counter[tuple[str, str]] = Counter()
    allocated = [change for allocations, _ in changes for change in allocations]
    freed = [change for _, frees in changes[:-1] for change in frees]
    for change in (*inputs, *allocated, *freed):
        number = producer.get(change.home)
        line = "" if number is None else graph.line(number)
        alive[_category(change, category_of), line] += change.nbytes
    rows = [LiveMemory(kind, line, nbytes) for (kind, line), nbytes in alive.items() if nbytes]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _makers(graph: Graph) -> list[tuple[int, int]]:
    """List (value, number of its producer) for all results of nodes."""
    return [
        (value, number) for number, (_, results) in enumerate(graph.numbered()) for value in results
    ]


# -- categories of values ------------------------------------------------------------------------


def value_kinds(graph: Graph, homes: Sequence[int], categories: KnownCategories) -> list[str]:
    """Return the category of each value's memory.

    Args:
        homes: value -> the first value in the same memory.
        categories: those known to the client.
    """
    kinds = [ACTIVATIONS] * len(graph.values)
    kinds[: len(graph.inputs)] = [OTHER] * len(graph.inputs)
    for position, kind in enumerate(categories.inputs[: len(graph.inputs)]):
        kinds[position] = kind
    for output, kind in zip(graph.outputs, categories.outputs, strict=False):
        if homes[output] >= len(graph.inputs) and kind != OTHER:
            kinds[homes[output]] = kind
    _propagate_forwards(graph, homes, kinds)
    _propagate_backwards(graph, homes, kinds)
    return [OTHER if kind == _UPDATES else kind for kind in kinds]


def _propagate_forwards(graph: Graph, homes: Sequence[int], kinds: list[str]) -> None:
    """Propagate categories forwards from parameters and the optimizer's state.

    Args:
        homes: value -> the first value in the same memory.
        kinds: category by value; changed in place.
    """
    for node, results in graph.numbered():
        operands = {kinds[homes[value]] for value in node.refs()}
        kind = _result_category(node, operands)
        for value in results[: len(node.fresh)]:
            if kind and kinds[homes[value]] == ACTIVATIONS:
                kinds[homes[value]] = kind


def _result_category(node: Node, operands: set[str]) -> str:
    """Return the category of a node's results; empty if none follows from its operands."""
    if not operands.isdisjoint((OPTIMIZER, _UPDATES)):
        return _UPDATES
    copies = node.body is None and (
        node.op in _EXCHANGES or family(node) == "view" or base_name(node.op) in _COPIES
    )
    return GATHERED if copies and operands and operands <= {PARAMETERS, GATHERED} else ""


def _propagate_backwards(graph: Graph, homes: Sequence[int], kinds: list[str]) -> None:
    """Propagate the category of gradients backwards through values of their size.

    Args:
        homes, kinds: as in ``_propagate_forwards``.
    """
    metas = graph.values
    for node, results in reversed(list(graph.numbered())):
        if GRADIENTS not in {kinds[homes[value]] for value in results} or not _is_linear(node):
            continue
        size = max((meta.numel for meta in node.results if meta is not None), default=0)
        for value in node.refs():
            meta = metas[value]
            is_collective = node.op in _EXCHANGES
            if kinds[homes[value]] == ACTIVATIONS and (
                is_collective or (meta is not None and meta.numel == size)
            ):
                kinds[homes[value]] = GRADIENTS


def _is_linear(node: Node) -> bool:
    """Return whether a node only moves, casts, scales or sums its operands."""
    if node.body is not None:
        return all(map(_is_linear, node.body.nodes))
    return node.op in _EXCHANGES or family(node) == "view" or base_name(node.op) in _SUMS
