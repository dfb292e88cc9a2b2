"""What a plan's first run teaches about layouts: results that lie otherwise than was inferred.

A worker compares what it makes in a plan's first run with what was recorded. Where only strides
differ it lays the result out as promised, so that every view of it means what it meant when it was
recorded, and reports the strides that its kernel gave. The client infers those from then on, and
forgets the steps that were recorded with others: they are recorded anew, as on the workers' own
device, and the copy is gone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Graph
from lazygt.record.recorder import Recorder
from lazygt.record.trie import TrieNode
from lazygt.runtime.client import Client

#: (node of a plan's steps, result, strides that its kernel gave it).
Row = tuple[int, int, tuple[int, ...]]


class _Stale(NamedTuple):
    """A result that was recorded with other strides than the kernel's."""

    op: str
    position: int
    meta: TensorMeta | None


def learn(recorder: Recorder, client: Client) -> None:
    """Take in what the workers have reported; only while nothing is recorded."""
    reports, client.relaid = client.relaid, []
    stale: set[_Stale] = set()
    for graph, rows in reports:
        stale |= _corrected(recorder, graph, rows)
    if not stale:
        return

    def is_stale(step: TrieNode) -> bool:
        node = step.node
        return node is not None and any(
            _Stale(node.op, position, meta) in stale for position, meta in enumerate(node.fresh)
        )

    dropped = recorder.trie.cut(is_stale)
    client.entries.forget([kept.entry for kept in dropped])


def _corrected(recorder: Recorder, graph: Graph, rows: Iterable[Row]) -> set[_Stale]:
    """Correct what is inferred of a plan's nodes; what was recorded wrong."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for number, position, strides in rows:
        found.setdefault(number, {})[position] = strides
    stale = set()
    for number, strides_of in found.items():
        node = graph.nodes[number]
        if recorder.inference.correct(node, graph, strides_of):
            stale |= {_Stale(node.op, place, node.fresh[place]) for place in strides_of}
    return stale
