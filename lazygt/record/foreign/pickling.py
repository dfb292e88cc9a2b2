"""Pickling of code: functions that no worker can import by value, with the ops they call."""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from lazygt.errors import CodeError
from lazygt.record.foreign.registry import (
    defined,
    importable,
    inner_kernels,
    is_imported,
    source_of,
)
from lazygt.record.tensor import is_lazy
from lazygt.runtime.foreign.loader import (
    OPTIONS,
    Bundle,
    InnerOp,
    NamedOp,
    jitted,
    namespace,
)


def bundle(value: Any, title: str, module: str) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
    """Pickle ``value`` with the ops that it may call.

    Returns:
        The pickle, and the modules and shared libraries that define other such ops.

    Raises:
        CodeError: a part of it can't be pickled.
    """
    main = pickled(value, title, module, _reduced)
    inner: dict[str, bytes] = {}
    modules: dict[str, None] = {}
    todo = [main]
    while todo:
        for func in _named_in(todo.pop()):
            qualname = func.name()
            if qualname in inner:
                continue
            source = source_of(func, "cpu")
            if source.can_be_imported:
                modules.update(dict.fromkeys(source.modules))
            else:
                inner[qualname] = pickled(
                    _inner(func), qualname, ", ".join(source.modules), _reduced
                )
                todo.append(inner[qualname])
    libraries = sorted(torch.ops.loaded_libraries) if b"ops" in main else []
    return pickle.dumps(Bundle(main, tuple(inner.items()))), tuple(modules), tuple(libraries)


def _named_in(text: bytes) -> Iterator[OpOverload]:
    """Yield the ops defined in Python that are named in pickled code: it may call them."""
    for qualname in {**dict(OPDEFS), **defined()}:
        space, _, name = qualname.partition("::")
        if space.encode() in text and name.encode() in text and space not in ("prims", "aten"):
            packet = getattr(getattr(torch.ops, space), name.partition(".")[0], None)
            overload = getattr(packet, name.partition(".")[2] or "default", None)
            if overload is not None:
                yield overload


def _inner(func: OpOverload) -> InnerOp:
    schema = str(func._schema)
    defined = OPDEFS.get(func.name())
    backward = None if defined is None else defined._backward_fn
    context = None if defined is None else defined._setup_context_fn
    return InnerOp(schema[schema.index("(") :], inner_kernels(func), backward, context)


def _reduced(operation: Any) -> Any:
    """Return the reduction of a torch op, or a namespace of them, in pickled code."""
    if isinstance(operation, OpOverload):
        return NamedOp, (operation.name(), operation._overloadname)
    if isinstance(operation, OpOverloadPacket):
        return NamedOp, (operation._qualified_op_name, "")
    if isinstance(operation, torch._ops._OpNamespace):
        return namespace, (operation.name,)
    return NamedOp, (operation._qualname, "default")


def kernel_function(obj: Any) -> FunctionType | None:
    """Return the function of a Triton kernel; None for anything else."""
    kind = type(obj)
    if (kind.__module__, kind.__name__) != ("triton.runtime.jit", "JITFunction"):
        return None
    fn: FunctionType = obj.fn
    return fn


def pickled(value: Any, title: str, module: str, operation: Callable[[Any], Any]) -> bytes:
    """Pickle ``value`` with all code in it that no worker could import.

    Args:
        title, module: names for an error.
        operation: function from a torch op, or a namespace of ops, to its reduction.

    Raises:
        CodeError: a part of it can't be pickled.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, operation)
    try:
        pickler.dump(value)
    except _Refused as error:
        raise CodeError(title, module, str(error)) from None
    except Exception as error:
        raise CodeError(
            title,
            module,
            f"pickling it failed: {type(error).__name__}: {error}. It refers to something that "
            f"only this process has: make that inside of it, or put the code into a module that "
            f"workers can import",
        ) from error
    finally:
        for imported in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(imported)
    return buffer.getvalue()


_OPERATIONS = (CustomOpDef, OpOverload, OpOverloadPacket, _OpNamespace)


class _Refused(Exception):
    """Refusal to pickle an object, with the reason."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, operation: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._operation = operation
        self.by_value: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if is_lazy(obj):
            raise _Refused(
                f"it refers to a lazygt tensor ({list(obj.shape)}, {obj.dtype}): give that to it "
                f"as an argument"
            )
        if kind in _OPERATIONS:
            return self._operation(obj)
        if (fn := kernel_function(obj)) is not None:
            if is_imported(obj):
                return getattr, (sys.modules[obj.__module__], obj.__qualname__)
            options = {name: value for name in OPTIONS if (value := getattr(obj, name, None))}
            lines, first = inspect.getsourcelines(fn)
            return jitted, (fn, tuple(lines), first, options)
        if kind is FunctionType or issubclass(kind, type):
            self._look_at(obj.__module__)
        elif isinstance(obj, ModuleType):
            self._look_at(obj.__name__)
            if kind is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__,)  # torch.ops, and others that are objects
        return super().reducer_override(obj)

    def _look_at(self, name: str | None) -> None:
        """Pickle a module's objects by value if workers can't import it."""
        module = sys.modules.get(name or "")
        if module is None or name == "__main__" or importable(module.__name__):
            return
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(module)
