"""Pickling of code for workers, by value where no worker can import it, with the ops it calls."""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib import import_module
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from lazygt.errors import CodeError
from lazygt.record.custom import registry
from lazygt.record.custom.registry import (
    defined,
    importable,
    inner_kernels,
    is_imported,
    source_of,
)
from lazygt.record.tensor import is_lazy
from lazygt.runtime.custom_ops import (
    OPTIONS,
    Bundle,
    InnerOp,
    NamedOp,
    jitted,
    namespace,
)


def bundle(value: Any, title: str, module: str) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
    """Pickle ``value`` with the custom ops that it may call, found transitively.

    Returns:
        The pickle, and the modules and shared libraries that define other custom ops.

    Raises:
        CodeError: a part of it can't be pickled.
    """
    main = pickled(value, title, module, _reduction)
    inner_ops: dict[str, bytes] = {}
    modules: dict[str, None] = {}
    pending = [main]
    while pending:
        for func in _ops_named_in(pending.pop()):
            qualname = func.name()
            if qualname in inner_ops:
                continue
            source = source_of(func, "cpu")
            if source.can_be_imported:
                modules.update(dict.fromkeys(source.modules))
            else:
                inner_ops[qualname] = pickled(
                    _inner_op(func), qualname, ", ".join(source.modules), _reduction
                )
                pending.append(inner_ops[qualname])
    libraries = sorted(torch.ops.loaded_libraries) if b"ops" in main else []
    return pickle.dumps(Bundle(main, tuple(inner_ops.items()))), tuple(modules), tuple(libraries)


def _ops_named_in(text: bytes) -> Iterator[OpOverload]:
    """Yield the ops defined in Python whose names occur in pickled code."""
    for qualname in {**dict(OPDEFS), **defined()}:
        space, _, name = qualname.partition("::")
        if space.encode() in text and name.encode() in text and space not in ("prims", "aten"):
            packet = getattr(getattr(torch.ops, space), name.partition(".")[0], None)
            overload = getattr(packet, name.partition(".")[2] or "default", None)
            if overload is not None:
                yield overload


def _inner_op(func: OpOverload) -> InnerOp:
    """Return an op's schema, kernels and backward, for a worker to define it."""
    schema = str(func._schema)
    defined = OPDEFS.get(func.name())
    backward = None if defined is None else defined._backward_fn
    context = None if defined is None else defined._setup_context_fn
    return InnerOp(schema[schema.index("(") :], inner_kernels(func), backward, context)


def _reduction(operation: Any) -> Any:
    """Return the pickle reduction of a torch op, or of a namespace of ops."""
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
        operation: function from a torch op, or a namespace of ops, to its reduction: what
            ``__reduce__`` would return.

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
            f"pickling it failed: {type(error).__name__}: {error}. It refers to an object that "
            f"only this process has: create that inside of it, or put the code into a module that "
            f"workers can import",
        ) from error
    finally:
        for imported in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(imported)
    return buffer.getvalue()


_OPERATIONS = (CustomOpDef, OpOverload, OpOverloadPacket, _OpNamespace)


