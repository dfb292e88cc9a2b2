"""Faults that a comparison of recorders has to see, put into the recorder in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lazygt.record import recorder
from lazygt.record.recorder import Recorder
from lazygt.submit.submission import Submitter


def _stale(patch: pytest.MonkeyPatch) -> None:
    """Integers do not stand in keys: a step is found again where it must not be."""
    patch.setattr(recorder, "_PLAIN", recorder._PLAIN - {int})
    key = Recorder._key
    patch.setattr(
        Recorder, "_key", lambda self, a, *rest: int if type(a) is int else key(self, a, *rest)
    )


def _frozen_numbers(patch: pytest.MonkeyPatch) -> None:
    """Numbers are not run-time inputs, but part of the plan."""
    patch.setattr(recorder, "NUMBERS", frozenset())


def _lost_lines(patch: pytest.MonkeyPatch) -> None:
    """Ops are recorded at no line."""
    patch.setattr(recorder, "user_call_site", lambda depth: None)


def _other_reasons(patch: pytest.MonkeyPatch) -> None:
    """A flush says another reason."""
    submit = Submitter.submit
    patch.setattr(
        Submitter,
        "submit",
        lambda self, trace, reason, *rest: submit(self, trace, reason.upper(), *rest),
    )


def _another_op(patch: pytest.MonkeyPatch) -> None:
    """A product is taken twice."""
    record = Recorder.record

    def twice(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if func.name() == "aten::mul.Tensor":
            record(self, func, args, kwargs)
        return record(self, func, args, kwargs)

    patch.setattr(Recorder, "record", twice)


#: Fault -> what must differ then.
MUTATIONS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "stale": (_stale, "values"),
    "frozen numbers": (_frozen_numbers, "plans"),
    "lost lines": (_lost_lines, "plans"),
    "other reasons": (_other_reasons, "flushes"),
    "another op": (_another_op, "count of ops_recorded"),
}


@contextmanager
def applied(name: str | None) -> Iterator[None]:
    """Have a fault for the length of a block."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MUTATIONS[name][0](patch)
        yield
