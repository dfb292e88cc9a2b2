"""Sources: who has defined an op that torch alone does not have, and with which function."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._library.simple_registry import singleton as fake_kernels

from lazygt.record import libraries
from lazygt.record.pickling import importable
from lazygt.record.registrations import ANY_DEVICE, noted

_TORCH = os.path.dirname(torch.__file__) + os.sep
_REGISTERED_AT = re.compile(r"registered at (.+?):\d+")


def is_foreign(func: Any) -> bool:
    """Whether an overload is one that a process has only once somebody has defined it."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace in ("aten", "prim", "prims"):
        return False
    qualname = func.name()
    if qualname in OPDEFS or qualname in torch.library._defs:
        return True
    return bool(libraries.libraries_with(func.namespace, _opname(func)))


@dataclass(frozen=True, slots=True)
class Source:
    """Where the code of an op is.

    Attributes:
        kernel: the Python function that computes it on the workers' device; None: it has none, or
            it is not known.
        modules: that have registered something for it.
        libraries: shared libraries that may have.
        again: it was defined more than once, so what a module defines may be another one.
    """

    kernel: Callable[..., Any] | None
    modules: tuple[str, ...]
    libraries: tuple[str, ...] = ()
    again: bool = False

    @property
    def can_be_imported(self) -> bool:
        """Whether a worker that loads all of it knows the op as it is here."""
        named = bool(self.modules or self.libraries)
        return named and not self.again and all(map(importable, self.modules))


def source_of(func: Any, device_type: str) -> Source:
    """Where the code of a foreign op is.

    Raises:
        CodeError: nobody knows.
    """
    qualname = func.name()
    note, defined = noted(qualname), OPDEFS.get(qualname)
    kernels = inner_kernels(func)
    kernel = kernels.get(device_type) or kernels.get(None)
    if defined is not None:
        own = note.modules or [defined._init_fn.__module__]
        own = [*own, *([kernel.__module__] if kernel else [])]
        return Source(kernel, tuple(dict.fromkeys(own)), again=note.times > 1)
    modules = list(note.modules)
    if kernel is None and not modules and qualname in torch.library._defs:
        modules = _registered_by(qualname)
    found = () if kernel else libraries.libraries_with(func.namespace, _opname(func))
    by_module = [(libraries.module_of(path), path) for path in found]
    modules += [name for name, _ in by_module if name and name not in modules]
    alone = tuple(path for name, path in by_module if not name)
    return Source(kernel, tuple(modules), alone, again=note.times > 1)


def inner_kernels(func: Any) -> dict[str | None, Callable[..., Any]]:
    """The Python functions that compute an op, by type of device; None: on any."""
    defined = OPDEFS.get(func.name())
    if defined is not None:
        return {kind: _plain(kernel) for kind, kernel in defined._backend_fns.items()}
    return {
        None if key in ANY_DEVICE else key.lower(): kernel
        for key, kernel in noted(func.name()).kernels.items()
    }


def _opname(func: Any) -> str:
    return str(func._schema.name).split("::")[1]


def _plain(kernel: Any) -> Any:
    """The user's function inside what ``CustomOpDef.register_kernel`` keeps."""
    inner = getattr(kernel, "__wrapped__", kernel)
    names = getattr(inner, "__code__", None)
    if names is None or "fn" not in names.co_freevars:
        return kernel
    return inner.__closure__[names.co_freevars.index("fn")].cell_contents


def _registered_by(qualname: str) -> list[str]:
    """Modules that have registered an op before lazygt was imported, as far as torch says so."""
    files = _REGISTERED_AT.findall(torch._C._dispatch_dump(qualname))
    ours = {file for file in files if not file.startswith(_TORCH)}
    holder = fake_kernels.find(qualname).fake_impl.kernel
    if holder is not None:
        ours.add(str(holder.source).rpartition(":")[0])
    known = {getattr(module, "__file__", None): name for name, module in sys.modules.items()}
    return [known[file] for file in ours if file in known]
