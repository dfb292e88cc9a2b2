r"""Memory of a rank over a run, by kind and by the user's line.

kind         bytes of
parameters   values that optimizers update, and other ``nn.Parameter``\ s, as they are stored
gradients    the ``.grad`` of parameters once the run is over, and the values from which it is made
             by reducing, casting and adding up
optimizer    an optimizer's state
gathered     copies of parameters: of all ranks' blocks, in another dtype, turned
activations  other values of a run, of the forward and of the backward
other        batches, random states, intermediate values of an update

The client knows the categories of a plan's inputs and outputs (``lazygt.submit.memory``). Those of
values between them follow: back from gradients, and on from parameters.
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
from lazygt.submit.memory import GRADIENTS, OPTIMIZER, OTHER, PARAMETERS

GATHERED, ACTIVATIONS, _UPDATES = "gathered", "activations", "updates"
#: Every kind, as reports list them.
KINDS = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, OTHER)
#: Ops with a result that is a gradient if an operand of its size is one, besides views.
_SUMS = frozenset(
    {"add", "mul", "div", "_to_copy", "clone", "copy", "neg", "_foreach_mul", "where"}
)
#: Ops, besides views, that make parameters in another form if all operands are parameters.
_COPIES = frozenset({"_to_copy", "clone", "copy", "contiguous"})
_EXCHANGES = COLLECTIVES | {LAUNCH, LAUNCH_, WAIT}


class Told(NamedTuple):
    """The client's knowledge of a plan's values.

    Attributes:
        inputs, outputs: their kinds, by position; ``other`` where nothing is known.
        kept: positions of inputs that the program has after the run, too.
    """

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    kept: frozenset[int] = frozenset()


class Held(NamedTuple):
    """Live bytes of one category and line.

    Attributes:
        line: that made it; empty: it was there before the run.
    """

    kind: str
    line: str
    nbytes: int


class Memory(NamedTuple):
    """Memory of a rank during the run of a plan.

    Attributes:
        peak: the most bytes alive at once.
        line: the user's line that is running then.
        kinds: bytes by category at the peak; they add up to ``peak``.
        lines: the same by kind and line, the largest first.
        history: (node, bytes of each of KINDS) from this node on; a node without a row changes
            nothing.
    """

    peak: int
    line: str
    kinds: dict[str, int]
    lines: tuple[Held, ...]
    history: tuple[tuple[int, tuple[int, ...]], ...]


def memory_of(graph: Graph, told: Told = Told()) -> Memory:  # noqa: B008 - nothing is known
    """Return the memory of a rank during a graph, without values that the graph does not read."""
    homes = homes_of(graph)
    kind_of = value_kinds(graph, homes, told)
    frees = [
        [value for value in dropped if value not in told.kept]
        for dropped in Schedule.of(graph).frees
    ]
    sizes = list(map(extent_bytes, graph.values))
    inputs = [Change(home, sizes[home]) for home in sorted(set(homes[: len(graph.inputs)]))]
    changes = list(alive_changes(graph, frees, homes))

    now = Counter(dict.fromkeys(KINDS, 0))
    _apply(now, inputs, kind_of)
    peak, at, kinds = sum(now.values()), None, dict(now)
    history = [(0, tuple(now.values()))]
    left: Sequence[Change] = ()
    for number, (came, dropped) in enumerate(changes):
        if left or came:
            _apply(now, left, kind_of)
            _apply(now, came, kind_of)
            history.append((number, tuple(now.values())))
        left = dropped
        if at is None or sum(now.values()) > peak:
            peak, at, kinds = sum(now.values()), number, dict(now)
    until = changes[: 0 if at is None else at + 1]
    lines = _lines(graph, inputs, until, kind_of)
    return Memory(peak, "" if at is None else graph.line(at), kinds, lines, tuple(history))


def _apply(now: Counter[str], changes: Sequence[Change], kind_of: Sequence[str]) -> None:
    for change in changes:
        now[_kind(change, kind_of)] += change.nbytes


def _kind(change: Change, kind_of: Sequence[str]) -> str:
    return OTHER if change.packed else kind_of[change.home]


def _lines(
    graph: Graph,
    inputs: Sequence[Change],
    changes: Sequence[tuple[Sequence[Change], Sequence[Change]]],
    kind_of: Sequence[str],
) -> tuple[Held, ...]:
    """List the live bytes at the last of some nodes, by category and line."""
    made_by = dict(_makers(graph))
    held: Counter[tuple[str, str]] = Counter()
    came = [change for coming, _ in changes for change in coming]
    left = [change for _, leaving in changes[:-1] for change in leaving]
    for change in (*inputs, *came, *left):
        number = made_by.get(change.home)
        line = "" if number is None else graph.line(number)
        held[_kind(change, kind_of), line] += change.nbytes
    rows = [Held(kind, line, nbytes) for (kind, line), nbytes in held.items() if nbytes]
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _makers(graph: Graph) -> list[tuple[int, int]]:
    """Return (value, node) of all results of nodes."""
    return [
        (value, number) for number, (_, results) in enumerate(graph.numbered()) for value in results
    ]


# -- kinds of values -----------------------------------------------------------------------------


def value_kinds(graph: Graph, homes: Sequence[int], told: Told) -> list[str]:
    """Return the kind of each value's memory.

    Args:
        homes: see ``homes_of``.
    """
    kinds = [ACTIVATIONS] * len(graph.values)
    kinds[: len(graph.inputs)] = [OTHER] * len(graph.inputs)
    for place, kind in enumerate(told.inputs[: len(graph.inputs)]):
        kinds[place] = kind
    for output, kind in zip(graph.outputs, told.outputs, strict=False):
        if homes[output] >= len(graph.inputs) and kind != OTHER:
            kinds[homes[output]] = kind
    _go_on(graph, homes, kinds)
    _go_back(graph, homes, kinds)
    return [OTHER if kind == _UPDATES else kind for kind in kinds]


def _go_on(graph: Graph, homes: Sequence[int], kinds: list[str]) -> None:
    """Propagate categories forwards from parameters and the optimizer's state."""
    for node, results in graph.numbered():
        operands = {kinds[homes[value]] for value in node.refs()}
        kind = _made_of(node, operands)
        for value in results[: len(node.fresh)]:
            if kind and kinds[homes[value]] == ACTIVATIONS:
                kinds[homes[value]] = kind


