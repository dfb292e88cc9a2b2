"""Templates: optimised programs, reused in other sizes.

Sizes change from step to step (a batch that is smaller, a sequence that is longer), the program
does not. So a recorded graph is read with a symbol in the place of every size: graphs that then
read the same get the same decisions from every pass. The optimised first graph, with other sizes
put in, is the optimised next one.

That holds as long as the passes' questions about the first's sizes (``passes.questions``) have the
same answers for the next's, which is checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from lazygt.graph.meta import TensorMeta, exact
from lazygt.graph.node import Arg, Graph, Node, Param, Ref, verify
from lazygt.graph.recent import Recent
from lazygt.graph.sizes import LEAST, Resize, Sizes, sized
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.questions import Asked, noted, told_apart

# -- skeletons: graphs read with symbols for their sizes -------------------------------------------
# Graphs that read the same are one program in several sizes. 0, 1 and negative numbers stand for
# themselves, and equal sizes have the same symbol.


class Skeleton(NamedTuple):
    """A graph read with symbols for its sizes.

    Attributes:
        key: everything but the sizes.
        sizes: the numbers of the symbols, in order of appearance; all different.
    """

    key: tuple[Any, ...]
    sizes: Sizes


def skeleton(graph: Graph) -> Skeleton:
    """Return the skeleton of a recorded graph; linear in its size."""
    reader = _Reader()
    reader.read(graph)
    return Skeleton(tuple(reader.key), tuple(reader.symbols))


class _Reader:
    """Serialization of a graph to one flat, self-delimiting list."""

    def __init__(self) -> None:
        self.key: list[Any] = []
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
        places = sized(node.op)
        self.key += (node.op, len(node.args), len(node.kwargs), len(node.fresh), node.writes,
                     len(node.written), node.dynamic)  # fmt: skip
        for place, arg in enumerate(node.args):
            self._arg(arg, place in places)
        for name, arg in node.kwargs:
            self.key.append(name)
            self._arg(arg, name in places)
        for meta in node.results:
            self._meta(meta)
        if node.body is not None:
            self.read(node.body)

    def _arg(self, arg: Arg, sized: bool) -> None:
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
            self.key += exact(arg)

    def _size(self, size: int) -> None:
        if size >= LEAST:
            self.key += ("size", self.symbols.setdefault(size, len(self.symbols)))
        else:
            self.key.append(size)

    def _meta(self, meta: TensorMeta | None) -> None:
        if meta is None:
            self.key.append(None)
            return
        known = len(self.metas)
        number = self.metas.setdefault(id(meta), known)
        self.key.append(number)
        if number < known:
            return
        self.key += (meta.dtype, len(meta.shape), meta.conj, meta.neg)
        for size in (*meta.shape, *meta.stride, meta.offset):
            self._size(size)


# -- templates: optimised programs, reused in other sizes ------------------------------------------

#: Most plans that are kept of a program, each for other decisions of the passes.
_MOST_VARIANTS = 8
#: Approximate Python memory of a word of a template's key, and words of a question.
_BYTES_A_WORD, _WORDS_A_QUESTION = 16, 30

Stages = list[tuple[str, Graph]]


class Resizable(Protocol):
    """Plan of a graph that can be made in other sizes."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def sizes(self) -> Sizes:
        """Sizes that it is in."""

    @property
    def nbytes(self) -> int:
        """Approximate memory of it."""

    def resized(self, sizes: Sizes) -> Self:
        """Return the same plan in other sizes."""


P = TypeVar("P", bound=Resizable)


class Optimised(NamedTuple, Generic[P]):
    """Result of the passes for a graph.

    Attributes:
        plan: of the optimised graph.
        template, sizes: its program, and the sizes that the graph has.
    """

    plan: P
    template: Template[P]
    sizes: Sizes


