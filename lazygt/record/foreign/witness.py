"""Witnesses: dependencies of a function's pickled code, compared to detect changes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket

from lazygt.record.foreign import registry
from lazygt.record.foreign.pickling import kernel_function
from lazygt.record.foreign.registry import importable, is_imported

#: Immutable types without references to mutable objects.
_ATOMS = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format, BuiltinFunctionType, type(Ellipsis)}
)  # fmt: skip


class _Mutable(Exception):
    """Object that may change unnoticed: a list, a tensor, an instance."""


class Witness:
    """Objects that a function was seen to refer to, in order."""

    def __init__(self, value: Any, seen: list[Any]) -> None:
        self._value, self._seen = value, seen

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Witness):
            return NotImplemented
        return _same(self._seen, other._seen)

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def of(value: Any) -> Witness | None:
        """Return a function's witness; None if an object that it refers to is mutable."""
        try:
            return Witness(value, _seen(value))
        except _Mutable:
            return None

    def holds(self) -> bool:
        """Return whether the function still refers to the same objects."""
        try:
            return _same(_seen(self._value), self._seen)
        except _Mutable:
            return False


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _seen(value: Any) -> list[Any]:
    seen: list[Any] = []
    _walk(value, seen, set())
    seen.append(registry.count())  # a small number is one object, a new one is another
    return seen


def _walk(value: Any, seen: list[Any], known: set[int]) -> None:
    kind = type(value)
    if kind not in (FunctionType, tuple) or id(value) in known:
        seen.append(value)  # of a function its parts say more than its identity
    if kind in _ATOMS or id(value) in known:
        return
    known.add(id(value))
    if kind is FunctionType:
        _walk_function(value, seen, known)
    elif kind is tuple:
        seen.append(len(value))
        _walk_all(value, seen, known)
    elif kind is ModuleType:
        if not importable(value.__name__):
            raise _Mutable
        seen.append(value.__spec__)
    elif isinstance(value, type):
        if not is_imported(value):
            raise _Mutable
        seen.append(sys.modules[value.__module__].__spec__)
    elif (kernel := kernel_function(value)) is not None:
        _walk(kernel, seen, known)
    elif kind is CustomOpDef:
        _walk_all((*value._backend_fns.values(), value._backward_fn), seen, known)
    elif kind not in (OpOverload, OpOverloadPacket):
        raise _Mutable


def _walk_function(fn: FunctionType, seen: list[Any], known: set[int]) -> None:
    seen.append(fn.__code__)
    if is_imported(fn):
        seen.append(sys.modules[fn.__module__].__spec__)
        return
    _walk_all(fn.__defaults__ or (), seen, known)
    _walk_all((fn.__kwdefaults__ or {}).values(), seen, known)
    for cell in fn.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:  # its variable is defined later
            seen.append(cell)
        else:
            _walk(contents, seen, known)
    for name, value in vars(fn).items():
        seen.append(name)
        _walk(value, seen, known)
    space = fn.__globals__
    for name in _names(fn.__code__):
        if name in space:
            _walk(space[name], seen, known)


def _walk_all(values: Iterable[Any], seen: list[Any], known: set[int]) -> None:
    for value in values:
        _walk(value, seen, known)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return all names in a function and in those inside; some are attributes, no globals."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType)
             for name in _names(const)]  # fmt: skip
    return tuple(dict.fromkeys((*code.co_names, *inner)))
