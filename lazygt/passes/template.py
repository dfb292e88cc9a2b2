"""Templates: optimised programs, reused in other sizes (symbolic shapes).

Sizes change from step to step (a smaller batch, a longer sequence), the program does not. So a
recorded graph is keyed by its symbolic form, with a symbol instead of every size. Graphs with equal
keys get the same decisions from every pass, so the optimised graph of the first one, with other
sizes substituted, is the optimised graph of the others.

That holds as long as the passes' questions about sizes (``passes.guards``) have the same answers
in the other sizes, which is checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, verify
from lazygt.graph.recent import Recent
from lazygt.graph.sizes import LEAST, Resize, Sizes, sized
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.guards import Guards, recorded_guards, specialization_key

# -- skeletons: symbolic graphs --------------------------------------------------------------------
# Graphs with equal keys are one program in several sizes. 0, 1 and negative numbers are not
# replaced by symbols, and equal sizes have the same symbol.


class Skeleton(NamedTuple):
    """Symbolic form of a graph."""

    key: tuple[Any, ...]  # the graph with symbols instead of sizes
    sizes: Sizes  # the size of each symbol, in order of appearance; all different


def skeleton(graph: Graph) -> Skeleton:
    """Return the symbolic form of a recorded graph, in linear time."""
    reader = _Reader()
    reader.read(graph)
    return Skeleton(tuple(reader.key), tuple(reader.symbols))


class _Reader:
    """Serialization of a symbolic graph to one flat, self-delimiting list."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        #: size -> its symbol
        self.symbols: dict[int, int] = {}
        #: id of a meta -> its number among all metas
        self.metas: dict[int, int] = {}

    def read(self, graph: Graph) -> None:
        """Add a graph to the key."""
        self.key += (graph.params, graph.outputs, graph.lines, len(graph.inputs))
        for meta in graph.inputs:
            self._meta(meta)
        for node in graph.nodes:
            self._node(node)

    def _node(self, node: Node) -> None:
        """Add one node, with its members, to the key."""
        sized_arguments = sized(node.op)
        self.key += (node.op, len(node.args), len(node.kwargs), len(node.fresh), node.writes,
                     len(node.written), node.dynamic)  # fmt: skip
        for position, arg in enumerate(node.args):
            self._arg(arg, position in sized_arguments)
        for name, arg in node.kwargs:
            self.key.append(name)
            self._arg(arg, name in sized_arguments)
        for meta in node.results:
            self._meta(meta)
        if node.body is not None:
            self.read(node.body)

    def _arg(self, arg: Arg, sized: bool) -> None:
        """Add an argument to the key.

        Args:
            sized: whether integers in the argument are sizes.
        """
        kind = type(arg)
        if kind is Ref or kind is Param:
            self.key += (kind, arg.index)
        elif kind is tuple:
            self.key += (kind, len(arg))
            for item in arg:
                self._arg(item, sized)
        elif kind is int and sized:
            self._size(arg)
        else:
            self.key += typed_key(arg)

    def _size(self, size: int) -> None:
        """Add a size to the key, as a symbol unless it is 0, 1 or negative."""
        if size >= LEAST:
            self.key += ("size", self.symbols.setdefault(size, len(self.symbols)))
        else:
            self.key.append(size)

    def _meta(self, meta: TensorMeta | None) -> None:
        """Add a meta to the key; a repeated one by its number."""
        if meta is None:
            self.key.append(None)
            return
        count = len(self.metas)
        number = self.metas.setdefault(id(meta), count)
        self.key.append(number)
        if number < count:
            return
        self.key += (meta.dtype, len(meta.shape), meta.conj, meta.neg)
        for size in (*meta.shape, *meta.stride, meta.offset):
            self._size(size)


# -- templates: optimised programs, reused in other sizes ------------------------------------------

#: Most cached plans of a program, each for other decisions of the passes.
_MOST_VARIANTS = 8
#: Approximate Python memory of a word of a template's key, and words of a question.
_BYTES_A_WORD, _WORDS_A_QUESTION = 16, 30

Stages = list[tuple[str, Graph]]


class Resizable(Protocol):
    """Plan of a graph that can be converted to other sizes."""

    @property
    def graph(self) -> Graph:
        """Optimised graph."""

    @property
    def sizes(self) -> Sizes:
        """Sizes of the graph."""

    @property
    def nbytes(self) -> int:
        """Approximate memory of the plan."""

    def resized(self, sizes: Sizes) -> Self:
        """Return the same plan in other sizes."""


