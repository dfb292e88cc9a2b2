"""Steps added to the trie ahead of the trace, by an earlier trace in other sizes.

A trace that repeats an earlier one in other sizes (``record.repeats``) most likely goes on like it.
So the steps that followed there are added here in one go: called with the corresponding sizes, and
with results by the rules of ``graph.shapes``. Recording would make the same steps; and nothing is
assumed, since each is reached by its own key alone. Steps that the trace does not reach are removed
again (``TraceTrie.reached``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import Arg, Node, Param
from lazygt.graph.ops import MASKABLE
from lazygt.graph.sizes import sized, sizes_in
from lazygt.record.infer import SAMPLES, Inference
from lazygt.record.repeats import Call, Repeat, counts
from lazygt.record.tensor import NATIVE
from lazygt.record.trie import TraceTrie, TrieNode

#: Size in the earlier trace -> size in this one; None: it corresponds to several.
Sizes = Mapping[int, int | None]


class Recording(Protocol):
    """Interface of a trace, as far as this module needs it."""

    inference: Inference
    trie: TraceTrie

    @property
    def repeat(self) -> Repeat:
        """The earlier trace that this one repeats in other sizes."""


def go_ahead(trace: Recording) -> None:
    """Add the steps that followed the newest step's counterpart, as far as they are clear."""
    repeat, trie = trace.repeat, trace.trie
    if repeat.here is None or repeat.step is None:
        return
    ahead = [(repeat.here, repeat.step)]
    while len(ahead) <= repeat.wanted:
        here, before = ahead[-1]
        if len(before.children) != 1:
            break
        (old,) = before.children.values()
        new = _following(trace.inference, repeat, here, old)
        if new is None or not trie.add_ahead(new):
            break
        repeat.go_on(new, old)
        ahead.append((new, old))
    if len(ahead) > 1:
        repeat.ahead = ahead
        if NATIVE is not None:
            NATIVE.add_again(ahead)


def _following(
    inference: Inference, repeat: Repeat, here: TrieNode, old: TrieNode
) -> TrieNode | None:
    """Return the counterpart of ``old`` below ``here``; None: it is left to the trace."""
    node, differences = old.node, repeat.differences
    if old.placed:
        return None
    if node is None:
        assert old.input is not None
        if differences.resized.isdisjoint(old.input.shape):
            return old.again(here)
        meta = _resized(old.input, differences.sizes)
        return None if meta is None else TrieNode(here, meta, input=meta)
    if node.dynamic:
        return None
    called_alike = differences.resized.isdisjoint(sizes_in(node))
    if called_alike and differences.values.isdisjoint(node.refs()):
        new = old.again(here)
    else:
        made = _inferred(inference, repeat, here, old, called_alike)
        if made is None or counts(made) != counts(old):
            return None
        new = made
    new.forward, new.backward = old.forward, old.backward
    return new


def _inferred(
    inference: Inference,
    repeat: Repeat,
    here: TrieNode,
    old: TrieNode,
    called_alike: bool,
) -> TrieNode | None:
    """Return it for an op with perhaps other results; None where no rule is sure of them."""
    node, f = old.node, old.facts
    assert node is not None
    if f is None or old.moves or f.dynamic or f.name in MASKABLE:
        return None
    key, call = old.key, (node.args, node.kwargs)
    if not called_alike:
        other = _call(node, key, repeat.differences.sizes)
        if other is None:
            return None
        key, call = other
    params = _samples(node, old.key)
    metas = repeat.metas(node)
    if params is None or metas is None:
        return None
    results = inference.by_rule(f, *call, metas, params)
    if results is None:
        return None
    if called_alike and results == (node.fresh, node.written, old.numbers):
        return old.again(here)
    made = Node(f.name, *call, results.fresh, node.writes, results.written)
    step = TrieNode(here, key, made, facts=f)
    step.numbers = results.ints
    step.itself = old.itself and made.written == (metas[node.writes[0]],)
    if f.views:
        step.make = None
    return step


def _resized(meta: TensorMeta, sizes: Sizes) -> TensorMeta | None:
    """Return a tensor's meta in other sizes; None where these are not clear."""
    shape = tuple([sizes.get(size, size) for size in meta.shape])
    if None in shape or not meta.plain:
        return None
    return intern(shape, contiguous_stride(shape), meta.dtype)  # type: ignore[arg-type]


def _call(node: Node, key: tuple[Any, ...], sizes: Sizes) -> tuple[tuple[Any, ...], Call] | None:
    """Return a node's key and call in other sizes; None where these are not clear."""
    places = sized(node.op)
    args, kwargs, said = list(node.args), list(node.kwargs), list(key)
    for place, arg in enumerate(node.args):
        new = _argument(arg, sizes) if place in places else arg
        if new is arg:
            continue
        if new is None or said[1 + place] != arg:
            return None
        args[place] = said[1 + place] = new
    for at, (name, arg) in enumerate(node.kwargs):
        new = _argument(arg, sizes) if name in places else arg
        if new is arg:
            continue
        place = 1 + len(args) + 2 * at
        if new is None or said[place : place + 2] != [name, arg]:
            return None
        kwargs[at], said[place + 1] = (name, new), new
    return tuple(said), (tuple(args), tuple(kwargs))


def _argument(arg: Arg, sizes: Sizes) -> Arg:
    """Return an argument in other sizes, itself if it has none; None where they are unclear."""
    if type(arg) is int:
        return sizes.get(arg, arg)
    if type(arg) is not tuple or not any(type(item) is int and item in sizes for item in arg):
        return arg
    items = tuple([_argument(item, sizes) for item in arg])
    if items == arg:
        return arg
    return None if None in items and None not in arg else items


def _samples(node: Node, key: tuple[Any, ...]) -> list[Any] | None:
    """Return a sample of each run-time number of an op, by number; None: a kind is unknown."""
    kinds: dict[int, Any] = {}
    said = iter(key[1:])
    for arg in node.args:
        _note_kinds(arg, next(said, None), kinds)
    for _, arg in node.kwargs:
        next(said, None)
        _note_kinds(arg, next(said, None), kinds)
    if not all(kind in SAMPLES for kind in kinds.values()):
        return None
    count = max(kinds, default=-1) + 1
    return [SAMPLES[kinds[number]] if number in kinds else None for number in range(count)]


def _note_kinds(arg: Arg, said: Any, kinds: dict[int, Any]) -> None:
    if type(arg) is Param:
        kinds[arg.index] = said
    elif type(arg) is tuple and type(said) is tuple:
        for item, one in zip(arg, said, strict=False):
            _note_kinds(item, one, kinds)
