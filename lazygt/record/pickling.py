"""Pickling of code: functions by their content where no worker could import them."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket, _OpNamespace

from lazygt.errors import CodeError
from lazygt.record.tensor import LazyTensor
from lazygt.runtime.foreign.loader import OPTIONS, jitted

#: module -> (its spec, its file) when it was first asked about, and whether workers can import it
_modules: dict[str, tuple[Any, bool]] = {}


def importable(name: str) -> bool:
    """Whether workers that import a module get what the client has.

    They do not for a script, for a module that was made by hand, and for one that has been loaded
    again since it was first used: its file may have changed in between.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or name == "__main__" or spec is None:
        return False
    known = _modules.get(name)
    if known is None:
        known = _modules[name] = spec, _is_found(name, module)
    return known[1] and known[0] is spec


def is_imported(obj: Any) -> bool:
    """Whether workers get a function, class or kernel by importing its module, by its name."""
    found: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is obj and importable(obj.__module__)


def _is_found(name: str, module: ModuleType) -> bool:
    if name.partition(".")[0] in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    parent = name.rpartition(".")[0]
    if parent and not importable(parent):
        return False
    above = sys.modules.get(parent)
    path = getattr(above, "__path__", None)
    for finder in sys.meta_path:  # not importlib.util.find_spec: that asks the module itself
        found = finder.find_spec(name, path, None)
        if found is not None:
            return found.origin == getattr(module.__spec__, "origin", None)
    return False


def kernel_function(obj: Any) -> FunctionType | None:
    """The function that a Triton kernel is made of; None for anything else."""
    kind = type(obj)
    if (kind.__module__, kind.__name__) != ("triton.runtime.jit", "JITFunction"):
        return None
    fn: FunctionType = obj.fn
    return fn


def pickled(value: Any, title: str, module: str, operation: Callable[[Any], Any]) -> bytes:
    """``value`` pickled, with all code in it that no worker could import.

    Args:
        title, module: what it is, for an error.
        operation: what stands for a torch op that it refers to.

    Raises:
        CodeError: something in it can't be pickled.
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
        for each in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(each)
    return buffer.getvalue()


_OPERATIONS = (CustomOpDef, OpOverload, OpOverloadPacket, _OpNamespace)


class _Refused(Exception):
    """Why something is not pickled."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, operation: Callable[[Any], Any]) -> None:
        super().__init__(file)
        self._operation = operation
        self.by_value: list[ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if issubclass(kind, LazyTensor):
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
        """Have what is of a module pickled by its content if workers can't import that."""
        module = sys.modules.get(name or "")
        if module is None or name == "__main__" or importable(module.__name__):
            return
        if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(module)
