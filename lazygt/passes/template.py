"""Templates: a program that was optimised once is not optimised again for other sizes.

Sizes change from step to step (a batch that is smaller, a sequence that is longer), the program
does not. So a recorded graph is read with a symbol in the place of every size: graphs that then
read the same get the same decisions from every pass, and what the passes made of the first
becomes, with other sizes put in, what they would make of the next.

That holds because passes ask of sizes only what such a reading says (see ``skeleton``), but
for one thing, which is decided anew: whether fusing a group is worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from lazygt.graph.alias import WRITE_BACK, op_facts
from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import Arg, Graph, Node, Param, Ref
from lazygt.graph.recent import Recent
from lazygt.graph.verify import verify
from lazygt.passes.base import Pass, run_passes
from lazygt.passes.cse import _SMALL as CHEAP_TO_KEEP
from lazygt.passes.foreach import SMALL
from lazygt.passes.fuse import Surroundings, candidates, worth

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
        plan = self._resized(read) if stages is None else None
        if plan is None:
            stages = [] if stages is None else stages
            plan = run_passes(graph, self._passes, check, stages)
            verify(plan)
            self._keep(read, _unfused(graph, stages), plan)
        elif check:
            verify(plan)
        return plan

    def _resized(self, read: Skeleton) -> Graph | None:
        template = self._kept.get(read.key)
        if template is None:
            return None
        plan = template.resized(read.sizes)
        self.resized += plan is not None
        return plan

    def _keep(self, read: Skeleton, unfused: Graph, plan: Graph) -> None:
        template = self._kept.get(read.key)
        if template is None:
            template = _Template(read.sizes, unfused, plan)
        else:
            template.keep(read.sizes, plan)
        self._kept.keep(read.key, template, template.nbytes)


def _unfused(graph: Graph, stages: Stages) -> Graph:
    """The graph as the pass ``fuse`` is given it."""
    for name, after in stages:
        if name == "fuse":
            break
        graph = after
    return graph


class _Template:
    """What the passes made of one program.

    Args:
        sizes: those that it was seen in first.
        unfused: its graph before the pass ``fuse``.
        plan: what the passes made of it.
    """

    def __init__(self, sizes: tuple[int, ...], unfused: Graph, plan: Graph) -> None:
        self._sizes, self._unfused, self._first = sizes, unfused, plan
        #: which groups are worth it -> what the passes made then
        self._made: dict[tuple[bool, ...], _Made] = {}

    @property
    def nbytes(self) -> int:
        """What keeping it takes, about."""
        return (2 + len(self._made)) * self._unfused.nbytes

    def keep(self, sizes: tuple[int, ...], plan: Graph) -> None:
        """Take note of what the passes made in sizes for which ``resized`` had nothing."""
        if self._usable:
            self._made[self._groups.worth(Resize(self._sizes, sizes))] = _Made(sizes, plan)
            if len(self._made) > _MOST_VERDICTS:
                del self._made[next(iter(self._made))]

    def resized(self, sizes: tuple[int, ...]) -> Graph | None:
        """The graph that the passes would make in these sizes; None when that is not known."""
        if not self._usable:
            return None
        if not self._made:
            self.keep(self._sizes, self._first)
        verdict = self._made.get(self._groups.worth(Resize(self._sizes, sizes)))
        return None if verdict is None else verdict.resized(sizes)

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


# -- the sizes of a graph --------------------------------------------------------------------------
#
# A graph is read with symbols for its sizes, and written anew with others. What a reading says of
# sizes is all that passes may ask of them, so that they decide the same on graphs that read the
# same:
#
# - which are equal, and which are 0, 1 or negative: those stand for themselves
# - of a tensor: whether it is row-major, whether it fills its memory
# - which of two tensors has more elements, or more bytes
# - whether a tensor has at most so many bytes: ``_LIMITS``

#: Bytes of one tensor up to which a pass decides one way, and above another.
_LIMITS = (CHEAP_TO_KEEP, SMALL)


class Skeleton(NamedTuple):
    """A graph read with symbols for its sizes.

    Attributes:
        key: everything but the sizes; graphs with equal keys get the same from every pass.
        sizes: what the symbols stand for, in the order in which they appear; each another number.
    """

    key: tuple[Any, ...]
    sizes: tuple[int, ...]


def skeleton(graph: Graph) -> Skeleton:
    """The reading of a recorded graph; linear in its size."""
    reader = _Reader()
    reader.read(graph)
    return Skeleton(tuple(reader.key), tuple(reader.symbols))


class _Reader:
    """Writes a graph down as one flat list, in which what was written says how to read on."""

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.symbols: dict[int, int] = {}
        #: id of a meta -> its number among all metas
        self.metas: dict[int, int] = {}
        self.numels: list[int] = []
        self.nbytes: list[int] = []

    def read(self, graph: Graph) -> None:
        """Add a graph to the key."""
        self.key += (graph.params, graph.outputs, graph.lines, len(graph.inputs))
        for meta in graph.inputs:
            self._meta(meta)
        for node in graph.nodes:
            self.node(node)
        self.key += _ranks(self.numels) + _ranks(self.nbytes)

    def node(self, node: Node) -> None:
        """One node, its members too."""
        sized = _sized(node.op)
        self.key += (node.op, len(node.args), len(node.kwargs), len(node.fresh), node.writes,
                     len(node.written), node.dynamic)  # fmt: skip
        for place, arg in enumerate(node.args):
            self._arg(arg, place in sized)
        for name, arg in node.kwargs:
            self.key.append(name)
            self._arg(arg, name in sized)
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
        if size > 1:
            self.key += ("size", self.symbols.setdefault(size, len(self.symbols)))
        else:
            self.key.append(size)

    def _meta(self, meta: TensorMeta | None) -> None:
        if meta is None:
            self.key.append(None)
            return
        number = self.metas.setdefault(id(meta), len(self.metas))
        self.key.append(number)
        if number < len(self.numels):
            return
        traits, numel, nbytes = _traits(meta)
        self.numels.append(numel)
        self.nbytes.append(nbytes)
        self.key.append(traits)
        for size in (*meta.shape, *meta.stride, meta.offset):
            self._size(size)


@lru_cache(maxsize=4096)
def _sized(op: str) -> frozenset[int | str]:
    """The positions and keywords in which a whole number is a size, and not data."""
    if op == WRITE_BACK:
        return frozenset({2})
    facts = None if op.startswith("lazygt.") else op_facts(Node(op, ()))
    if facts is None:
        return frozenset()
    places = {place for place, data in enumerate(facts.hoist) if not data}
    return frozenset(places | {name for name, data in facts.hoist_named.items() if not data})


@lru_cache(maxsize=16384)
def _traits(meta: TensorMeta) -> tuple[tuple[Any, ...], int, int]:
    """What passes ask of one tensor besides its sizes; its elements; its bytes."""
    numel, nbytes = meta.numel, meta.nbytes
    limits = [nbytes <= limit for limit in _LIMITS]
    traits = (meta.dtype, len(meta.shape), meta.conj, meta.neg, meta.plain, meta.is_contiguous(),
              meta.extent == numel, *limits)  # fmt: skip
    return traits, numel, nbytes


def _ranks(numbers: list[int]) -> list[int]:
    """Each number by its place among all; 0 stands for itself."""
    places = {number: place for place, number in enumerate(sorted({0, *numbers}))}
    return [places[number] for number in numbers]


def sizes_in(node: Node) -> frozenset[int]:
    """The sizes above 1 that stand in a node, or in its members."""
    reader = _Reader()
    reader.node(node)
    return frozenset(reader.symbols)


# -- other sizes -----------------------------------------------------------------------------------


class Resize:
    """Puts other sizes in the place of those that a graph has.

    Attributes:
        changed: the old sizes that have a new one.
    """

    def __init__(self, have: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        self._sizes = dict(zip(have, wanted, strict=True))
        self.changed = {old for old, new in self._sizes.items() if old != new}
        self._metas: dict[int, TensorMeta] = {}

    def node(self, node: Node) -> Node:
        """The node in the new sizes, its members too."""
        sized = _sized(node.op)
        args = [self._arg(arg) if place in sized else arg for place, arg in enumerate(node.args)]
        kwargs = [(name, self._arg(arg) if name in sized else arg) for name, arg in node.kwargs]
        fresh = [None if meta is None else self.meta(meta) for meta in node.fresh]
        written = [self.meta(meta) for meta in node.written]
        body = None if node.body is None else self._body(node.body)
        return Node(node.op, tuple(args), tuple(kwargs), tuple(fresh), node.writes, tuple(written),
                    node.dynamic, body)  # fmt: skip

    def meta(self, meta: TensorMeta) -> TensorMeta:
        """The meta in the new sizes; the very object where they are the old ones."""
        resized = self._metas.get(id(meta))
        if resized is None:
            shape, stride = self._arg(meta.shape), self._arg(meta.stride)
            resized = meta
            if shape != meta.shape or stride != meta.stride or meta.offset in self.changed:
                offset = self._arg(meta.offset)
                resized = intern(shape, stride, meta.dtype, offset, meta.conj, meta.neg)
            self._metas[id(meta)] = resized
        return resized

    def _body(self, body: Graph) -> Graph:
        nodes = tuple([self.node(node) for node in body.nodes])
        return replace(body, inputs=tuple([self.meta(meta) for meta in body.inputs]), nodes=nodes)

    def _arg(self, arg: Arg) -> Arg:
        kind = type(arg)
        if kind is tuple:
            return tuple([self._arg(item) for item in arg])
        return self._sizes[arg] if kind is int and arg > 1 else arg
