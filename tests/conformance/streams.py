"""The aten ops that a program runs on CPU tensors, and those that lazygt records for it.

What eager torch runs is seen from below autograd, where its backends begin: by a dispatch key that
nothing else uses, included in this thread. A mode would not do: torch asks whether one is on, and
takes other formulas then, the very ones that are looked for here.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from lazygt.record.recorder import Recorder
from lazygt.record.rng import SessionGenerator
from lazygt.record.tensor import NATIVE

aten: Any = torch.ops.aten
Stream = list[str]

_KEY: Any = torch._C._dispatch_key_parse("Fake")
_KEYS = torch._C.DispatchKeySet(_KEY)
_lines: Stream | None = None


def _noting(op: Any, *args: Any, **kwargs: Any) -> Any:
    _note(op, args, kwargs)
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        return op(*args, **kwargs)


_library = torch.library.Library("_", "IMPL")
_library.fallback(_noting, "Fake")


def _note(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write an op down at once: operands that were kept would live longer than in the program."""
    if _lines is not None and op not in _SKIPPED:
        _lines.append(_line(op, args, kwargs))


@contextmanager
def _noted() -> Iterator[Stream]:
    global _lines
    _lines = lines = Stream()
    try:
        yield lines
    finally:
        _lines = None


@contextmanager
def unseen() -> Iterator[None]:
    """Ops of the test itself are not the program's."""
    global _lines
    kept, _lines = _lines, None
    try:
        yield
    finally:
        _lines = kept


def eager(program: Callable[[], Any]) -> tuple[Any, Stream]:
    """The result of a program on CPU tensors, and what it runs."""
    with _noted() as lines, torch._C._IncludeDispatchKeyGuard(_KEY):
        return program(), lines


def recorded(program: Callable[[], Any]) -> tuple[Any, Stream]:
    """The result of a program on lazygt's tensors, and what is recorded of it."""
    if NATIVE is not None:  # its ops begin where those of torch's own backends do
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                SessionGenerator, "hand_to_workers", _taking(SessionGenerator.hand_to_workers)
            )
            return eager(program)
    record = Recorder.record
    inside = False

    def noting(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal inside
        upload = func is aten.copy_.default and type(args[1]) is torch.Tensor
        if inside or upload:
            return record(recorder, func, args, kwargs)
        _note(func, args, kwargs or {})
        inside = True
        try:
            return record(recorder, func, args, kwargs)
        finally:
            inside = False

    with _noted() as lines, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "record", noting)
        return program(), lines


def _taking(take: Callable[[SessionGenerator], None]) -> Callable[[SessionGenerator], None]:
    """The same, without the ops that bring the state."""

    def taken(generator: SessionGenerator) -> None:
        with unseen():
            take(generator)

    return taken


def differences(ours: Stream, theirs: Stream) -> list[str]:
    """The ops of one stream only: ``-`` eager's, ``+`` lazygt's."""
    found = []
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind != "equal":
            found += [f"- {line}" for line in theirs[a:b]] + [f"+ {line}" for line in ours[c:d]]
    return found


# -- streams that mean the same are written the same way -----------------------------------------

#: They compute nothing.
_SKIPPED = {
    aten.detach.default, aten.detach_.default, aten.alias.default, aten.lift_fresh.default,
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default,
    aten._local_scalar_dense.default, aten.view.default, aten._unsafe_view.default,
    aten._reshape_alias.default, aten.set_.source_Storage, aten.is_same_size.default,
    aten.resize_.default,
}  # fmt: skip

#: Made of an empty tensor and a write into it for a device that has no kernel of its own.
_MADE = {
    "ones": "fill", "full": "fill", "scalar_tensor": "fill", "zeros": "zero", "new_zeros": "zero",
    "zeros_like": "zero", "ones_like": "fill", "_efficientzerotensor": "zero", "rand": "uniform",
    "randn": "normal", "randint": "random", "eye": "eye", "arange": "arange",
    "linspace": "linspace", "logspace": "logspace", "fill": "fill", "zero": "zero",
    "uniform": "uniform", "random": "random", "normal": "normal",
}  # fmt: skip

_PLACES = ("device", "layout", "pin_memory", "generator", "non_blocking")


def _line(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """An op with what it is given; written into its operand or not, it computes the same."""
    *_, name, overload = str(op).split(".")
    name = name.rstrip("_")
    if name in _MADE:
        return _MADE[name]
    given = [
        _text(args[i] if i < len(args) else kwargs.get(a.name, a.default_value))
        for i, a in enumerate(op._schema.arguments)
        if a.name not in _PLACES
    ]
    # a number is a tensor for most ops before they reach a device
    return f"{name}.{'Tensor' if overload == 'Scalar' else overload}({', '.join(given)})"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)
