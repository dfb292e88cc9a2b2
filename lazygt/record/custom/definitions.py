"""Definitions of custom ops, sent to the workers.

A worker imports the modules that define the op, if it can; else the op's kernel is pickled by
value. Its code is checked whenever the op is recorded: an op that is defined again, or that refers
to a changed object, is another op.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._library import utils
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._library.simple_registry import singleton as fake_kernels
from torch._subclasses import fake_tensor

from lazygt.errors import CodeError
from lazygt.graph.ops import CustomOp, OpFacts, add_custom_op, overload
from lazygt.record.custom.pickling import Fingerprint, bundle
from lazygt.record.custom.registry import ANY_DEVICE, importable, source_of
from lazygt.runtime.custom_ops import Definition, code_name, tag_names

_DATA_DEPENDENT = (
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
)


@dataclass(slots=True)
class _Known:
    """Custom op as it was recorded last."""

    func: Any
    op: CustomOp
    fake: Any  # its fake kernel, as from `_fake_kernel`
    modules: tuple[str, ...] | None  # modules that workers import for it; None: its code is sent
    #: objects that the sent code refers to; None: no code is sent, or one may change unnoticed
    fingerprint: Fingerprint | None

    def is_current(self) -> bool:
        """Return whether this record of the op can be used again.

        Its fake kernel is the same; and workers still get the client's modules by an import (none
        was reloaded), or the sent code refers to the same objects.
        """
        if self.fake is not _fake_kernel(self.func):
            return False
        if self.modules is not None:
            return all(map(importable, self.modules))
        return self.fingerprint is not None and self.fingerprint.holds()


class CustomOps:
    """Custom ops of a session.

    Args:
        ship_code: True if code may be pickled for the workers.
    """

    def __init__(self, device_type: str, ship_code: bool) -> None:
        self.device_type, self.ship_code = device_type, ship_code
        self._known: dict[int, _Known] = {}
        #: functions of ``lazygt.apply``, by code: their fingerprints and their ops
        self.functions: dict[Any, tuple[Fingerprint, CustomOp]] = {}

    def facts(self, func: Any) -> OpFacts:
        """Return the facts of a custom op as it is defined now.

        Raises:
            CodeError: the op's code can't be sent to the workers.
        """
        known = self._known.get(id(func))
        if known is None or not known.is_current():
            known = self._known[id(func)] = self._define(func)
        return known.op.facts

    def check_shipping(self, title: str, module: str) -> None:
        """Raise CodeError unless code may be sent."""
        if not self.ship_code:
            raise CodeError(
                title,
                module,
                "its code would have to be sent, which "
                "lazygt.session(workers=Workers(ship_code=False)) forbids. Define it as an op "
                "(torch.library.custom_op) in a module that workers can import, such as a file "
                "next to the script, or leave ship_code out",
            )

    def _define(self, func: Any) -> _Known:
        """Return the op's current definition: its modules, or its pickled code."""
        source = source_of(func, self.device_type)
        fake = _fake_kernel(func)
        title, schema = str(func), str(func._schema)
        tags = tag_names(func.tags)
        if source.can_be_imported:
            origin = [*source.modules, *map(os.path.basename, source.libraries)][0]
            definition = Definition(
                f"{title}@{origin}", schema, tags, source.modules, source.libraries
            )
            imported_modules, fingerprint = source.modules, None
        else:
            module = ", ".join(name for name in source.modules if not name.startswith("torch."))
            self.check_shipping(title, module)
            if source.kernel is None:
                raise _no_kernel(title, module, self.device_type)
            imported_modules, fingerprint = None, Fingerprint.of(source.kernel)
            code, modules, libraries = bundle(source.kernel, title, module)
            definition = Definition(
                f"{title}@{code_name(code)}", schema, tags, modules, libraries, code
            )
        infer = None if fake is None else _Infer(func, fake)
        return _Known(func, known_op(definition, infer), fake, imported_modules, fingerprint)


def _no_kernel(title: str, module: str, device_type: str) -> Exception:
    """Return the error for an op without a Python kernel on the workers' device."""
    if module:
        return NotImplementedError(f"{title} (defined in {module}) has no kernel for {device_type}")
    return CodeError(
        title,
        "",
        "it was defined before lazygt was imported, by a module that torch does not record. Import "
        "lazygt first, or define it in a module that the workers can import",
    )


# -- fake kernels --------------------------------------------------------------------------


def _fake_kernel(func: Any) -> Any:
    """Return the op's fake kernel; True: torch can run it without values; None: none."""
    qualname = func.name()
    defined: CustomOpDef | None = OPDEFS.get(qualname)
    if defined is not None:
        trivial = getattr(utils, "can_generate_trivial_fake_impl", None)  # not in older torch
        if defined._abstract_fn is None and trivial is not None and trivial(func):
            return True
        return defined._abstract_fn
    fake_kernel = fake_kernels.find(qualname).fake_impl.kernel
    if fake_kernel is not None:
        return fake_kernel.func
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return True if has_kernel(qualname, "Meta") or has_kernel(qualname, ANY_DEVICE[-1]) else None


def known_op(definition: Definition, infer: Callable[..., Any] | None) -> CustomOp:
    """Return the graph op of a definition: the registered one if it is equal, else a new one."""
    try:
        known: CustomOp = overload(definition.name)
    except KeyError:
        known = definition.op(infer)
        add_custom_op(known)
    else:
        if known.infer != infer:
            known = definition.op(infer)
            add_custom_op(known)
    return known


@dataclass(frozen=True, slots=True)
class _Infer:
    """Inference by running an op's fake kernel."""

    func: Any
    fake: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fake kernel; NotImplementedError if only values determine the results."""
        try:
            return self.func(*args, **kwargs)
        except _DATA_DEPENDENT as error:
            raise NotImplementedError(str(error)) from error
