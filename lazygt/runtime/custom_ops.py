"""Loader of foreign ops: a worker loads them from the plans that name them.

A worker takes plans, and so code, only from the owner of its session's channel: the client that
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
from lazygt.graph.ops import Foreign, OpFacts, add_foreign, overload, title
from lazygt.runtime.wire import Buffer, Part, fitting, pack, unpack

# -- schema of a plan's foreign ops: code that is not torch's own ----------------------------------
# A definition refers to the code of an op: in modules and shared libraries, which a worker loads
# itself, or pickled within the definition.

#: Tags that affect an op's results; workers ignore the others.
_TAGS = {
    "dynamic_output_shape": torch.Tag.dynamic_output_shape,
    "data_dependent_output": torch.Tag.data_dependent_output,
    "nondeterministic_seeded": torch.Tag.nondeterministic_seeded,
}


class Definition(Part):
    """An op that a plan names, and the place of its code.

    Attributes:
        name: its name in graphs (``graph.ops.Foreign``).
        schema: as torch writes it.
        tags: names of torch's tags.
        modules: to be imported, so that torch knows the op.
        libraries: paths of shared libraries to be loaded for that.
        code: the pickled callable; empty: torch knows the op once those are loaded.
    """

    name: str
    schema: str
    tags: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    code: bytes = b""

    @property
    def title(self) -> str:
        """The op's name as the user knows it."""
        return title(self.name)

    def op(self, infer: Callable[..., Any] | None = None) -> Foreign:
        """Build the op's stand-in, which answers for its facts."""
        return Foreign(self.name, self.schema, [_TAGS[tag] for tag in self.tags], infer, self)


def tag_names(tags: Sequence[torch.Tag]) -> tuple[str, ...]:
    """Return the names of the tags that travel."""
    return tuple(name for name, tag in _TAGS.items() if tag in tags)


def code_name(code: bytes) -> str:
    """Return a hash of pickled code, for the name of its op."""
    return hashlib.sha256(code).hexdigest()[:16]


def foreign_ops(graph: Graph) -> list[Foreign]:
    """List the foreign ops that a graph names."""
    names: dict[str, None] = {}
    for node in graph.nodes:
        if "@" in node.op:
            names[node.op] = None
        elif node.op == WRITE_BACK:
            names.update(dict.fromkeys(op for op, *_ in node.args[2] if "@" in op))
        elif node.body is not None:
            names.update(dict.fromkeys(op.name for op in foreign_ops(node.body)))
    return [overload(name) for name in names]


# -- on the wire -------------------------------------------------------------------------


class Definitions(Part):
    """A plan's foreign ops, and the client's module search path."""

    path: tuple[str, ...]
    ops: tuple[Definition, ...]


def encode(ops: Sequence[Foreign]) -> bytes:
    """Encode the definitions of these ops, to travel beside a graph; no bytes for no op."""
    if not ops:
        return b""
    path = tuple(map(os.path.abspath, sys.path))
    return pack(Definitions(path, tuple(op.definition for op in ops)))


def decode(data: Buffer) -> Definitions:
    """Return the definitions that ``encode`` encoded.

    Raises:
        ProtocolError: for anything else, and for code that its op is not named after.
    """
    definitions = fitting(unpack(data), Definitions)
    for definition in definitions.ops:
        if definition.code and not definition.name.endswith(f"@{code_name(definition.code)}"):
            raise ProtocolError(f"the code of {definition.name} is not what it is named after")
        try:
            definition.op()
        except (KeyError, RuntimeError) as error:
            raise ProtocolError(f"{definition.name} has no such schema or tags: {error}") from error
    return definitions


# -- loader of foreign ops: a worker loads them from the plans that name them ----------------------


class LoadedOp:
    """A foreign op as a worker runs it; held by the plans that name it."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        #: held, so that graphs may name it
        self.op = _held(definition)
        self._run: Callable[..., Any] | None = None
        self._error: CodeError | None = None
        _LOADED[definition.name] = self

    def load(self, device: torch.device) -> None:
        """Import or unpickle it; an error is raised when the op runs, so that no other op fails."""
        if self._run is not None:
            return
        try:
            _load(self.definition)
            if self.definition.code:
                loaded = cloudpickle.loads(self.definition.code).load()
                self._run = loaded.on(device) if isinstance(loaded, Portable) else loaded
            else:
                self._run = _known(self.definition)
        except BaseException as error:  # noqa: BLE001 - a module may even call sys.exit
            self._error = _unavailable(self.definition, error)

    @property
    def kernel(self) -> Callable[..., Any]:
        """The callable that computes it.

        Raises:
            CodeError: naming op and module.
        """
        if self._run is None:
            raise self._error or CodeError(self.definition.title, "", "its code was not loaded")
        return _Kernel(self.op.facts, self._run)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A pickled callable, with the pickled ops that it may call, by name."""

    main: bytes
    inner: tuple[tuple[str, bytes], ...]

    def load(self) -> Any:
        """Return the callable, after defining the ops in torch."""
        for qualname, text in self.inner:
            _define(qualname, text)
        return cloudpickle.loads(self.main)


@dataclass(frozen=True, slots=True)
class InnerOp:
    """An op that other code calls by its name.

    Attributes:
        schema: without the name.
        kernels: type of device (None: any) -> the callable for it.
        backward, context: as given to ``register_autograd``.
    """

    schema: str
    kernels: dict[str | None, Callable[..., Any]]
    backward: Callable[..., Any] | None
    context: Callable[..., Any] | None


