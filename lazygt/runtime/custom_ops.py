"""Custom ops of plans: their schema on the wire, and their loader in a worker.

A worker accepts plans, and so code, only from the owner of its session's channel: the client that
started it.
"""

from __future__ import annotations

import hashlib
import importlib
import linecache
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import cloudpickle
import torch

from lazygt.errors import CodeError, ProtocolError
from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.node import Graph
from lazygt.graph.ops import CustomOp, OpFacts, add_custom_op, overload, title
from lazygt.runtime.wire import Buffer, Message, pack, unpack

# -- schema of custom ops --------------------------------------------------------------------------
# A definition refers to the code of an op. The code lies in modules and shared libraries, which a
# worker loads itself, or is pickled within the definition.

#: Tags that affect an op's results; workers ignore the others.
_TAGS_BY_NAME = {
    "dynamic_output_shape": torch.Tag.dynamic_output_shape,
    "data_dependent_output": torch.Tag.data_dependent_output,
    "nondeterministic_seeded": torch.Tag.nondeterministic_seeded,
}


class Definition(Message):
    """Definition of a custom op: its name, schema and code."""

    name: str  # its name in graphs (``graph.ops.CustomOp``)
    schema: str  # as torch writes it
    tags: tuple[str, ...] = ()  # names of torch's tags
    modules: tuple[str, ...] = ()  # modules to import, so that torch knows the op
    libraries: tuple[str, ...] = ()  # paths of shared libraries to load for that
    code: bytes = b""  # the pickled callable; empty: modules and libraries register the op

    @property
    def title(self) -> str:
        """The op's name as the user knows it."""
        return title(self.name)

    def op(self, infer: Callable[..., Any] | None = None) -> CustomOp:
        """Build the op's record of facts (schema, tags, shape inference)."""
        return CustomOp(
            self.name, self.schema, [_TAGS_BY_NAME[tag] for tag in self.tags], infer, self
        )


def tag_names(tags: Sequence[torch.Tag]) -> tuple[str, ...]:
    """Return the names of the tags that are part of a definition."""
    return tuple(name for name, tag in _TAGS_BY_NAME.items() if tag in tags)


def code_name(code: bytes) -> str:
    """Return a hash of pickled code, for the name of its op."""
    return hashlib.sha256(code).hexdigest()[:16]


