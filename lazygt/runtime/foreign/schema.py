"""Code that torch alone does not have: what a plan says of its foreign ops.

That is where the code of each is: in modules and shared libraries, which a worker loads itself, or
right there, pickled.
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

#: Tags that say something of an op's results; others are no worker's business.
_TAGS = {
    "dynamic_output_shape": torch.Tag.dynamic_output_shape,
    "data_dependent_output": torch.Tag.data_dependent_output,
    "nondeterministic_seeded": torch.Tag.nondeterministic_seeded,
}


class Definition(Part):
    """An op that a plan names, and where its code is.

    Attributes:
        name: what graphs call it (``graph.ops.Foreign``).
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
        """What stands for the op where facts are asked."""
        return Foreign(self.name, self.schema, [_TAGS[tag] for tag in self.tags], infer, self)


def tag_names(tags: Sequence[torch.Tag]) -> tuple[str, ...]:
    """The tags that travel."""
    return tuple(name for name, tag in _TAGS.items() if tag in tags)


def code_name(code: bytes) -> str:
    """What stands for pickled code in the name of its op."""
    return hashlib.sha256(code).hexdigest()[:16]


def foreign_ops(graph: Graph) -> list[Foreign]:
    """The foreign ops that a graph names."""
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
    """What a plan carries besides its graph: where modules are looked for, and its foreign ops."""

    path: tuple[str, ...]
    ops: tuple[Definition, ...]


def encode(ops: Sequence[Foreign]) -> bytes:
    """What a plan that names these ops carries besides its graph; nothing for no op."""
    if not ops:
        return b""
    path = tuple(map(os.path.abspath, sys.path))
    return pack(Definitions(path, tuple(op.definition for op in ops)))


def decode(data: Buffer) -> Definitions:
    """What ``encode`` encoded.

    Raises:
        ProtocolError: for anything else, and for code that is not what its op is named after.
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
