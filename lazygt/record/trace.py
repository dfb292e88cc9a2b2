"""Trace: what has been recorded since the last flush."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any, Protocol

import torch

from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta
from lazygt.graph.ops import OpFacts, returned_write
from lazygt.graph.source import CallSite, user_call_site
from lazygt.record.tensor import Storage
from lazygt.record.trie import TrieNode

#: An op and the user's frame that it was recorded at.
TracePoint = tuple[OpFacts | None, CallSite | None]


class TraceSink(Protocol):
    """What the recorder needs of the session."""

    mesh: Mesh

    def ship(self, trace: Trace, reason: str, fetch: Any, ask: bool) -> Any:
        """Turn a trace into a run; returns the reply when something is fetched or asked."""

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> Any:
        """Take a copy of a CPU tensor for the workers now; returns its RemoteValue."""

    def after_backward(self) -> None:
        """The sync point at the end of ``.backward()``."""


class Trace:
    """What has been recorded since the last flush."""

    __slots__ = ("call_sites", "inputs", "owners", "params", "serial", "step")

    def __init__(self, serial: int, root: TrieNode) -> None:
        self.serial = serial
        self.step = root
        #: value number -> the storage that shows it (None: nothing of the user's ever does)
        self.owners: list[weakref.ref[Storage] | None] = []
        #: (storage, remote value) a slot; input k is value number ~k
        self.inputs: list[tuple[weakref.ref[Storage], Any]] = []
        self.params: list[Any] = []
        #: the user's frame of each op, by op number
        self.call_sites: list[CallSite | None] = []

    def settle(self) -> None:
        """Make the lists agree with the step that was reached, after an exception in an op.

        Numbers and inputs are noted before a step is reached, call sites and owners after it, so
        that the step always tells what belongs to the trace.
        """
        step = self.step
        del self.params[step.params :]
        del self.inputs[step.inputs :]
        self.call_sites.extend([user_call_site(1)] * (step.ops - len(self.call_sites)))
        self.owners.extend([None] * (step.values - len(self.owners)))

    def alive(self) -> tuple[list[Storage], tuple[int, ...]]:
        """The storages that still show a value of this trace, and those values' numbers."""
        storages, indices = [], []
        serial = self.serial
        for index, owner in enumerate(self.owners):
            storage = owner() if owner is not None else None
            if storage is not None and storage.index == index and storage.serial == serial:
                storages.append(storage)
                indices.append(index)
        return storages, tuple(indices)

    def bytes_alive(self) -> int:
        """Bytes of what this trace made and handles still show; autograd's count, too."""
        entered = {id(storage()) for storage, _ in self.inputs}
        storages, _ = self.alive()
        return sum(storage.meta.nbytes for storage in storages if id(storage) not in entered)

    def here(self) -> TracePoint:
        """Where the trace stands now."""
        return self.step.facts, self.call_sites[-1] if self.call_sites else None

    def rarest_repeated(self) -> TracePoint | None:
        """The place that the trace came by least often, but more than once."""
        ops = [step for step in self.step.path() if step.node is not None]
        seen = Counter(
            (step.facts, call_site) for step, call_site in zip(ops, self.call_sites, strict=True)
        )
        repeated = [place for place, times in seen.items() if times > 1]
        return min(repeated, key=lambda place: seen[place], default=None)


def written_tensors(f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors an op writes, in schema order (lists flattened, missing ones skipped)."""
    written = [args[position] for position in f.writes if position < len(args)]
    written += [kwargs[name] for name in f.writes_named if name in kwargs]
    found: list[Any] = []
    for a in written:
        if isinstance(a, (list, tuple)):
            found.extend(a)
        else:
            found.append(a)
    return [t for t in found if t is not None]


def returned(
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    made: list[Any],
    ints: tuple[int, ...] = (),
) -> Any:
    """What an op returns, out of its fresh handles, the tensors it wrote, and its numbers."""
    if f.outputs == ("fl",):
        return made
    out: list[Any] = []
    numbers = iter(ints)
    single = sum(kind != "fl" for kind in f.outputs)
    for position, kind in enumerate(f.outputs):
        if kind[0] == "w":
            which = returned_write(f, position)
            out.append(kwargs[which] if isinstance(which, str) else args[which])
        elif kind == "i":
            out.append(next(numbers))
        elif kind == "fl":
            taken = len(made) - (single - len(out))
            out.append(made[:taken])
            made = made[taken:]
        else:
            out.append(made.pop(0))
    if not out:
        return None
    return out[0] if len(out) == 1 else tuple(out)
