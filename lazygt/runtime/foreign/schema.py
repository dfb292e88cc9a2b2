"""Schema of a plan's foreign ops: code that is not torch's own.

A definition refers to the code of an op: in modules and shared libraries, which a worker loads
itself, or pickled within the definition.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazygt.errors import ProtocolError
from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.node import Graph
from lazygt.graph.ops import Foreign, overload, title
from lazygt.runtime.wire import Buffer, Part, fitting, pack, unpack

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
