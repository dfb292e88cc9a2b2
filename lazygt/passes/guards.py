"""Guards on sizes (as in torch.compile), recorded in passes and evaluated again in other sizes.

A guard is a predicate of some tensors' sizes, with its answer. A pass may compare tensors' shapes,
strides and offsets and the sizes in calls of ops for equality, and any size with 0 and 1, without a
guard: programs that differ there are different programs to `passes.template`
(``specialization_key``). All other decisions by sizes go through ``guard``, so that the recorded
answers tell whether the pass would decide alike in other sizes.
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
    """Guards of one run of the passes: predicates with their answers."""

    def __init__(self) -> None:
        #: predicate, its arguments, ids of its tensors -> predicate, arguments, tensors, answer
        self._answers: dict[Any, tuple[Callable[..., Any], tuple[Any, ...], list[TensorMeta], Any]]
        self._answers = {}

    def __len__(self) -> int:
        return len(self._answers)

    def note(
        self,
        predicate: Callable[..., Any],
        constants: tuple[Hashable, ...],
        metas: tuple[TensorMeta, ...],
        answer: Any,
    ) -> None:
        """Record an answer; the arguments are those of ``guard``."""
        key = predicate, constants, *map(id, metas)
        self._answers.setdefault(key, (predicate, constants, list(metas), answer))

    def hold(self, resize: Resize) -> bool:
        """Return whether all answers are the same in other sizes.

        They are not if a predicate was about a size that ``resize`` does not replace.
        """
        try:
            for predicate, constants, metas, answer in self._answers.values():
                others = [resize.meta(meta) for meta in metas]
                if others != metas and predicate(*constants, *others) != answer:
                    return False
        except KeyError:
            return False
        return True


_RECORDING: ContextVar[Guards | None] = ContextVar("guards", default=None)


@contextmanager
def recorded_guards() -> Iterator[Guards]:
    """Context that records all guards of the block."""
    guards = Guards()
    token = _RECORDING.set(guards)
    try:
        yield guards
    finally:
        _RECORDING.reset(token)


def guard(
    predicate: Callable[..., A], *metas: TensorMeta, constants: tuple[Hashable, ...] = ()
) -> A:
    """Return, and record, a predicate's answer about the sizes of tensors.

    Args:
        predicate: a function of ``constants`` and these metas, and of nothing else. It may return
            any value, such as an index.
        constants: its other arguments; no size.
    """
    answer = predicate(*constants, *metas)
    guards = _RECORDING.get()
    if guards is not None:
        guards.note(predicate, constants, metas, answer)
    return answer


def specialization_key(metas: Iterable[TensorMeta | None], nodes: Iterable[Node]) -> int:
    """Return the number of different shapes, strides, offsets and calls.

    If two sizes of a program have become equal, it is the same program to every pass as long as
    this number has not changed.

    Args:
        metas: of the inputs.
    """
    distinct = _Distinct()
    for meta in metas:
        distinct.meta(meta)
    for node in nodes:
        distinct.node(node)
    return (
        len(distinct.shapes) + len(distinct.strides) + len(distinct.offsets) + len(distinct.calls)
    )


class _Distinct:
    """Distinct shapes, strides, offsets and calls."""

    def __init__(self) -> None:
        self.shapes: set[tuple[int, ...]] = set()
        self.strides: set[tuple[int, ...]] = set()
        self.offsets: set[int] = set()
        self.calls: set[Any] = set()

    def meta(self, meta: TensorMeta | None) -> None:
        """Add the meta of a value."""
        if meta is not None:
            self.shapes.add(meta.shape)
            self.strides.add(meta.stride)
            self.offsets.add(meta.offset)

    def node(self, node: Node) -> None:
        """Add a node with its results and, if it is fused, its members."""
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


# -- predicates of several passes ------------------------------------------------------------------


def fits(nbytes: int, meta: TensorMeta) -> bool:
    """Return whether a tensor has at most ``nbytes`` bytes."""
    return meta.nbytes <= nbytes


def row_major(meta: TensorMeta) -> bool:
    """Return whether a tensor has the strides of a fresh one."""
    return meta.is_contiguous()