def custom_ops_of(graph: Graph) -> list[CustomOp]:
    """List the custom ops that a graph uses, each once."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if "@" in node.op:
            names[node.op] = None
        elif node.op == WRITE_BACK:
            names.update(dict.fromkeys(op for op, *_ in node.args[2] if "@" in op))
        elif node.body is not None:
            names.update(dict.fromkeys(op.name for op in custom_ops_of(node.body)))
    return [overload(name) for name in names]


# -- on the wire -------------------------------------------------------------------------


class Definitions(Message):
    """Definitions of a plan's custom ops, and the client's module search path."""

    path: tuple[str, ...]
    ops: tuple[Definition, ...]


def encode(ops: Sequence[CustomOp]) -> bytes:
    """Encode the definitions of these ops, to send beside a graph; no op gives empty bytes."""
    if not ops:
        return b""
    path = tuple(map(os.path.abspath, sys.path))
    return pack(Definitions(path, tuple(op.definition for op in ops)))


def decode(data: Buffer) -> Definitions:
    """Return the definitions that ``encode`` encoded.

    Raises:
        ProtocolError: the data is no definitions, or an op's name lacks its code's hash.
    """
    definitions: Definitions = unpack(data, Definitions)
    for definition in definitions.ops:
        if definition.code and not definition.name.endswith(f"@{code_name(definition.code)}"):
            raise ProtocolError(f"the code of {definition.name} is not what it is named after")
        try:
            definition.op()
        except (KeyError, RuntimeError) as error:
            raise ProtocolError(f"{definition.name} has no such schema or tags: {error}") from error
    return definitions


# -- loader of custom ops --------------------------------------------------------------------------


class LoadedOp:
    """A custom op in a worker; the plans that use the op keep it alive."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        #: strong reference, so that graphs may name the op
        self.op = _registered(definition)
        self._run: Callable[..., Any] | None = None
        self._error: CodeError | None = None
        _LOADED[definition.name] = self

    def load(self, device: torch.device) -> None:
        """Import or unpickle the code. An error is raised only when the op runs."""
        if self._run is not None:
            return
        try:
            _import_code(self.definition)
            if self.definition.code:
                loaded = cloudpickle.loads(self.definition.code).load()
                self._run = loaded.on(device) if isinstance(loaded, Portable) else loaded
            else:
                self._run = _loaded_overload(self.definition)
        except BaseException as error:  # noqa: BLE001 - a module may even call sys.exit
            self._error = _load_error(self.definition, error)

    @property
    def kernel(self) -> Callable[..., Any]:
        """The callable that computes the op.

        Raises:
            CodeError: the code could not be loaded.
        """
        if self._run is None:
            raise self._error or CodeError(self.definition.title, "", "its code was not loaded")
        return _Kernel(self.op.facts, self._run)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A pickled callable, with the pickled ops that it may call, by name."""

    main: bytes  # the callable
    inner: tuple[tuple[str, bytes], ...]  # (qualified name, pickled `InnerOp`)

    def load(self) -> Any:
        """Return the callable, after defining the ops in torch."""
        for qualname, code in self.inner:
            _define(qualname, code)
        return cloudpickle.loads(self.main)


@dataclass(frozen=True, slots=True)
class InnerOp:
    """An op that other code calls by its name."""

    schema: str  # without the name
    #: type of device (None: any) -> the callable for it
    kernels: dict[str | None, Callable[..., Any]]
    #: backward, context: arguments of ``torch.library.register_autograd``
    backward: Callable[..., Any] | None
    context: Callable[..., Any] | None


class NamedOp:
    """Reference to a torch op in pickled code, resolved when it is called."""

    def __init__(self, qualname: str, overload: str) -> None:
        self._qualname, self._overload = qualname.partition(".")[0], overload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        space, _, name = self._qualname.partition("::")
        packet = getattr(getattr(torch.ops, space), name)
        return (getattr(packet, self._overload) if self._overload else packet)(*args, **kwargs)


def namespace(name: str) -> Any:
    """Return ``torch.ops.NAME``; called by pickled code."""
    return getattr(torch.ops, name)


#: Qualified name -> (pickle, definition) of ops defined here because other code calls them. torch
#: drops an op when its definition is garbage-collected.
_DEFINED: dict[str, tuple[bytes, Any]] = {}


def _define(qualname: str, code: bytes) -> None:
    """Define an op in torch, or redefine one with new code; a no-op in the client's process."""
    known_code, _ = _DEFINED.get(qualname, (None, None))
    if known_code == code or (known_code is None and _is_defined(qualname)):
        return
    op: InnerOp = cloudpickle.loads(code)
    kernels = dict(op.kernels)
    main = kernels.pop(None, None)
    devices: Any = None if main is not None else list(kernels)
    main = main or next(iter(kernels.values()))
    mutated = [a.name for a in torch._C.parse_schema("f" + op.schema).arguments
               if a.alias_info is not None and a.alias_info.is_write]  # fmt: skip
    definition = torch.library.custom_op(
        qualname, main, mutates_args=mutated, device_types=devices, schema=op.schema
    )
    for device, kernel in kernels.items():
        definition.register_kernel(device, kernel)
    if op.backward is not None:
        definition.register_autograd(op.backward, setup_context=op.context)
    _DEFINED[qualname] = code, definition


def _is_defined(qualname: str) -> bool:
    return qualname in torch._C._dispatch_get_all_op_names()


class Portable:
    """Pickled callable that needs a device before it can be called."""

    def on(self, device: torch.device) -> Callable[..., Any]:
        """Return the callable for a worker's device."""
        raise NotImplementedError


#: Custom ops of the cached plans, by name.
_LOADED: weakref.WeakValueDictionary[str, LoadedOp] = weakref.WeakValueDictionary()


def load_ops(data: Buffer, device: torch.device | None, takes_code: bool) -> list[LoadedOp]:
    """Load the ops that a plan defines; the plan has to keep the returned objects alive.

    Args:
        device: device to run on; None: the ops are never called.
        takes_code: whether pickled code is accepted.

    Raises:
        ProtocolError: the data is not of the schema, or code is not accepted.
    """
    definitions = decode(data)
    if not takes_code and any(definition.code for definition in definitions.ops):
        raise ProtocolError("pickled code, which Workers(ship_code=False) does not send")
    sys.path.extend(path for path in definitions.path if path not in sys.path)
    ops = [_LOADED.get(definition.name) or LoadedOp(definition) for definition in definitions.ops]
    if device is not None:
        for definition in ops:
            definition.load(device)
    return ops


