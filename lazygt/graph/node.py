"""Node and Graph: pure operations on numbered values.

A graph numbers its values: the inputs first, then the results of each node in order. A node may
name an op that torch runs in place; its *meaning* is still pure: it computes on copies, and the
new version of every tensor it writes is one more result. Whether a copy is really made is the
executor's business (see ``graph.alias``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the graph, by number."""

    index: int


_REFS: list[Ref] = []


def ref(index: int) -> Ref:
    """``Ref(index)``, made once: passes renumber every argument of every node."""
    while index >= len(_REFS):
        _REFS.append(Ref(len(_REFS)))
    return _REFS[index]


@dataclass(frozen=True, slots=True)
class Param:
    """A Python number that is known only at run time, by its position in the run message."""

    index: int


#: What may stand in an argument: Ref, Param, None, bool, int, float, complex, str, torch.dtype,
#: torch.layout, torch.memory_format, DEVICE, or a tuple of these.
Arg = Any


class _Device:
    """Stands for "the worker's own device" in arguments."""

    def __repr__(self) -> str:
        return "DEVICE"


DEVICE = _Device()

#: A node with several members inside: ``Node.body``.
FUSED = "lazygt.fused"


@dataclass(frozen=True, slots=True)
class Node:
    """One op applied to values.

    Attributes:
        op: overload name, for example ``aten.add.Tensor``.
        args, kwargs: arguments with Ref and Param in place of tensors and run-time numbers.
        fresh: metas of the tensors that the op returns anew, in order. None for an undefined
            tensor, and for an op with ``dynamic`` set, whose results are known only afterwards.
        writes: numbers of the values it writes; each write is one more result of the node, after
            the fresh ones.
        written: metas of the new versions, one a write.
        dynamic: shapes (or whether there is a tensor at all) depend on values.
        body: the members of a fused node (op FUSED), as a graph of their own. ``args`` are the
            values of the body's inputs, then the numbers of its params; the body's outputs are
            the node's results. ``writes`` are the values whose memory a member writes.
    """

    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    fresh: tuple[TensorMeta | None, ...] = ()
    writes: tuple[int, ...] = ()
    written: tuple[TensorMeta, ...] = ()
    dynamic: bool = False
    body: Graph | None = None
    _refs: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Node):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self._content())

    def _content(self) -> tuple[Any, ...]:
        return (self.op, exact(self.args), exact(self.kwargs), self.fresh, self.writes,
                self.written, self.dynamic, self.body)  # fmt: skip

    @property
    def results(self) -> tuple[TensorMeta | None, ...]:
        """Metas of every value that the node defines."""
        return self.fresh + self.written

    def refs(self) -> tuple[int, ...]:
        """Numbers of the values it reads, in argument order, with repeats."""
        found = self._refs
        if found is None:
            refs: list[int] = []
            _add_refs(self.args, refs)
            for _, arg in self.kwargs:
                _add_refs((arg,), refs)
            found = tuple(refs)
            object.__setattr__(self, "_refs", found)  # every pass asks; asking changes nothing
        return found


#: What an op takes of Python's memory, as measured: in a plan of the client, with the steps that it
#: was recorded in, and in one of a worker, with what it was decoded to and prepared for.
_BYTES_AN_OP = 1250


@dataclass(frozen=True, slots=True)
class Graph:
    """Inputs, nodes and outputs of one trace between two sync points.

    Two side tables, which take no part in equality: ``lines`` names the user's ``file:line`` of
    each node; ``origins`` the recorded op that each node comes from, by number, once passes have
    moved nodes about (empty: they stand as recorded).
    """

    inputs: tuple[TensorMeta, ...]
    params: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)
    origins: tuple[int, ...] = field(default=(), compare=False)

    @property
    def values(self) -> tuple[TensorMeta | None, ...]:
        """The meta of every value, by number."""
        metas: list[TensorMeta | None] = list(self.inputs)
        for node in self.nodes:
            metas.extend(node.results)
        return tuple(metas)

    def numbered(self) -> Iterator[tuple[Node, range]]:
        """Each node with the numbers of its results."""
        start = len(self.inputs)
        for node in self.nodes:
            stop = start + len(node.results)
            yield node, range(start, stop)
            start = stop

    @property
    def nbytes(self) -> int:
        """What keeping a plan of it takes, about; in the client and in each worker."""
        ops = sum(1 if node.body is None else len(node.body.nodes) for node in self.nodes)
        return _BYTES_AN_OP * (ops + 1)

    def line(self, number: int) -> str:
        """The user's line of node ``number``, or ``"?"``."""
        return self.lines[number] if number < len(self.lines) else "?"

    def origin(self, number: int) -> int:
        """The recorded op that node ``number`` comes from."""
        return self.origins[number] if self.origins else number


def _add_refs(args: tuple[Arg, ...], refs: list[int]) -> None:
    """Add the numbers of the values inside arguments."""
    for arg in args:
        if type(arg) is Ref:
            refs.append(arg.index)
        elif type(arg) is tuple:
            _add_refs(arg, refs)


def map_arg(arg: Arg, leaf: Any) -> Arg:
    """``arg`` with ``leaf`` applied to everything that is not a tuple."""
    if type(arg) is tuple:
        return tuple(map_arg(item, leaf) for item in arg)
    return leaf(arg)
