"""Registrations: which Python functions torch's ops were given, and by which modules.

torch keeps such functions in C++, where nobody finds them again, so they are noted as they are
registered: from lazygt's import on.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.library import Library

#: Dispatch keys of kernels that compute on any device.
ANY_DEVICE = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
              "CompositeImplicitAutograd")  # fmt: skip


@dataclass(slots=True)
class Noted:
    """What has been registered for an op.

    Attributes:
        kernels: dispatch key -> function.
        modules: that registered something, in order.
        times: how often it was defined.
    """

    kernels: dict[str, Callable[..., Any]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    times: int = 0

    def by(self, module: str) -> None:
        """A module has registered something."""
        global _count
        _count += 1
        if module not in self.modules:
            self.modules.append(module)


_noted: dict[str, Noted] = {}
_count = 0


def noted(qualname: str) -> Noted:
    """What has been registered for ``namespace::op`` or ``namespace::op.overload``."""
    return _noted.get(qualname) or Noted()


def defined() -> dict[str, Noted]:
    """All ops of which something was noted."""
    return _noted


def count() -> int:
    """How many registrations have been noted."""
    return _count


def watch() -> None:
    """Note registrations from now on; done once, at import."""
    for qualname in torch.library._defs:
        _noted[qualname] = Noted(times=1)
    define: Any = Library.define
    impl: Any = Library.impl

    @functools.wraps(define)
    def noting_define(self: Library, schema: str, *args: Any, **kwargs: Any) -> Any:
        result = define(self, schema, *args, **kwargs)
        qualname = _qualname(self, schema.split("(")[0])
        _noted[qualname] = made = Noted(times=noted(qualname).times + 1)
        made.by(_registering_module())
        return result

    @functools.wraps(impl)
    def noting_impl(
        self: Library, op_name: Any, fn: Callable[..., Any], dispatch_key: str = "", **kwargs: Any
    ) -> Any:
        result = impl(self, op_name, fn, dispatch_key, **kwargs)
        key = dispatch_key or self.dispatch_key or "CompositeImplicitAutograd"
        if key in ("CPU", "CUDA", *ANY_DEVICE) and not kwargs.get("with_keyset"):
            note = _noted.setdefault(_qualname(self, op_name), Noted())
            note.kernels[key] = fn
            note.by(_registering_module())
        return result

    Library.define = noting_define  # type: ignore[method-assign]
    Library.impl = noting_impl  # type: ignore[method-assign]


def _qualname(library: Library, op: Any) -> str:
    name = str(op._schema.name) if isinstance(op, torch._ops.OpOverload) else str(op)
    which = op._schema.overload_name if isinstance(op, torch._ops.OpOverload) else ""
    name = name.split("::")[-1].strip().removesuffix(".default")
    return f"{library.ns}::{name}" + (f".{which}" if which else "")


def _registering_module() -> str:
    """The module that is being run: to import it is to register this again."""
    frame = sys._getframe(2)
    while frame.f_code.co_name != "<module>" and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
