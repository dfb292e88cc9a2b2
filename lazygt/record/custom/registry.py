"""Registry of custom ops: the modules, functions and libraries that define them.

torch keeps an op's functions in C++, out of Python's reach. So registrations are noted as they
occur, from lazygt's import on.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from glob import glob
from types import ModuleType
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as fake_kernels
from torch.library import Library

from lazygt.record.patches import Patch
from lazygt.record.tensor import NATIVE

#: Dispatch keys of kernels that compute on any device.
ANY_DEVICE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
              "CompositeImplicitAutograd")  # fmt: skip
#: Those of them with precedence over a backend's fallback.
_BEFORE_FALLBACK = ANY_DEVICE[:2]
#: Namespaces of ops that every process has.
_TORCH_NAMESPACES = ("aten", "prim", "prims")
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Names in a library that is linked with torch's.
_TORCH_LIBRARY_NAMES = (b"libc10", b"libtorch")
_REGISTERED_AT = re.compile(r"registered at (.+?):\d+")
#: module -> its spec at the first query, and True if workers can import it
_modules: dict[str, tuple[Any, bool]] = {}


# -- registrations --------------------------------------------------------------------------


@dataclass(slots=True)
class Registrations:
    """Registrations of an op."""

    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)  # dispatch key -> function
    modules: list[str] = field(default_factory=list)  # modules that registered something, in order
    times: int = 0  # number of its definitions: of ``Library.define``

    def add_module(self, module: str) -> None:
        """Add a registering module."""
        global _count
        _count += 1
        if module not in self.modules:
            self.modules.append(module)


_registrations: dict[str, Registrations] = {}
_count = 0
_define: Any = Library.define
_impl: Any = Library.impl


def registrations_of(qualname: str) -> Registrations:
    """Return the registrations of ``namespace::op`` or ``namespace::op.overload``."""
    return _registrations.get(qualname) or Registrations()


def defined() -> dict[str, Registrations]:
    """Return all ops with noted registrations."""
    return _registrations


def registration_count() -> int:
    """Return the number of registrations noted."""
    return _count


def note_defined() -> None:
    """Note the ops defined before lazygt's import, of modules that torch does not know."""
    for qualname in torch.library._defs:
        _registrations[qualname] = Registrations(times=1)
    if NATIVE is not None:
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        for qualname in filter(_is_custom_name, torch._C._dispatch_get_all_op_names()):
            if any(has(qualname, key) for key in _BEFORE_FALLBACK):
                _record_whole(qualname)


def _is_custom_name(qualname: str) -> bool:
    """Return whether an op is in none of torch's own namespaces."""
    return qualname.partition("::")[0] not in _TORCH_NAMESPACES


def _record_whole(qualname: str) -> None:
    """Make C++ record a custom op as one op, where torch would decompose it by its kernel."""
    if NATIVE is not None and _is_custom_name(qualname):
        space, _, op = qualname.partition("::")
        NATIVE.record_whole(space, op)


@functools.wraps(_define)
def _noting_define(self: Library, schema: str, *args: Any, **kwargs: Any) -> Any:
    """Define an op, and note the registering module (replaces ``Library.define``)."""
    result = _define(self, schema, *args, **kwargs)
    qualname = _qualname(self, schema.split("(")[0])
    _registrations[qualname] = registrations = Registrations(
        times=registrations_of(qualname).times + 1
    )
    registrations.add_module(_registering_module())
    return result


@functools.wraps(_impl)
def _noting_impl(
    self: Library, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **kwargs: Any
) -> Any:
    """Register a kernel, and note it with its module (replaces ``Library.impl``)."""
    result = _impl(self, op_name, fn, dispatch_key, **kwargs)
    key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
    if key in _BEFORE_FALLBACK:
        _record_whole(_qualname(self, op_name))
    if key in ("CPU", "CUDA", *ANY_DEVICE) and not kwargs.get("with_keyset"):
        registrations = _registrations.setdefault(_qualname(self, op_name), Registrations())
        registrations.kernels[key] = fn
        registrations.add_module(_registering_module())
    return result


_IN_CPP = "torch keeps an op's Python functions in C++, where nobody finds them again"
PATCHES = (
    Patch(Library, "define", _noting_define, _IN_CPP),
    Patch(Library, "impl", _noting_impl, _IN_CPP),
)


def _qualname(library: Library, op: Any) -> str:
    """Return ``namespace::op`` or ``namespace::op.overload``."""
    name = str(op._schema.name) if isinstance(op, torch._ops.OpOverload) else str(op)
    which = op._schema.overload_name if isinstance(op, torch._ops.OpOverload) else ""
    name = name.split("::")[-1].strip().removesuffix(".default")
    return f"{library.ns}::{name}" + (f".{which}" if which else "")


def _registering_module() -> str:
    """Return the module that is being imported: its import registers the op again."""
    frame = sys._getframe(2)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


# -- sources of custom ops -------------------------------------------------------------------------


def is_custom(func: Any) -> bool:
    """Return whether an overload belongs to a custom op: torch alone does not define it."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in _TORCH_NAMESPACES:
        return False
    qualname = func.name()
    if qualname in OPDEFS or qualname in torch.library._defs:
        return True
    return bool(libraries_with(func.namespace, _opname(func)))


@dataclass(frozen=True, slots=True)
class OpSource:
    """Source of an op's code."""

    #: the Python function that computes it on the workers' device; None: it has none, or it is not
    #: known
    kernel: Callable[..., Any] | None
    modules: tuple[str, ...]  # modules that have registered something for it
    libraries: tuple[str, ...] = ()  # shared libraries that may have
    is_redefined: bool = (
        False  # it was defined more than once, so a module may define another version
    )

    @property
    def can_be_imported(self) -> bool:
        """True if a worker that loads all of it has the same op."""
        named = bool(self.modules or self.libraries)
        return named and not self.is_redefined and all(map(importable, self.modules))


