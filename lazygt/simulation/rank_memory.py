r"""Memory of a rank over a run, by category and by the user's line.

category     bytes of
parameters   values that optimizers update, and other ``nn.Parameter``\ s, as they are stored
gradients    the ``.grad`` of parameters once the run is over, and the values from which it is made
             by reducing, casting and summing
optimizer    an optimizer's state
gathered     copies of parameters: all-gathered, in another dtype, transposed
activations  other values of a run, of the forward and of the backward
other        batches, random states, intermediate values of an update

The client knows the categories of a plan's inputs and outputs
(``lazygt.submit.memory_categories``). Those of values between them are inferred by propagation:
backwards from gradients, and forwards from parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lazygt.graph.cost import base_name, family
from lazygt.graph.liveness import Change, alive_changes, extent_bytes, homes_of
from lazygt.graph.node import Graph, Node
from lazygt.graph.placement import COLLECTIVES, LAUNCH, LAUNCH_, WAIT
from lazygt.runtime.plan import Schedule
from lazygt.submit.memory_categories import GRADIENTS, OPTIMIZER, OTHER, PARAMETERS

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
