"""Users' results of ops: new handles, views of a storage, and written tensors."""

from __future__ import annotations

from typing import Any

from lazygt.graph.alias import WRITE_BACK
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import Node, Ref
from lazygt.graph.ops import OpFacts, viewed_argument
from lazygt.record import chains
from lazygt.record.tensor import (
    LazyTensor,
    ViewChain,
    alias,
    meta_of,
    new_storage,
    rebind,
    storage_of,
    view_of,
    wrapper,
)
from lazygt.record.trace import Trace, user_results, written_tensors
from lazygt.record.trie import TrieNode


def results(
    trace: Trace, step: TrieNode, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the user's results of a step: handles, written tensors, lists and ints."""
    node = step.node
    assert node is not None
    trace.reserve(step)
    if node.written:
        targets = written_tensors(f, args, kwargs)
        index = step.first + len(node.fresh)
        for target, meta in zip(targets, node.written, strict=True):
            current = meta_of(target)
            if meta.shape != current.shape or meta.stride != current.stride:
                resize(target, meta)
            write(trace, target, index)
            index += 1
    if f.outputs == ("vl",):
        return handles(trace, f, step, args)
    fresh = [
        trace.show(index, meta) if meta is not None else None
        for index, meta in enumerate(node.fresh, step.first)
    ]
    return user_results(f, args, kwargs, fresh, step.numbers)


def resize(t: LazyTensor, meta: TensorMeta) -> None:
    """Give a tensor of ``out=`` another shape, with a new storage."""
    rebind(t, meta, new_storage(storage_of(t).owner, 0, 0, meta), None)


def write(trace: Trace, t: LazyTensor, index: int) -> None:
    """Note that an op has written a handle: value ``index`` is its new version.

    For a view, a ``write_back`` of the new version into the view's storage is recorded.
    """
    storage, view = storage_of(t), view_of(t)
    if view is None:
        trace.own(storage, index)
        return
    base = storage.index
    key = (WRITE_BACK, base, index, view.params, tuple((op.key, op.which) for op in view.ops))
    step = trace.step.children.get(key)
    node = None if step is None else step.node
    if node is None:
        args = Ref(base), Ref(index), chains.steps(view)
        node = Node(WRITE_BACK, args, (), (storage.meta,))
    trace.own(storage, trace.internal(key, node))
    view.index, view.base, view.serial = index, storage.index, trace.serial


def handle(trace: Trace, step: TrieNode, args: tuple[Any, ...]) -> LazyTensor:
    """Return the handle of an op whose one result is a view."""
    ops = step.view_ops
    if ops is None:
        ops = chains.view_ops(step)
    trace.reserve(step)
    op = ops[0]
    source: LazyTensor = args[op.position]
    storage, view = source._storage, source._view
    if op.pitch is not None or (view is not None and view.numbers):
        chain = chains.extended(trace, view, storage, op, step.first)
        return wrapper(chain.meta, storage, chain)
    viewed = ops if view is None else view.ops + ops
    return wrapper(op.meta, storage, ViewChain(viewed, trace.serial, storage.index, step.first))


def handles(trace: Trace, f: OpFacts, step: TrieNode, args: tuple[Any, ...]) -> list[LazyTensor]:
    """Return the handles of an op whose result is a list of views."""
    ops = step.view_ops
    if ops is None:
        ops = chains.view_ops(step)
    source: LazyTensor = args[viewed_argument(f)]
    storage, serial, first = source._storage, trace.serial, step.first
    view = source._view
    if view is not None and view.numbers:
        chains_of_views = [
            chains.extended(trace, view, storage, op, first + op.which) for op in ops
        ]
        return [wrapper(chain.meta, storage, chain) for chain in chains_of_views]
    prefix = view.ops if view is not None else ()
    return [
        wrapper(op.meta, storage,
                ViewChain((*prefix, op), serial, storage.index, first + op.which))
        for op in ops
    ]  # fmt: skip


def same_view(recorder: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return another handle of the same view, without a step (``detach``, ``alias``)."""
    return alias(args[0])


def same_shape_view(recorder: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return an alias for a ``view`` to the same shape, else NotImplemented."""
    t = args[0]
    return alias(t) if tuple(t.shape) == tuple(args[1]) else NotImplemented