def _made_of(node: Node, operands: set[str]) -> str:
    """Return the category of a node's results; empty if none follows from its operands."""
    if not operands.isdisjoint((OPTIMIZER, _UPDATES)):
        return _UPDATES
    moves = node.body is None and (
        node.op in _EXCHANGES or family(node) == "view" or base_name(node.op) in _COPIES
    )
    return GATHERED if moves and operands and operands <= {PARAMETERS, GATHERED} else ""


def _go_back(graph: Graph, homes: Sequence[int], kinds: list[str]) -> None:
    """Propagate the category of gradients backwards through values of their size."""
    metas = graph.values
    for node, results in reversed(list(graph.numbered())):
        if GRADIENTS not in {kinds[homes[value]] for value in results} or not _sums(node):
            continue
        size = max((meta.numel for meta in node.results if meta is not None), default=0)
        for value in node.refs():
            meta = metas[value]
            exchanged = node.op in _EXCHANGES
            if kinds[homes[value]] == ACTIVATIONS and (
                exchanged or (meta is not None and meta.numel == size)
            ):
                kinds[homes[value]] = GRADIENTS


def _sums(node: Node) -> bool:
    """Return whether a node moves, casts, scales or adds up."""
    if node.body is not None:
        return all(map(_sums, node.body.nodes))
    return node.op in _EXCHANGES or family(node) == "view" or base_name(node.op) in _SUMS