class NamedOp:
    """A torch op in pickled code: looked up when it is called."""

    def __init__(self, qualname: str, which: str) -> None:
        self._qualname, self._which = qualname.partition(".")[0], which

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        space, _, name = self._qualname.partition("::")
        packet = getattr(getattr(torch.ops, space), name)
        return (getattr(packet, self._which) if self._which else packet)(*args, **kwargs)


def namespace(name: str) -> Any:
    """Return ``torch.ops.NAME``; called by pickled code."""
    return getattr(torch.ops, name)


#: Ops that were defined here because other code calls them: their pickles, and their definitions,
#: without which torch forgets them.
_DEFINED: dict[str, tuple[bytes, Any]] = {}


def _define(qualname: str, text: bytes) -> None:
    """Define an op in torch by its name, in its current form; the client's process has it."""
    made_of, _ = _DEFINED.get(qualname, (None, None))
    if made_of == text or (made_of is None and _exists(qualname)):
        return
    op: InnerOp = cloudpickle.loads(text)
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
    _DEFINED[qualname] = text, definition


def _exists(qualname: str) -> bool:
    return qualname in torch._C._dispatch_get_all_op_names()


class Portable:
    """A pickled callable that has to be given its device."""

    def on(self, device: torch.device) -> Callable[..., Any]:
        """Return the callable for a worker's device."""
        raise NotImplementedError


#: The foreign ops of the plans that are kept, by name.
_LOADED: weakref.WeakValueDictionary[str, LoadedOp] = weakref.WeakValueDictionary()


def load_ops(data: Buffer, device: torch.device | None, takes_code: bool) -> list[LoadedOp]:
    """Load the ops that a plan defines; the plan's keeper has to hold the returned ones.

    Args:
        device: device that they are to run on; None: nothing is ever computed.
        takes_code: False: pickled code is refused.

    Raises:
        ProtocolError: they are not of the schema, or code is not taken.
    """
    told = decode(data)
    if not takes_code and any(each.code for each in told.ops):
        raise ProtocolError("pickled code, which a session with ship_code=False does not send")
    sys.path.extend(place for place in told.path if place not in sys.path)
    ops = [_LOADED.get(each.name) or LoadedOp(each) for each in told.ops]
    if device is not None:
        for each in ops:
            each.load(device)
    return ops


def loaded_op(name: str) -> LoadedOp:
    """Return the foreign op of a kept plan; KeyError if there is none."""
    return _LOADED[name]


def _held(definition: Definition) -> Foreign:
    try:
        op: Foreign = overload(definition.name)
    except KeyError:
        op = definition.op()
        add_foreign(op)
    return op


#: Modules that could not be imported, with the error: half of their registrations may be done.
_failed: dict[str, str] = {}


def _load(definition: Definition) -> None:
    for module in definition.modules:
        if module not in _failed and module not in sys.modules:
            try:
                importlib.import_module(module)
            except BaseException as error:  # noqa: BLE001 - a script may even call sys.exit
                _failed[module] = f"{type(error).__name__}: {error}"
        if module in _failed:
            raise ImportError(f"importing {module} failed: {_failed[module]}", name=module)
    for library in definition.libraries:
        torch.ops.load_library(library)


def _known(definition: Definition) -> Callable[..., Any]:
    """Return the overload, now that its module or library is loaded."""
    try:
        op: Any = overload(definition.title)
    except KeyError:
        raise LookupError("no such op was defined by that") from None
    return getattr(op, "_op", op)  # type: ignore[no-any-return]


def _unavailable(definition: Definition, error: BaseException) -> CodeError:
    where = ", ".join((*definition.modules, *definition.libraries))
    return CodeError(definition.title, where, f"{type(error).__name__}: {error}")


class _Kernel:
    """Kernel of a foreign op that ensures that its results have their own memory."""

    def __init__(self, facts: OpFacts, run: Callable[..., Any]) -> None:
        self._run = run
        self._fresh = [n for n, kind in enumerate(facts.outputs) if kind[0] == "f"]
        self._single = len(facts.outputs) == 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._run(*args, **kwargs)
        if not self._fresh:
            return returned
        taken: set[int] = set()
        _add_memory(args, taken)
        _add_memory(tuple(kwargs.values()), taken)
        if self._single:
            return _owning(returned, taken)
        items = list(returned)
        for position in self._fresh:
            items[position] = _owning(items[position], taken)
        return tuple(items)


def _add_memory(items: Any, taken: set[int]) -> None:
    for item in items:
        if isinstance(item, torch.Tensor):
            taken.add(_memory(item))
        elif isinstance(item, (list, tuple)):
            _add_memory(item, taken)


def _owning(value: Any, taken: set[int]) -> Any:
    """Return ``value``, copied if it shares memory that is taken already."""
    if isinstance(value, (list, tuple)):
        return [_owning(item, taken) for item in value]
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return value
    if value.requires_grad:
        value = value.detach()
    where = _memory(value)
    if where in taken and value.numel():
        value = value.clone()
        where = _memory(value)
    taken.add(where)
    return value


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr() if value.layout == torch.strided else 0


#: Options of ``triton.jit`` that kernels keep.
OPTIONS = ("version", "do_not_specialize", "do_not_specialize_on_alignment", "debug", "noinline")


def jitted(fn: FunctionType, source: tuple[str, ...], first: int, options: dict[str, Any]) -> Any:
    """Build the triton kernel of a function with a source that is in no file.

    Args:
        source: its lines, decorators included; ``first`` is the number of the first.
    """
    name = f"<triton kernel {fn.__module__}.{fn.__qualname__} {hash(source)}>"
    lines = ["\n"] * (first - 1) + list(source)
    linecache.cache[name] = sum(map(len, lines)), None, lines, name
    fn.__code__ = fn.__code__.replace(co_filename=name)
    return importlib.import_module("triton").jit(**options)(fn)
