"""Questions: guards on sizes, recorded in passes and evaluated again in other sizes.

A pass may compare tensors' shapes, strides and offsets and the sizes in calls of ops for equality,
and any size with 0 and 1, without a question: programs that differ there are different programs to
`passes.template` (``specialization_key``). All other decisions by sizes go through ``guard``, so
that the recorded answers tell whether the pass would decide alike in other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import Arg, Node, Ref, map_arg
from lazygt.graph.sizes import Resize

A = TypeVar("A")


class Guards:
    """Questions of one run of the passes, with their answers."""

    def __init__(self) -> None:
        #: question, its arguments, ids of its tensors -> question, arguments, tensors, answer
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
        """Record an answer."""
        key = question, given, *map(id, metas)
        self._answers.setdefault(key, (question, given, list(metas), answer))

    def hold(self, resize: Resize) -> bool:
        """Return whether all answers are the same in other sizes.

        They are not if a question was about a size that ``resize`` does not replace.
        """
        try:
            for question, given, metas, answer in self._answers.values():
                others = [resize.meta(meta) for meta in metas]
                if others != metas and question(*given, *others) != answer:
                    return False
        except KeyError:
            return False
        return True


_ASKED: ContextVar[Guards | None] = ContextVar("asked", default=None)


@contextmanager
def recorded_guards() -> Iterator[Guards]:
    """Record of all questions in the block."""
    asked = Guards()
    token = _ASKED.set(asked)
    try:
        yield asked
    finally:
        _ASKED.reset(token)


def guard(question: Callable[..., A], *metas: TensorMeta, given: tuple[Hashable, ...] = ()) -> A:
    """Return, and record, the answer to a question about the sizes of tensors.

    Args:
        question: a function of ``given`` and these metas, and of nothing else.
        given: its other arguments; no size.
    """
    answer = question(*given, *metas)
    asked = _ASKED.get()
    if asked is not None:
        asked.note(question, given, metas, answer)
    return answer


def specialization_key(metas: Iterable[TensorMeta | None], nodes: Iterable[Node]) -> int:
    """Return the number of different shapes, strides, offsets and calls.

    If two sizes of a program have become equal, it is the same program to every pass as long as
    this number has not changed.

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
    """Distinct shapes, strides, offsets and calls."""

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
    """Yield a node's call of its op, or those of its chain, without tensors."""
    if node.op == WRITE_BACK:
        for op, _, args, kwargs, _ in node.args[2]:
            yield op, typed_key(args), typed_key(kwargs)
    else:
        args = tuple([map_arg(arg, _without_tensor) for arg in node.args])
        yield node.op, typed_key(args), typed_key(node.kwargs)


def _without_tensor(arg: Arg) -> Arg:
    return None if type(arg) is Ref else arg


# -- questions of several passes -------------------------------------------------------------------


def fits(nbytes: int, meta: TensorMeta) -> bool:
    """Return whether a tensor has at most ``nbytes`` bytes."""
    return meta.nbytes <= nbytes


def row_major(meta: TensorMeta) -> bool:
    """Return whether a tensor has the strides of a fresh one."""
    return meta.is_contiguous()
