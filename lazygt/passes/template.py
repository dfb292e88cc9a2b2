"""Templates: a program that was optimised once is not optimised again for other sizes.

Sizes change from step to step (a batch that is smaller, a sequence that is longer), the program
does not. So a recorded graph is read with a symbol in the place of every size: graphs that then
read the same get the same decisions from every pass, and what the passes made of the first
becomes, with other sizes put in, what they would make of the next.

That holds because passes ask of sizes only what such a reading says (see ``passes.sizes``), but
for one thing, which is decided anew: whether fusing a group is worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

from lazygt.graph.node import Graph
from lazygt.graph.recent import Recent
from lazygt.graph.verify import verify
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.fuse import Surroundings, candidates, worth
from lazygt.passes.sizes import Resize, Skeleton, sizes_in, skeleton

#: Of a program so many graphs are kept that differ in what is worth fusing.
_MOST_VERDICTS = 8

Stages = list[tuple[str, Graph]]


class Templates:
    """The passes, with a memory for programs that differ only in sizes.

    Args:
        passes: in their order.
        most, most_bytes: so many programs are remembered, of so many bytes, those used last.

    Attributes:
        resized: how many graphs needed no pass.
    """

    def __init__(self, passes: Sequence[Pass], most: int, most_bytes: int) -> None:
        self._passes = passes
        self._kept: Recent[tuple[Any, ...], _Template] = Recent(most, most_bytes)
        self.resized = 0

    def optimised(self, graph: Graph, check: bool = False, stages: Stages | None = None) -> Graph:
        """What the passes make of a recorded graph; it keeps the rules of ``graph.verify``.

        Args:
            check: verify after every pass, and what comes out of a template.
            stages: gets what every pass makes, so every pass is run.

        Raises:
            GraphError: when the graph breaks its own rules; with ``check``, naming the pass.
        """
        read = skeleton(graph)
        made = self._resized(read) if stages is None else None
        if made is None:
            stages = [] if stages is None else stages
            made = run_passes(graph, self._passes, check, stages)
            verify(made)
            self._keep(read, _unfused(graph, stages), made)
        elif check:
            verify(made)
        return made

    def _resized(self, read: Skeleton) -> Graph | None:
        template = self._kept.get(read.key)
        if template is None:
            return None
        made = template.resized(read.sizes)
        self.resized += made is not None
        return made

    def _keep(self, read: Skeleton, unfused: Graph, made: Graph) -> None:
        template = self._kept.get(read.key)
        if template is None:
            template = _Template(read.sizes, unfused, made)
        else:
            template.keep(read.sizes, made)
        self._kept.keep(read.key, template, template.nbytes)


def _unfused(graph: Graph, stages: Stages) -> Graph:
    """The graph as the pass ``fuse`` is given it."""
    for name, made in stages:
        if name == "fuse":
            break
        graph = made
    return graph


class _Template:
    """What the passes made of one program.

    Args:
        sizes: those that it was seen in first.
        unfused: its graph before the pass ``fuse``.
        made: what the passes made of it.
    """

    def __init__(self, sizes: tuple[int, ...], unfused: Graph, made: Graph) -> None:
        self._sizes, self._unfused, self._first = sizes, unfused, made
        #: which groups are worth it -> what the passes made then
        self._made: dict[tuple[bool, ...], _Made] = {}

    @property
    def nbytes(self) -> int:
        """What keeping it takes, about."""
        return (2 + len(self._made)) * self._unfused.nbytes

    def keep(self, sizes: tuple[int, ...], made: Graph) -> None:
        """Take note of what the passes made in sizes for which ``resized`` had nothing."""
        if self._usable:
            self._made[self._groups.worth(Resize(self._sizes, sizes))] = _Made(sizes, made)
            if len(self._made) > _MOST_VERDICTS:
                del self._made[next(iter(self._made))]

    def resized(self, sizes: tuple[int, ...]) -> Graph | None:
        """The graph that the passes would make in these sizes; None when that is not known."""
        if not self._usable:
            return None
        if not self._made:
            self.keep(self._sizes, self._first)
        found = self._made.get(self._groups.worth(Resize(self._sizes, sizes)))
        return None if found is None else found.resized(sizes)

    # late, both: most programs are never seen in other sizes

    @cached_property
    def _usable(self) -> bool:
        """Whether every size is one of the program's; one that a pass has computed is not."""
        graphs = (self._unfused, self._first)
        return all(sizes_in(node) <= set(self._sizes) for graph in graphs for node in graph.nodes)

    @cached_property
    def _groups(self) -> _Groups:
        return _Groups(self._unfused)


class _Made:
    """A graph that the passes made, and the sizes that it is in."""

    def __init__(self, sizes: tuple[int, ...], graph: Graph) -> None:
        self._sizes, self._graph = sizes, graph
        self._in_nodes = [sizes_in(node) for node in graph.nodes]

    def resized(self, sizes: tuple[int, ...]) -> Graph:
        """The graph in other sizes."""
        resize = Resize(self._sizes, sizes)
        nodes = [
            node if inside.isdisjoint(resize.changed) else resize.node(node)
            for node, inside in zip(self._graph.nodes, self._in_nodes, strict=True)
        ]
        inputs = tuple([resize.meta(meta) for meta in self._graph.inputs])
        return replace(self._graph, inputs=inputs, nodes=tuple(nodes))


class _Groups:
    """The groups that ``fuse`` finds in a graph, whatever its sizes."""

    def __init__(self, unfused: Graph) -> None:
        self._around = Surroundings(unfused)
        #: the members of each, the values that they see, and whether they are worth it
        self._found = [
            (group.members, self._seen(group.members), group.gain > 0)
            for group in candidates(unfused)
            if len(group.members) > 1
        ]

    def _seen(self, members: list[int]) -> set[int]:
        rows = [self._around.rows[number] for number in members]
        return {value for row in rows for value in (*row.node.refs(), *row.results)}

    def worth(self, resize: Resize) -> tuple[bool, ...]:
        """Which of the groups are worth fusing in other sizes."""
        return tuple([
            worth(self._in_sizes(seen, resize), members) > 0 if self._varies(seen, resize) else now
            for members, seen, now in self._found
        ])  # fmt: skip

    def _varies(self, values: set[int], resize: Resize) -> bool:
        metas = [self._around.metas[value] for value in values]
        return any(meta is not None and resize.meta(meta) is not meta for meta in metas)

    def _in_sizes(self, values: set[int], resize: Resize) -> Surroundings:
        around = copy(self._around)
        around.metas = tuple([
            resize.meta(meta) if meta is not None and value in values else meta
            for value, meta in enumerate(self._around.metas)
        ])  # fmt: skip
        return around