class _Refused(Exception):
    """Reason why an object is not pickled."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler with reductions for torch ops, Triton kernels and unimportable modules."""

    def __init__(self, file: io.BytesIO, operation: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._operation = operation
        self.by_value: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        """Return an object's reduction; raise ``_Refused`` for a lazy tensor."""
        cls = type(obj)
        if is_lazy(obj):
            raise _Refused(
                f"it refers to a lazygt tensor ({list(obj.shape)}, {obj.dtype}): pass that as an "
                f"argument"
            )
        if cls in _OPERATIONS:
            return self._operation(obj)
        if (fn := kernel_function(obj)) is not None:
            if is_imported(obj):
                return getattr, (sys.modules[obj.__module__], obj.__qualname__)
            options = {name: value for name in OPTIONS if (value := getattr(obj, name, None))}
            lines, first = inspect.getsourcelines(fn)
            return jitted, (fn, tuple(lines), first, options)
        if cls is FunctionType or issubclass(cls, type):
            self._pickle_module_by_value(obj.__module__)
        elif isinstance(obj, ModuleType):
            self._pickle_module_by_value(obj.__name__)
            if cls is not ModuleType and sys.modules.get(obj.__name__) is obj:
                return import_module, (obj.__name__,)  # torch.ops, and others that are objects
        return super().reducer_override(obj)

    def _pickle_module_by_value(self, name: str | None) -> None:
        """Register a module for pickling by value if workers can't import it."""
        module = sys.modules.get(name or "")
        if module is None or name == "__main__" or importable(module.__name__):
            return
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(module)


# -- code fingerprints -----------------------------------------------------------------------------

#: Immutable types without references to mutable objects.
_ATOMS = frozenset(
    {int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format, BuiltinFunctionType, type(Ellipsis)}
)  # fmt: skip


class _Mutable(Exception):
    """Object that may change unnoticed: a list, a tensor, an instance."""


class Fingerprint:
    """Fingerprint of a function: the objects that its code refers to, compared by identity.

    Args:
        value: the function, or a tuple with it and its arguments.
        references: the objects, in the order of `_references`.
    """

    def __init__(self, value: Any, references: list[Any]) -> None:
        self._value, self._recorded = value, references

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return _identical(self._recorded, other._recorded)

    __hash__ = None  # type: ignore[assignment]

    @staticmethod
    def of(value: Any) -> Fingerprint | None:
        """Return a function's fingerprint; None if it refers to a mutable object."""
        try:
            return Fingerprint(value, _references(value))
        except _Mutable:
            return None

    def holds(self) -> bool:
        """Return whether the function still refers to the same objects."""
        try:
            return _identical(_references(self._value), self._recorded)
        except _Mutable:
            return False


def _identical(first: list[Any], second: list[Any]) -> bool:
    """Return whether two lists have the same objects, by identity."""
    return len(first) == len(second) and all(map(is_, first, second))


def _references(value: Any) -> list[Any]:
    """Return the objects that a value's code refers to, and the number of op registrations.

    The number is compared by identity like the objects: so any new registration of an op makes
    fingerprints differ.
    """
    objects: list[Any] = []
    _collect(value, objects, set())
    # the registry's counter is one int object until the next registration replaces it
    objects.append(registry.registration_count())
    return objects


def _collect(value: Any, objects: list[Any], visited: set[int]) -> None:
    """Append the objects that a value refers to, depth first; raise ``_Mutable`` if one is."""
    cls = type(value)
    if cls not in (FunctionType, tuple) or id(value) in visited:
        objects.append(value)  # a function is compared by its parts, not by identity
    if cls in _ATOMS or id(value) in visited:
        return
    visited.add(id(value))
    if cls is FunctionType:
        _collect_function(value, objects, visited)
    elif cls is tuple:
        objects.append(len(value))
        _collect_all(value, objects, visited)
    elif cls is ModuleType:
        if not importable(value.__name__):
            raise _Mutable
        objects.append(value.__spec__)
    elif isinstance(value, type):
        if not is_imported(value):
            raise _Mutable
        objects.append(sys.modules[value.__module__].__spec__)
    elif (kernel := kernel_function(value)) is not None:
        _collect(kernel, objects, visited)
    elif cls is CustomOpDef:
        _collect_all((*value._backend_fns.values(), value._backward_fn), objects, visited)
    elif cls not in (OpOverload, OpOverloadPacket):
        raise _Mutable


def _collect_function(fn: FunctionType, objects: list[Any], visited: set[int]) -> None:
    """Append a function's code, defaults, closure, attributes and used globals."""
    objects.append(fn.__code__)
    if is_imported(fn):
        objects.append(sys.modules[fn.__module__].__spec__)
        return
    _collect_all(fn.__defaults__ or (), objects, visited)
    _collect_all((fn.__kwdefaults__ or {}).values(), objects, visited)
    for cell in fn.__closure__ or ():
        try:
            contents = cell.cell_contents
        except ValueError:  # its variable is defined later
            objects.append(cell)
        else:
            _collect(contents, objects, visited)
    for name, value in vars(fn).items():
        objects.append(name)
        _collect(value, objects, visited)
    space = fn.__globals__
    for name in _names(fn.__code__):
        if name in space:
            _collect(space[name], objects, visited)


def _collect_all(values: Iterable[Any], objects: list[Any], visited: set[int]) -> None:
    """Append the objects that each of some values refers to."""
    for value in values:
        _collect(value, objects, visited)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names used in a function and in the functions inside: globals and attributes."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType)
             for name in _names(const)]  # fmt: skip
    return tuple(dict.fromkeys((*code.co_names, *inner)))
