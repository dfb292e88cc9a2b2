"""Questions: what passes ask of sizes, noted, and asked again in other sizes.

Whether two tensors have the same shape, strides or offset, whether two ops are called with the same
sizes, and what is 0 or 1, a pass may look at as it likes: programs that differ there are different
programs to `passes.template` (``told_apart``). Whatever else it decides by sizes it asks here, so
that who has its answers for some sizes can tell whether it would get the same ones for others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Arg, Node, Ref, map_arg
from lazygt.graph.sizes import Resize

A = TypeVar("A")


class Asked:
    """The questions that were asked in one run of the passes, with their answers."""

    def __init__(self) -> None:
        #: question, what is given with it and the tensors that it is about -> the same, its answer
        self._answers: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], list[TensorMeta], Any]]
        self._answers = {}

    def __len__(self) -> int:
        return len(self._answers)

    def note(
        self,
        question: Callable[..., Any],
        given: tuple[Hashable, ...],
        metas: tuple[TensorMeta, ...],
        answer: Any,
    ) -> None:
        """Take note of an answer."""
        key = question, given, *map(id, metas)
        self._answers.setdefault(key, (question, given, list(metas), answer))

    def hold(self, resize: Resize) -> bool:
        """Whether all answers are the same in other sizes; also not, when one was about a size
        that no other takes the place of."""
        try:
            for question, given, metas, answer in self._answers.values():
                others = [resize.meta(meta) for meta in metas]
                if others != metas and question(*given, *others) != answer:
                    return False
        except KeyError:
            return False
        return True


_ASKED: ContextVar[Asked | None] = ContextVar("asked", default=None)


@contextmanager
def noted() -> Iterator[Asked]:
    """Take note of all questions in the block."""
    asked = Asked()
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def ask(question: Callable[..., A], *metas: TensorMeta, given: tuple[Hashable, ...] = ()) -> A:
    """The answer to a question about the sizes of tensors.

    Args:
        question: a function of ``given`` and these metas, and of nothing else.
        given: what it asks about besides; no size.
    """
    answer = question(*given, *metas)
    asked = _ASKED.get()
    if asked is not None:
        asked.note(question, given, metas, answer)
    return answer


def told_apart(metas: Iterable[TensorMeta | None], nodes: Iterable[Node]) -> int:
    """How many different shapes, strides, offsets and calls there are.

    A program in sizes of which two have become equal is the same one to every pass where this is
    what it was.

    Args:
        metas: of the inputs.
    """
    apart = _Apart()
    for meta in metas:
        apart.meta(meta)
    for node in nodes:
        apart.node(node)
    return len(apart.shapes) + len(apart.strides) + len(apart.offsets) + len(apart.calls)


class _Apart:
    """What there is of each kind."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()
        self.strides: set[tuple[int, ...]] = set()
        self.offsets: set[int] = set()
        self.calls: set[Any] = set()

    def meta(self, meta: TensorMeta | None) -> None:
        if meta is not None:
            self.shapes.add(meta.shape)
            self.strides.add(meta.stride)
            self.offsets.add(meta.offset)

    def node(self, node: Node) -> None:
        self.calls.update(_calls(node))
        for meta in node.results:
            self.meta(meta)
        for member in () if node.body is None else node.body.nodes:
            self.node(member)


def _calls(node: Node) -> Iterator[Any]:
    """How a node calls its op, or those of its chain, whatever the tensors."""
    if node.op == WRITE_BACK:
        for op, _, args, kwargs, _ in node.args[2]:
            yield op, exact(args), exact(kwargs)
    else:
        args = tuple([map_arg(arg, _without_tensor) for arg in node.args])
        yield node.op, exact(args), exact(node.kwargs)


def _without_tensor(arg: Arg) -> Arg:
    return None if type(arg) is Ref else arg


# -- questions of several passes -------------------------------------------------------------------


def fits(nbytes: int, meta: TensorMeta) -> bool:
    """Whether a tensor has at most so many bytes."""
    return meta.nbytes <= nbytes


def row_major(meta: TensorMeta) -> bool:
    """Whether a tensor has the strides of a fresh one."""
    return meta.is_contiguous()