class Templates(Generic[P]):
    """The passes, with a cache for programs that differ only in sizes.

    Args:
        passes: in their order.
        most, most_bytes: bounds of the LRU cache: number of programs, and their bytes.
        make: builds the plan of an optimised graph.

    Attributes:
        resized: the number of graphs that needed no pass.
    """

    def __init__(
        self, passes: Sequence[Pass], most: int, most_bytes: int, make: Callable[[Graph], P]
    ) -> None:
        self._passes, self._make = passes, make
        self._kept: Recent[tuple[Any, ...], Template[P]] = Recent(most, most_bytes)
        self.resized = 0

    def optimised(
        self, graph: Graph, check: bool = False, stages: Stages | None = None
    ) -> Optimised[P]:
        """Return the optimised form of a recorded graph; it keeps the rules of ``graph.verify``.

        Args:
            check: verify after every pass, and a plan that comes out of a template.
            stages: gets the result of every pass, so every pass is run.

        Raises:
            GraphError: when the graph breaks its own rules; with ``check``, naming the pass.
        """
        read = skeleton(graph)
        template = self._kept.get(read.key)
        if stages is None and template is not None:
            plan = self.resize(template, read.sizes, check)
            if plan is not None:
                return Optimised(plan, template, read.sizes)
        with noted() as asked:
            optimised = run_passes(graph, self._passes, check, stages)
        verify(optimised)
        plan = self._make(optimised)
        template = Template(len(read.key)) if template is None else template
        template.keep(read.sizes, asked, plan)
        self._kept.keep(read.key, template, template.nbytes)
        return Optimised(plan, template, read.sizes)

    def resize(self, template: Template[P], sizes: Sizes, check: bool = False) -> P | None:
        """Return the plan of a template's program in these sizes; None: not known.

        Args:
            check: verify it.
        """
        plan = template.resized(sizes)
        if plan is not None:
            self.resized += 1
            if check:
                verify(plan.graph)
        return plan


class Template(Generic[P]):
    """Plans of one program, by the decisions that its sizes lead to.

    Args:
        words: of its key.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        #: used last first
        self._variants: list[_Variant[P]] = []

    @property
    def nbytes(self) -> int:
        """Approximate memory of it."""
        words = self._words + sum(len(each.asked) * _WORDS_A_QUESTION for each in self._variants)
        return _BYTES_A_WORD * words + sum(each.plan.nbytes for each in self._variants)

    def keep(self, sizes: Sizes, asked: Asked, plan: P) -> None:
        """Add the plan of sizes for which ``resized`` had none.

        A plan with a computed size, one that is none of the program's, is not kept.
        """
        if set(plan.sizes) <= set(sizes):
            places = tuple([sizes.index(size) for size in plan.sizes])
            self._variants.insert(0, _Variant(sizes, asked, plan, places))
            del self._variants[_MOST_VARIANTS:]

    def resized(self, sizes: Sizes) -> P | None:
        """Return the plan in these sizes; None when it is not known."""
        for place, variant in enumerate(self._variants):
            if variant.asked.hold(Resize(variant.sizes, sizes)):
                if place:
                    self._variants.insert(0, self._variants.pop(place))
                plan = variant.plan.resized(tuple([sizes[place] for place in variant.places]))
                if len(set(plan.sizes)) == len(plan.sizes) or _alike(variant.plan, plan):
                    return plan
        return None


def _alike(plan: Resizable, other: Resizable) -> bool:
    """Return whether two plans differ in sizes only, although some have become equal."""
    counts = [told_apart(each.graph.inputs, each.graph.nodes) for each in (plan, other)]
    return counts[0] == counts[1]


class _Variant(NamedTuple, Generic[P]):
    """Plan of a program by one set of answers.

    Attributes:
        sizes: of the program then.
        asked: the questions of the passes.
        places: for each size of the plan its position in ``sizes``.
    """

    sizes: Sizes
    asked: Asked
    plan: P
    places: tuple[int, ...]
