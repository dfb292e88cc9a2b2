"""The trie of recorded steps: shape cache, plan cache and proof that nothing changed, in one.

Each node is one step of a stretch: an input that enters, or an op. Its key says all that is
structural: the op, which earlier results feed it, the ints and flags it was called with, the
*types* of its Python numbers. Since Python really runs every step, reaching a node proves that
the program up to there is the one that was seen before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Graph, Node, Ref, map_arg
from lazygt.graph.ops import OpFacts
from lazygt.tensor import ViewStep


class Step:
    """One remembered step.

    Attributes:
        make: the meta of the result, for the common op that returns one new tensor.
        itself: it writes its first argument, keeps its shape, and returns it.
        link: for an op that returns one view: what its handles keep of it.
        full: the stretch is so long here that it has to be flushed.
        node: the op with Ref numbers as in the stretch (inputs negative); None for an input.
        input: the meta of the input that enters here; None for an op.
        forward: for a backward op, the number of the forward op in the same stretch, or -1.
        nbytes: bytes of all results recorded up to here.
    """

    __slots__ = (
        "children",
        "depth",
        "facts",
        "forward",
        "full",
        "input",
        "itself",
        "key",
        "link",
        "make",
        "nbytes",
        "node",
        "parent",
        "plans",
    )

    def __init__(
        self,
        parent: Step | None,
        key: Any,
        node: Node | None = None,
        input: TensorMeta | None = None,
        facts: OpFacts | None = None,
    ) -> None:
        self.parent, self.key, self.node, self.input, self.facts = parent, key, node, input, facts
        self.children: dict[Any, Step] = {}
        self.plans: dict[tuple[int, ...], Any] = {}
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.nbytes: int = 0 if parent is None else parent.nbytes
        self.full = False
        self.itself = False
        self.link: ViewStep | None = None
        self.make: TensorMeta | None = None
        self.forward = -1
        if node is not None:
            self.nbytes += sum(m.nbytes for m in node.fresh if m is not None)
            single = facts is not None and facts.outputs == ("f",)
            if single and not node.writes and not node.dynamic:
                self.make = node.fresh[0]

    def path(self) -> list[Step]:
        """The steps from the root (excluded) to here."""
        steps: list[Step] = []
        step: Step = self
        while step.parent is not None:
            steps.append(step)
            step = step.parent
        steps.reverse()
        return steps


class Trie:
    """The steps, with the plans at the places where stretches ended; bounded, oldest plan out."""

    def __init__(self, max_plans: int, max_steps: int, max_depth: int, max_bytes: int) -> None:
        self.root = Step(None, None)
        self.max_depth, self.max_bytes = max_depth, max_bytes
        self.steps = 0
        self._max_plans, self._max_steps = max_plans, max_steps
        self._recent: OrderedDict[tuple[int, tuple[int, ...]], Step] = OrderedDict()

    def add(self, step: Step) -> Step:
        """Remember a step below its parent."""
        assert step.parent is not None
        step.parent.children[step.key] = step
        step.full = step.depth >= self.max_depth or step.nbytes >= self.max_bytes
        self.steps += 1
        return step

    def half_full(self, step: Step) -> bool:
        """Whether a stretch that ends here is at least half as long as one may be."""
        return 2 * step.depth >= self.max_depth or 2 * step.nbytes >= self.max_bytes

    def kept(self) -> list[Any]:
        """All plans, least recently used first."""
        return [step.plans[outputs] for (_, outputs), step in self._recent.items()]

    def find(self, step: Step, outputs: tuple[int, ...]) -> Any | None:
        """The plan of a stretch that ended at ``step`` and needs ``outputs``.

        A plan with more outputs will do: what is not needed is freed with the next message. When
        a value dies is up to Python's garbage collector, and must not cost a miss.
        """
        found = step.plans.get(outputs)
        if found is None:
            needed = set(outputs)
            for have, plan in step.plans.items():
                if needed.issubset(have):
                    outputs, found = have, plan
                    break
        if found is not None:
            self._recent.move_to_end((id(step), outputs))
        return found

    def keep(self, step: Step, outputs: tuple[int, ...], plan: Any) -> list[Any]:
        """Remember a plan; returns the plans that were dropped to make room."""
        step.plans[outputs] = plan
        self._recent[id(step), outputs] = step
        dropped = []
        while len(self._recent) > 1 and (
            len(self._recent) > self._max_plans or self.steps > self._max_steps
        ):
            (_, old), place = self._recent.popitem(last=False)
            dropped.append(place.plans.pop(old))
            self._prune(place, keep=step)
        return dropped

    def _prune(self, step: Step, keep: Step) -> None:
        while step.parent is not None and step is not keep:
            if step.children or step.plans:
                return
            del step.parent.children[step.key]
            self.steps -= 1
            step = step.parent


def build_graph(
    steps: list[Step], outputs: tuple[int, ...], lines: tuple[str, ...], kinds: tuple[str, ...]
) -> Graph:
    """The graph of a path through the trie: inputs first, then the results of the ops in order."""
    inputs = tuple(step.input for step in steps if step.input is not None)
    shift = len(inputs)

    def leaf(arg: Arg) -> Arg:
        if type(arg) is Ref:
            return Ref(~arg.index if arg.index < 0 else arg.index + shift)
        return arg

    nodes = tuple(_renumbered(step.node, leaf, shift) for step in steps if step.node is not None)
    numbered = tuple(index + shift for index in outputs)
    return Graph(inputs, kinds, nodes, numbered, lines)


def _renumbered(node: Node, leaf: Any, shift: int) -> Node:

    return Node(
        node.op,
        map_arg(node.args, leaf),
        tuple((name, map_arg(arg, leaf)) for name, arg in node.kwargs),
        node.fresh,
        tuple(~i if i < 0 else i + shift for i in node.writes),
        node.written,
        node.dynamic,
    )