def loaded_op(name: str) -> LoadedOp:
    """Return the custom op of a cached plan; KeyError if there is none."""
    return _LOADED[name]


def _registered(definition: Definition) -> CustomOp:
    """Return the op's record of facts, registered under its name if it is new."""
    try:
        op: CustomOp = overload(definition.name)
    except KeyError:
        op = definition.op()
        add_custom_op(op)
    return op


#: Module -> error of its failed import; not retried, as some registrations may be done.
_failed_imports: dict[str, str] = {}


def _import_code(definition: Definition) -> None:
    """Import the modules and load the shared libraries of a definition."""
    for module in definition.modules:
        if module not in _failed_imports and module not in sys.modules:
            try:
                importlib.import_module(module)
            except BaseException as error:  # noqa: BLE001 - a script may even call sys.exit
                _failed_imports[module] = f"{type(error).__name__}: {error}"
        if module in _failed_imports:
            raise ImportError(f"importing {module} failed: {_failed_imports[module]}", name=module)
    for library in definition.libraries:
        torch.ops.load_library(library)


def _loaded_overload(definition: Definition) -> Callable[..., Any]:
    """Return torch's overload of an op whose modules and libraries are loaded."""
    try:
        op: Any = overload(definition.title)
    except KeyError:
        raise LookupError("no such op was defined by that") from None
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def _load_error(definition: Definition, error: BaseException) -> CodeError:
    """Return the error for an op that a worker can't load."""
    sources = ", ".join((*definition.modules, *definition.libraries))
    return CodeError(definition.title, sources, f"{type(error).__name__}: {error}")


class _Kernel:
    """Kernel of a custom op; a new output that shares memory with another tensor is copied."""

    def __init__(self, facts: OpFacts, run: Callable[..., Any]) -> None:
        self._run = run
        self._new_outputs = [n for n, kind in enumerate(facts.outputs) if kind[0] == "f"]
        self._single = len(facts.outputs) == 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._run(*args, **kwargs)
        if not self._new_outputs:
            return returned
        addresses: set[int] = set()
        _add_addresses(args, addresses)
        _add_addresses(tuple(kwargs.values()), addresses)
        if self._single:
            return _with_own_memory(returned, addresses)
        items = list(returned)
        for position in self._new_outputs:
            items[position] = _with_own_memory(items[position], addresses)
        return tuple(items)


def _add_addresses(items: Any, addresses: set[int]) -> None:
    """Add the storage addresses of all tensors in nested lists."""
    for item in items:
        if isinstance(item, torch.Tensor):
            addresses.add(_storage_address(item))
        elif isinstance(item, (list, tuple)):
            _add_addresses(item, addresses)


def _with_own_memory(value: Any, addresses: set[int]) -> Any:
    """Return ``value``, copied if its storage is in ``addresses``; add its storage there."""
    if isinstance(value, (list, tuple)):
        return [_with_own_memory(item, addresses) for item in value]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    if value.requires_grad:
        value = value.detach()
    address = _storage_address(value)
    if address in addresses and value.numel():
        value = value.clone()
        address = _storage_address(value)
    addresses.add(address)
    return value


def _storage_address(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else 0


#: Options of ``triton.jit`` that are sent with a kernel.
OPTIONS = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")


def jitted(fn: FunctionType, source: tuple[str, ...], first: int, options: dict[str, Any]) -> Any:
    """Build the Triton kernel of a function whose source is in no file.

    Args:
        source: its lines, decorators included.
        first: line number of the first one.
        options: keyword arguments of ``triton.jit``.
    """
    name = f"<triton kernel {fn.__module__}.{fn.__qualname__} {hash(source)}>"
    lines = ["\n"] * (first - 1) + list(source)
    linecache.cache[name] = sum(map(len, lines)), None, lines, name
    fn.__code__ = fn.__code__.replace(co_filename=name)
    return importlib.import_module("triton").jit(**options)(fn)