def source_of(func: Any, device_type: str) -> OpSource:
    """Return the source of a custom op's code.

    All parts are empty for an unknown source; ``CustomOps.facts`` raises CodeError then.
    """
    qualname = func.name()
    registrations, defined = registrations_of(qualname), OPDEFS.get(qualname)
    kernels = inner_kernels(func)
    kernel = kernels.get(device_type) or kernels.get(None)
    if defined is not None:
        names = registrations.modules or [defined._init_fn.__module__]
        names = [*names, *([kernel.__module__] if kernel else [])]
        return OpSource(kernel, tuple(dict.fromkeys(names)), is_redefined=registrations.times > 1)
    modules = list(registrations.modules)
    if kernel is None and not modules and qualname in torch.library._defs:
        modules = _registered_by(qualname)
    loaded = () if kernel else libraries_with(func.namespace, _opname(func))
    by_module = [(module_of(path), path) for path in loaded]
    modules += [name for name, _ in by_module if name and name not in modules]
    standalone = tuple(path for name, path in by_module if not name)
    return OpSource(kernel, tuple(modules), standalone, is_redefined=registrations.times > 1)


def inner_kernels(func: Any) -> dict[str | None, Callable[..., Any]]:
    """Return the Python kernels of an op by device type; None: a kernel for any device."""
    defined = OPDEFS.get(func.name())
    if defined is not None:
        return {kind: _unwrapped(kernel) for kind, kernel in defined._backend_fns.items()}
    return {
        None if key in ANY_DEVICE else key.lower(): kernel
        for key, kernel in registrations_of(func.name()).kernels.items()
    }


def _opname(func: Any) -> str:
    """Return an overload's bare op name."""
    return str(func._schema.name).split("::")[1]


def _unwrapped(kernel: Any) -> Any:
    """Return the user's function inside the wrapper of ``CustomOpDef.register_kernel``."""
    function = getattr(kernel, "__wrapped__", kernel)
    code = getattr(function, "__code__", None)
    if code is None or "fn" not in code.co_freevars:
        return kernel
    return function.__closure__[code.co_freevars.index("fn")].cell_contents


def _registered_by(qualname: str) -> list[str]:
    """Return modules that registered an op before lazygt's import, from torch's debug dump."""
    files = _REGISTERED_AT.findall(torch._C._dispatch_dump(qualname))
    user_files = {file for file in files if not file.startswith(_TORCH)}
    fake_kernel = fake_kernels.find(qualname).fake_impl.kernel
    if fake_kernel is not None:
        user_files.add(str(fake_kernel.source).rpartition(":")[0])
    modules_by_file = {
        getattr(module, "__file__", None): name for name, module in sys.modules.items()
    }
    return [modules_by_file[file] for file in user_files if file in modules_by_file]


# -- shared libraries ------------------------------------------------------------------------


def libraries_with(namespace: str, op: str) -> tuple[str, ...]:
    """Return the loaded libraries, besides torch's own, that contain these names."""
    names = namespace.encode(), op.encode()
    return tuple(
        path for path in _loaded_libraries() if _links_torch(path) and _contains_all(path, names)
    )


def module_of(path: str) -> str:
    """Return the Python module that a library is; empty if it is none."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and os.path.realpath(file) == path:
            return name
    return ""


def _loaded_libraries() -> list[str]:
    """Return the loaded shared libraries of this process, without torch's."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if ".so" in line}
    return sorted(p for p in paths - _torchs_libraries() if os.path.isfile(p))


@cache
def _torchs_libraries() -> frozenset[str]:
    """Return the real paths of torch's own libraries, as in ``/proc/self/maps``."""
    files = (os.path.join(_TORCH, "lib", "*"), os.path.join(_TORCH, "*.so"))
    return frozenset(os.path.realpath(file) for pattern in files for file in glob(pattern))


@cache
def _links_torch(path: str) -> bool:
    """Return whether a library is linked with torch's."""
    return any(_contains_all(path, (name,)) for name in _TORCH_LIBRARY_NAMES)


def _contains_all(path: str, names: tuple[bytes, ...]) -> bool:
    """Return whether a file contains all these byte strings."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return all(data.find(name) >= 0 for name in names)


# -- importable modules ----------------------------------------------------------------------------


def importable(name: str) -> bool:
    """Return whether workers that import a module get the same one as the client.

    False for a script, a module created by hand, and one that was reloaded since its first use: its
    file may have changed in between.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or name == "__main__" or spec is None:
        return False
    first_seen = _modules.get(name)
    if first_seen is None:
        first_seen = _modules[name] = spec, _is_found(name, module)
    return first_seen[1] and first_seen[0] is spec


def is_imported(obj: Any) -> bool:
    """Return whether workers can get a function, class or kernel by importing its name."""
    resolved: Any = sys.modules.get(obj.__module__)
    for name in obj.__qualname__.split("."):
        resolved = getattr(resolved, name, None)
    return resolved is obj and importable(obj.__module__)


def _is_found(name: str, module: ModuleType) -> bool:
    """Return whether an import would find the module's own file."""
    if name.partition(".")[0] in sys.stdlib_module_names or name in sys.builtin_module_names:
        return True
    parent = name.rpartition(".")[0]
    if parent and not importable(parent):
        return False
    parent_module = sys.modules.get(parent)
    path = getattr(parent_module, "__path__", None)
    for finder in sys.meta_path:  # importlib.util.find_spec would return the module's own spec
        spec = finder.find_spec(name, path, None)
        if spec is not None:
            return spec.origin == getattr(module.__spec__, "origin", None)
    return False
