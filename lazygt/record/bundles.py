"""Bundles: a function with all the code that it needs and that no worker could import."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload, OpOverloadPacket

from lazygt.record import registrations
from lazygt.record.pickling import pickled
from lazygt.record.sources import inner_kernels, source_of
from lazygt.runtime.foreign.loader import Bundle, InnerOp, NamedOp, namespace


def bundle(value: Any, title: str, module: str) -> tuple[bytes, tuple[str, ...], tuple[str, ...]]:
    """``value`` pickled, with the ops that it may call.

    Returns:
        It, and the modules and shared libraries that define other such ops.

    Raises:
        CodeError: something of it can't be pickled.
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
    """The ops defined in Python whose names stand in pickled code: it may call them."""
    for qualname in {**dict(OPDEFS), **registrations.defined()}:
        space, _, name = qualname.partition("::")
        if space.encode() in text and name.encode() in text and space not in ("prims", "aten"):
            packet = getattr(getattr(torch.ops, space), name.partition(".")[0], None)
            found = getattr(packet, name.partition(".")[2] or "default", None)
            if found is not None:
                yield found


def _inner(func: OpOverload) -> InnerOp:
    schema = str(func._schema)
    defined = OPDEFS.get(func.name())
    backward = None if defined is None else defined._backward_fn
    context = None if defined is None else defined._setup_context_fn
    return InnerOp(schema[schema.index("(") :], inner_kernels(func), backward, context)


def _reduced(operation: Any) -> Any:
    """What stands for a torch op, or a namespace of them, in pickled code."""
    if isinstance(operation, OpOverload):
        return NamedOp, (operation.name(), operation._overloadname)
    if isinstance(operation, OpOverloadPacket):
        return NamedOp, (operation._qualified_op_name, "")
    if isinstance(operation, torch._ops._OpNamespace):
        return namespace, (operation.name,)
    return NamedOp, (operation._qualname, "default")
