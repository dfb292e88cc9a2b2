"""Templates: a program that was optimised once is not optimised again for other sizes.

Sizes change from step to step (a batch that is smaller, a sequence that is longer), the program
does not. So a recorded graph is read with a symbol in the place of every size: graphs that then
read the same get the same decisions from every pass, and what the passes made of the first
becomes, with other sizes put in, what they would make of the next.

That holds as long as what passes asked of the first's sizes (``passes.questions``) has the same
answers for the next's, which is checked every time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from lazygt.graph.node import Graph
from lazygt.graph.recent import Recent
from lazygt.graph.sizes import Resize, Sizes
from lazygt.graph.verify import verify
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.questions import Asked, noted, told_apart
from lazygt.passes.skeleton import skeleton

#: Of a program so many plans are kept for which passes have decided otherwise.
_MOST_VARIANTS = 8
#: What one word of a template's key takes of Python's memory, about; a question is as many.
_BYTES_A_WORD, _WORDS_A_QUESTION = 16, 30

Stages = list[tuple[str, Graph]]


class Resizable(Protocol):
    """What is made of a graph, and of the same one in other sizes."""

    @property
    def graph(self) -> Graph:
        """The graph."""

    @property
    def sizes(self) -> Sizes:
        """Those that it is in."""

    @property
    def nbytes(self) -> int:
        """What keeping it takes, about."""

    def resized(self, sizes: Sizes) -> Self:
        """The same in others."""


P = TypeVar("P", bound=Resizable)


class Optimised(NamedTuple, Generic[P]):
    """What the passes made of a graph.

    Attributes:
        plan: made of it.
        template, sizes: its program, and the sizes that the graph has.
    """

    plan: P
    template: Template[P]
    sizes: Sizes


class Templates(Generic[P]):
    """The passes, with a memory for programs that differ only in sizes.

    Args:
        passes: in their order.
        most, most_bytes: so many programs are remembered, of so many bytes, those used last.
        make: what is made of the graph that comes out of the passes.

    Attributes:
        resized: how many graphs needed no pass.
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
        """What the passes make of a recorded graph; it keeps the rules of ``graph.verify``.

        Args:
            check: verify after every pass, and what comes out of a template.
            stages: gets what every pass makes, so every pass is run.

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
        """What the passes would make of a template's program in these sizes; None: not known.

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
    """What the passes made of one program, by how its sizes make them decide.

    Args:
        words: of its key.
    """

    def __init__(self, words: int) -> None:
        self._words = words
        #: used last first
        self._variants: list[_Variant[P]] = []

    @property
    def nbytes(self) -> int:
        """What keeping it takes, about."""
        words = self._words + sum(len(each.asked) * _WORDS_A_QUESTION for each in self._variants)
        return _BYTES_A_WORD * words + sum(each.plan.nbytes for each in self._variants)

    def keep(self, sizes: Sizes, asked: Asked, plan: P) -> None:
        """Take note of what the passes made in sizes for which ``resized`` had nothing.

        A size of the plan that is none of the program's was computed: it has no place in others.
        """
        if set(plan.sizes) <= set(sizes):
            places = tuple([sizes.index(size) for size in plan.sizes])
            self._variants.insert(0, _Variant(sizes, asked, plan, places))
            del self._variants[_MOST_VARIANTS:]

    def resized(self, sizes: Sizes) -> P | None:
        """What the passes would make in these sizes; None when that is not known."""
        for place, variant in enumerate(self._variants):
            if variant.asked.hold(Resize(variant.sizes, sizes)):
                if place:
                    self._variants.insert(0, self._variants.pop(place))
                plan = variant.plan.resized(tuple([sizes[place] for place in variant.places]))
                if len(set(plan.sizes)) == len(plan.sizes) or _alike(variant.plan, plan):
                    return plan
        return None


def _alike(plan: Resizable, other: Resizable) -> bool:
    """Whether two plans of one template differ in sizes only, although some have become equal."""
    counts = [told_apart(each.graph.inputs, each.graph.nodes) for each in (plan, other)]
    return counts[0] == counts[1]


class _Variant(NamedTuple, Generic[P]):
    """What the passes made of a program.

    Attributes:
        sizes: of the program then.
        asked: what they asked.
        places: for each size of the plan which of those it is.
    """

    sizes: Sizes
    asked: Asked
    plan: P
    places: tuple[int, ...]
