"""Questions: what passes ask of sizes, noted, and asked again in other sizes.

Whether two tensors have the same shape, strides or offset, and what is 0 or 1, a pass may look at
as it likes: programs that differ there are different programs to `passes.template`. Whatever else
it decides by sizes it asks here, so that who has its answers for some sizes can tell whether it
would get the same ones for others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from lazygt.graph.meta import TensorMeta
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


# -- questions of several passes -------------------------------------------------------------------


def fits(nbytes: int, meta: TensorMeta) -> bool:
    """Whether a tensor has at most so many bytes."""
    return meta.nbytes <= nbytes


def row_major(meta: TensorMeta) -> bool:
    """Whether a tensor has the strides of a fresh one."""
    return meta.is_contiguous()