P = TypeVar("P", bound=Resizable)


class Optimised(NamedTuple, Generic[P]):
    """Result of the passes for a graph."""

    plan: P  # of the optimised graph
    template: Template[P]  # the cached plans of the same program
    sizes: Sizes  # the sizes of the recorded graph


class Templates(Generic[P]):
    """Pipeline of passes with an LRU cache for programs that differ only in sizes.

    Args:
        passes: in their order.
        most, most_bytes: bounds of the LRU cache: number of programs, and their bytes.
        make: builds the plan of an optimised graph.

    Attributes:
        resized: the number of graphs that were served from the cache.
    """

    def __init__(
        self, passes: Sequence[Pass], most: int, most_bytes: int, make: Callable[[Graph], P]
    ) -> None:
        self._passes, self._make = passes, make
        self._cache: Recent[tuple[Any, ...], Template[P]] = Recent(most, most_bytes)
        self.resized = 0

    def optimised(
        self, graph: Graph, check: bool = False, stages: Stages | None = None
    ) -> Optimised[P]:
        """Return the optimised form of a recorded graph, from the cache or by running the passes.

        Args:
            check: verify the graph after every pass, and a plan from the cache.
            stages: list to which every pass appends its result; every pass is run then.

        Raises:
            GraphError: the optimised graph is invalid; with ``check`` the error names the pass.
        """
        symbolic = skeleton(graph)
        template = self._cache.get(symbolic.key)
        if stages is None and template is not None:
            plan = self.resize(template, symbolic.sizes, check)
            if plan is not None:
                return Optimised(plan, template, symbolic.sizes)
        with recorded_guards() as asked:
            optimised = run_passes(graph, self._passes, check, stages)
        verify(optimised)
        plan = self._make(optimised)
        template = Template(len(symbolic.key)) if template is None else template
        template.keep(symbolic.sizes, asked, plan)
        self._cache.keep(symbolic.key, template, template.nbytes)
        return Optimised(plan, template, symbolic.sizes)

    def resize(self, template: Template[P], sizes: Sizes, check: bool = False) -> P | None:
        """Return a template's plan in these sizes; None if no cached plan is valid for them.

        Args:
            check: verify the plan.
        """
        plan = template.resized(sizes)
        if plan is not None:
            self.resized += 1
            if check:
                verify(plan.graph)
        return plan


class Template(Generic[P]):
    """Cached plans of one program: one for each set of decisions of the passes.

    Args:
        words: length of the program's key.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        #: most recently used first
        self._variants: list[_Variant[P]] = []

    @property
    def nbytes(self) -> int:
        """Approximate memory of the plans and their key."""
        words = self._words + sum(
            len(variant.asked) * _WORDS_A_QUESTION for variant in self._variants
        )
        return _BYTES_A_WORD * words + sum(variant.plan.nbytes for variant in self._variants)

    def keep(self, sizes: Sizes, asked: Guards, plan: P) -> None:
        """Add a plan for sizes for which ``resized`` returned None.

        A plan with a computed size, one that is not a size of the program, is not cached.
        """
        if set(plan.sizes) <= set(sizes):
            positions = tuple([sizes.index(size) for size in plan.sizes])
            self._variants.insert(0, _Variant(sizes, asked, plan, positions))
            del self._variants[_MOST_VARIANTS:]

    def resized(self, sizes: Sizes) -> P | None:
        """Return the plan in these sizes; None if no cached plan is valid for them."""
        for position, variant in enumerate(self._variants):
            if variant.asked.hold(Resize(variant.sizes, sizes)):
                if position:
                    self._variants.insert(0, self._variants.pop(position))
                plan = variant.plan.resized(tuple([sizes[index] for index in variant.positions]))
                if len(set(plan.sizes)) == len(plan.sizes) or _alike(variant.plan, plan):
                    return plan
        return None


def _alike(plan: Resizable, other: Resizable) -> bool:
    """Return whether two plans differ in sizes only, although some sizes have become equal."""
    counts = [
        specialization_key(either.graph.inputs, either.graph.nodes) for either in (plan, other)
    ]
    return counts[0] == counts[1]


class _Variant(NamedTuple, Generic[P]):
    """Plan of a program for one set of answers to the passes' questions."""

    sizes: Sizes  # of the program when the passes ran
    asked: Guards  # the questions of the passes, with their answers
    plan: P
    positions: tuple[int, ...]  # for each size of the plan its position in ``sizes``
