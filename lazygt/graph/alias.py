"""Alias analysis: values that may share memory, and writes that may happen in place.

A graph is pure: a write makes a new version. A copy for every write would be slow and would raise
peak memory, so ``analyse`` finds the writes that give the same results in place: the old version,
and every value that may share its memory, is never read again.

A write through a view is recorded as two nodes, the op on the view and a ``write_back`` of the
view's new version into its base:

    v1 = aten.slice(b0, 0, 2, 4)           b0 ──slice──> v1
    v2 = aten.add_(v1, 1)                                 │ add_
    b3 = lazygt.write_back(b0, v2, [slice])  b3 <──slice── v2

If neither ``b0`` nor another view of it is read afterwards, the pair runs as torch would run it:
``v1.add_(1)`` on the memory of ``b0``, which then is ``b3``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lazygt.graph.node import Arg, Graph, Node, Ref
from lazygt.graph.ops import DISJOINT, OpFacts, facts, overload, viewed_argument
from lazygt.graph.placement import COLLECTIVES, POINT_TO_POINT

#: ``write_back(base, value, chain)``: base with the region that the chain views replaced. A *view
#: chain* has the view ops from a base to a view, each as ``view_step`` returns it.
WRITE_BACK = "lazygt.write_back"

#: A view op of a chain, see ``view_step``.
ViewStepKey = tuple[str, int, tuple[Arg, ...], tuple[tuple[str, Arg], ...], int]

#: Modes of a write, see ``Writes.modes``.
COPY, IN_PLACE, DONE = "copy", "in place", "done"
_NEVER = 1 << 60  # last use of an output


def view_step(
    op: str, position: int, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...], which: int
) -> ViewStepKey:
    """Return a view op without its operand: (op, operand's position, args, kwargs, result used).

    Args:
        position: position of the viewed operand among ``args``.
        which: index of the view among the op's results.
    """
    return op, position, (*args[:position], None, *args[position + 1 :]), kwargs, which


@dataclass(frozen=True, slots=True)
class Writes:
    """Modes in which the writes of a graph run."""

    #: for each node, one mode a written value (for ``write_back``: of its base): COPY first,
    #: IN_PLACE, or DONE (a ``write_back`` of a view that was written in place)
    modes: tuple[tuple[str, ...], ...]
    #: positions in ``inputs`` that are written in place: the run copies those that others may read
    overwritten_inputs: tuple[int, ...]
    #: positions in ``outputs`` that share memory with something that outlives the run, so that they
    #: must be copied out
    copied_outputs: tuple[int, ...]


def last_uses(graph: Graph) -> list[int]:
    """Return for each value the number of the node that reads it last; -1 if none does."""
    uses = [-1] * len(graph.values)
    for number, node in enumerate(graph.nodes):
        for ref in node.refs():
            uses[ref] = number
    for ref in graph.outputs:
        uses[ref] = _NEVER
    return uses


def analyse(graph: Graph) -> Writes:
    """Decide for every write whether it needs a copy; linear in the size of the graph."""
    return Aliases(graph).run()


def op_facts(node: Node) -> OpFacts | None:
    """Return the schema facts of a node's op; None for lazygt's own ops."""
    op = node.op
    return facts(overload(op)) if "@" in op else _facts(op)


@cache
def _facts(op: str) -> OpFacts | None:
    return None if op.startswith("lazygt.") else facts(overload(op))


#: lazygt's own ops that read or set the generator.
_STATEFUL = frozenset({"lazygt.manual_seed", "lazygt.get_rng_state", "lazygt.set_rng_state"})


def has_effect(node: Node) -> bool:
    """Return whether a node has an effect besides its results, so that its order counts.

    True for ops that draw random numbers, for ops that return nothing (assertions), for a
    data-dependent op (the client waits for its answer), and for collectives, which all ranks must
    launch in the same order.
    """
    if node.body is not None:
        return False
    is_collective = node.op in COLLECTIVES or node.op in POINT_TO_POINT
    return node.dynamic or not node.results or is_collective or draws(node)


def draws(node: Node) -> bool:
    """Return whether a node reads or sets the generator; attention without dropout does not."""
    f = op_facts(node)
    if f is None:
        return node.op in _STATEFUL
    return f.random and not drops_nothing(node)


def drops_nothing(node: Node) -> bool:
    """Return whether a node is attention, or its backward, with dropout probability 0."""
    position = _dropout_of(node.op) if "attention" in node.op else None
    if position is None:
        return False
    probability = (
        node.args[position]
        if position < len(node.args)
        else dict(node.kwargs).get("dropout_p", 0.0)
    )
    return type(probability) is float and probability == 0.0


@cache
def _dropout_of(op: str) -> int | None:
    """Return the position of an op's ``dropout_p`` with the default 0; None if it has none."""
    arguments = overload(op)._schema.arguments
    positions = [
        position for position, argument in enumerate(arguments) if argument.name == "dropout_p"
    ]
    return (
        positions[0] if positions and arguments[positions[0]].default_value in (0.0, None) else None
    )


class Aliases:
    """Alias sets as a union of values by memory, built node by node in order.

    Attributes:
        memory: value -> number of its memory: the first value in it.
        overwritten: inputs that a node up to here writes in place.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses = last_uses(graph)
        count = len(graph.values)
        #: value -> number of its memory; memory -> values that live in it
        self.memory = list(range(count))
        self.members: list[list[int]] = [[i] for i in range(count)]
        #: value -> (base, chain) for views of known derivation
        self.derived: dict[int, tuple[int, tuple[ViewStepKey, ...]]] = {}
        #: write_back nodes that a write in place has made superfluous
        self.done: set[int] = set()
        self.overwritten: set[int] = set()

    def run(self) -> Writes:
        """Analyse all nodes; return the modes of all writes."""
        modes = []
        for number, (node, results) in enumerate(self.graph.numbered()):
            modes.append(self.visit(number, node, results))
        return Writes(tuple(modes), tuple(sorted(self.overwritten)), self._outputs())

    def visit(self, number: int, node: Node, results: range) -> tuple[str, ...]:
        """Analyse the next node; return the mode of each of its writes."""
        if node.op == WRITE_BACK:
            return (self._write_back(number, node, results[0]),)
        if node.dynamic:
            return (COPY,) * len(node.writes)
        f = op_facts(node)
        if f is not None and f.aliases and node.args:
            self._view(f, node, results)
        modes = []
        for offset, target in enumerate(node.writes):
            version = results[len(node.fresh) + offset]
            modes.append(self._write(number, target, version))
        return tuple(modes)

    def _view(self, f: OpFacts, node: Node, results: range) -> None:
        """Put a view's results in the memory of the viewed argument, with their view chains."""
        position = viewed_argument(f) if f.views else 0
        source = node.args[position]
        if not isinstance(source, Ref):
            return
        if node.op in DISJOINT and self.dies(source.index):
            return
        base, chain = self.derived.get(source.index, (source.index, ()))
        for which, result in enumerate(results[: len(node.fresh)]):
            self.share(result, source.index)
            if f.views:
                step = view_step(node.op, position, node.args, node.kwargs, which)
                self.derived[result] = base, (*chain, step)

    def dies(self, value: int) -> bool:
        """Return whether a value's memory is the run's own and unread after its last use."""
        memory = self.memory[value]
        is_own = memory >= len(self.graph.inputs) or memory in self.overwritten
        return is_own and all(
            self.uses[member] <= self.uses[value] for member in self.members[memory]
        )

    def lives_until(self, value: int) -> int:
        """Return the last node that reads any value in the memory of a value."""
        return max((self.uses[member] for member in self.members[self.memory[value]]), default=-1)

    def share(self, value: int, other: int) -> None:
        """Put ``value`` in the memory of ``other``."""
        memory = self.memory[other]
        self.memory[value] = memory
        self.members[memory].append(value)

    def _read_later(self, value: int, number: int, exempt: tuple[int, ...] = ()) -> bool:
        """Return whether a value in the memory of ``value`` is read after node ``number``.

        Values that are not read later are dropped from the alias set.

        Args:
            exempt: values whose reads do not count.
        """
        memory = self.memory[value]
        alive = [member for member in self.members[memory] if self.uses[member] > number]
        self.members[memory] = alive
        return any(member not in exempt for member in alive)

    def _write(self, number: int, target: int, version: int) -> str:
        """Return the mode of a write to ``target`` that makes ``version``; record its memory.

        In place if nothing reads the memory later, except a ``write_back`` of the new version,
        which is then superfluous.
        """
        if not self._read_later(target, number):
            self._reuse_memory(target, version)
            return IN_PLACE
        write_back = self._matching_write_back(number, target, version)
        if write_back is None:
            return COPY
        base, write_back_number = write_back
        if self.uses[base] != write_back_number or self._read_later(target, number, exempt=(base,)):
            return COPY
        self.done.add(write_back_number)
        self._reuse_memory(target, version)
        return IN_PLACE

    def _matching_write_back(
        self, number: int, target: int, version: int
    ) -> tuple[int, int] | None:
        """Return (base, node number) of the write_back after a write to a view of the base."""
        base, chain = self.derived.get(target, (-1, ()))
        for later in range(number + 1, len(self.graph.nodes)):
            node = self.graph.nodes[later]
            if node.op != WRITE_BACK:
                return None
            if node.args[1] == Ref(version):
                same = node.args[0] == Ref(base) and node.args[2] == chain
                return (base, later) if same else None
        return None

    def _reuse_memory(self, target: int, version: int) -> None:
        """Put ``version`` in the memory of ``target``, which is overwritten."""
        self.share(version, target)
        if target in self.derived:
            self.derived[version] = self.derived[target]
        memory = self.memory[target]
        if memory < len(self.graph.inputs):
            self.overwritten.add(memory)

    def _write_back(self, number: int, node: Node, result: int) -> str:
        """Return the mode of a ``write_back`` node; record the memory of its result."""
        base, value = node.args[0].index, node.args[1].index
        if number in self.done:
            mode = DONE
            self.share(result, base)
            self.derived[value] = result, node.args[2]
        elif not self._read_later(base, number):
            mode = IN_PLACE
            self._reuse_memory(base, result)
        else:
            mode = COPY
        return mode

    def _outputs(self) -> tuple[int, ...]:
        """Return the positions of outputs that must be copied out of shared memory."""
        copied, returned = [], set()
        for position, value in enumerate(self.graph.outputs):
            memory = self.memory[value]
            is_inputs_memory = memory < len(self.graph.inputs) and memory not in self.overwritten
            if is_inputs_memory or memory in returned:
                copied.append(position)
            returned.add(memory)
        return tuple(copied)
