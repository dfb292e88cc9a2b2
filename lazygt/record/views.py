"""Views: handles that show part of a storage, and what a write through one does to the storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazygt.graph.alias import WRITE_BACK, view_step
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.graph.ops import OpFacts, viewed_argument
from lazygt.record.tensor import LazyTensor, Storage, ViewChain, ViewOp, wrapper

if TYPE_CHECKING:
    from lazygt.record.recorder import Recorder
    from lazygt.record.trie import TrieNode


def replay(recorder: Recorder, view: ViewChain, storage: Storage) -> None:
    """The storage was written or a new trace began: take the view again."""
    base = index = storage.index
    meta: TensorMeta | None = storage.meta
    for link in view.steps:
        at = link.position + 1
        key = (*link.key[:at], index, *link.key[at + 1 :])
        step = recorder.trace.step.children.get(key)
        if step is None:
            args = (*link.args[: at - 1], Ref(index), *link.args[at:])
            assert meta is not None
            results = recorder.inference.results(
                link.facts, args, link.kwargs, {index: meta}, recorder.trace.params
            )
            assert results is not None, f"{link.facts.name} was inferred before"
            fresh = results[0]
            node = Node(link.facts.name, args, link.kwargs, fresh)
            first = recorder.internal(key, node, link.facts)
        else:
            assert step.node is not None
            fresh = step.node.fresh
            first = recorder.internal(key, step.node, link.facts)
        index, meta = first + link.which, fresh[link.which]
    view.index, view.base, view.serial = index, base, recorder.serial


def write(recorder: Recorder, t: LazyTensor, index: int) -> None:
    """The handle ``t`` was written: its new version is value ``index``."""
    storage, view = t._storage, t._view
    if view is None:
        recorder.own(storage, index)
        return
    chain = tuple(
        view_step(link.facts.name, link.position, link.args, link.kwargs, link.which)
        for link in view.steps
    )
    base = storage.index
    key = (WRITE_BACK, base, index, tuple((link.key, link.which) for link in view.steps))
    node = Node(WRITE_BACK, (Ref(base), Ref(index), chain), (), (storage.meta,))
    recorder.own(storage, recorder.internal(key, node))
    view.index, view.base, view.serial = index, storage.index, recorder.serial


def handle(recorder: Recorder, step: TrieNode, args: tuple[Any, ...]) -> LazyTensor:
    """The handle that an op with one view as its result returns."""
    links = step.links
    if links is None:
        links = _links(step)
    recorder.trace.owners.append(None)
    link = links[0]
    source: LazyTensor = args[link.position]
    storage, shown = source._storage, source._view
    steps = links if shown is None else shown.steps + links
    return wrapper(link.meta, storage, ViewChain(steps, recorder.serial, storage.index, step.first))


def handles(
    recorder: Recorder, f: OpFacts, step: TrieNode, args: tuple[Any, ...]
) -> list[LazyTensor]:
    """The handles that an op with a list of views as its result returns."""
    links = step.links
    if links is None:
        links = _links(step)
    source: LazyTensor = args[viewed_argument(f)]
    storage, serial, first = source._storage, recorder.serial, step.first
    steps = source._view.steps if source._view is not None else ()
    return [
        wrapper(
            link.meta, storage, ViewChain((*steps, link), serial, storage.index, first + link.which)
        )
        for link in links
    ]


def _links(step: TrieNode) -> tuple[ViewOp, ...]:
    """What the handles of a view op's results keep of it; made once a step."""
    node, f = step.node, step.facts
    assert node is not None
    assert f is not None
    position = viewed_argument(f)
    made = []
    for which, meta in enumerate(node.fresh):
        assert meta is not None
        made.append(ViewOp(f, step.key, position, node.args, node.kwargs, which, meta))
    step.links = tuple(made)
    return step.links
