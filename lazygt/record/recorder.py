"""The hot path: the stream of ops, step by step through the trie; on a miss, a new step.

``Recorder.record`` is what every op comes to. On a hit it does a dictionary look-up and makes the
wrappers; on a miss (``miss``) the results' metas are inferred, where a wrong shape or dtype
raises torch's own exception on the user's line.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lazygt.errors import LazyGTError, NoSession
from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Node
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, writing_facts
from lazygt.graph.source import CallSite, user_call_site
from lazygt.record import annotate, copies, data_dependent, host_scalars, views
from lazygt.record.definitions import Definitions
from lazygt.record.infer import Inference
from lazygt.record.miss import NUMBERS, on_miss
from lazygt.record.mixed import mixed_error
from lazygt.record.rng import SessionGenerator
from lazygt.record.tensor import (
    DEVICE_0,
    STRIDED,
    LazyTensor,
    Storage,
    make_wrapper,
    meta_of,
    rebind,
    wrapper,
)
from lazygt.record.trace import Trace, TracePoint, TraceSink, returned, written_tensors
from lazygt.record.trie import TraceTrie, TrieNode

Handler = Callable[..., Any]

#: Frames between the user's and ``user_call_site`` at least: _record, record, the dispatch.
_CALLER = 4
_ref = weakref.ref
_PID = os.getpid()
#: Types whose values stand in a step's key as they are.
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format})


class Recorder:
    """Records ops into the current trace, and says when it has to be shipped."""

    def __init__(
        self, sink: TraceSink, trie: TraceTrie, worker_device: str, ship_code: bool = True
    ) -> None:
        self.sink = sink
        self.definitions = Definitions(worker_device, ship_code)
        self.trie = trie
        #: what the workers compute on
        self.worker_device = worker_device
        self.inference = Inference(worker_device)
        self.generator = SessionGenerator(self, worker_device)
        self.lock = threading.RLock()
        self.serial = next(_SERIALS)
        self.trace = Trace(self.serial, trie.root)
        self.closed = False
        #: ops of the traces before this one
        self.shipped_ops = 0
        #: (step, key, facts) of the first miss of the trace, for stats and ``why``
        self.first_miss: tuple[TrieNode, Any, OpFacts | None, CallSite | None] | None = None
        self._known: dict[int, tuple[OpFacts, Handler | None]] = {}
        #: autograd's sequence number -> op of the trace
        self.forward_ops: dict[int, int] = {}
        self._backward_call_site: CallSite | None = None
        self.backward_error: BaseException | None = None
        #: the op before which over-long traces end, once one has
        self.anchor: TracePoint | None = None

    # -- the hot path --------------------------------------------------------------------

    def record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record one op; returns what the user sees.

        Raises:
            NoSession: after the session closed.
            Exception: torch's own, when the op can't take such arguments.
        """
        try:
            try:
                known = self._known.get(id(func))
                f, special = known if known is not None else self._learn(func)
                if self.closed:
                    raise closed_error()
                if special is not None:
                    result = special(self, func, args, kwargs or {})
                    if result is not NotImplemented:
                        return result
                    if f.name in UNDECLARED_WRITES and args[UNDECLARED_WRITES[f.name][1]]:
                        f = writing_facts(func)
                if f.random:
                    args, kwargs = self.generator.before_draw(args, kwargs)
                return self._record(f, func, args, kwargs)
            except BaseException:
                self.trace.settle()
                raise
        except BaseException:
            self.trace.settle()  # again: Ctrl-C may have ended that
            raise

    def record_plain(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record an op as it is, past what ``handlers`` do with it."""
        return self._record(facts(func), func, args, kwargs)

    def _record(
        self,
        f: OpFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        trace = self.trace
        serial = trace.serial
        key: list[Any] = [f]
        add = key.append
        for a, hoist in zip(args, f.hoist):  # noqa: B905 - strict= costs 0.1 us an op
            kind = type(a)
            if kind is LazyTensor:
                storage = a._storage
                if storage.serial == serial:
                    view = a._view
                    if view is None:
                        add(storage.index)
                        continue
                    if view.base == storage.index and view.serial == serial:
                        add(view.index)
                        continue
                elif storage.host is not None and f.pointwise:
                    result = host_scalars.compute(self, func, args, kwargs or {})
                    if result is not NotImplemented:
                        del trace.params[trace.step.params :]
                        return result
                add(self.index_of(a))
            elif hoist == 1 and kind in NUMBERS:
                add(kind)
                trace.params.append(a)
            elif kind in _PLAIN:
                add(a)
            elif kind is list and f.pointwise and host_scalars.is_host_scalar(a):
                result = host_scalars.compute(self, func, args, kwargs or {})
                if result is not NotImplemented:
                    del trace.params[trace.step.params :]
                    return result
                add(self._key(a, hoist, f))
            else:
                add(self._key(a, hoist, f))
        if kwargs:
            for name, a in kwargs.items():
                add(name)
                add(self._key(a, f.hoist_named.get(name, 0), f))
        found = tuple(key)
        step = trace.step.children.get(found)
        if step is None:
            step = on_miss(self, trace, found, f, args, kwargs or {})
        trace.step = step
        trace.call_sites.append(user_call_site(_CALLER))
        make = step.make
        if make is not None:
            storage = Storage(self, serial, step.first, make)
            trace.owners.append(_ref(storage))
            if not make.plain:
                return wrapper(make, storage, None)
            # ``wrapper`` written out: a call less an op
            t = make_wrapper(LazyTensor, make.shape, None, None, None, make.dtype, STRIDED,
                             DEVICE_0)  # fmt: skip
            t.__dict__ = {"_storage": storage, "_view": None}
            return t
        if step.itself and args[0]._view is None:
            storage = args[0]._storage
            trace.owners.append(weakref.ref(storage))
            storage.index, storage.serial, storage.remote = step.first, serial, None
            return args[0]
        if f.one_view:
            return views.handle(self, step, args)
        if step.node is not None and step.node.dynamic:
            return data_dependent.ask(self, trace, f, args, kwargs or {})
        return self._results(trace, step, f, args, kwargs or {})

    def foreign_op(
        self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record an op that torch alone does not have, in the midst of ``record``."""
        if f.random:
            args, kwargs = self.generator.before_draw(args, kwargs)
        return self._record(f, f.func, args, kwargs)

    def record_foreign(self, f: OpFacts, args: tuple[Any, ...]) -> Any:
        """Record an op that torch has never dispatched."""
        try:
            if self.closed:
                raise closed_error()
            result = self.foreign_op(f, args)
        except BaseException:
            self.trace.settle()
            raise
        if self.anchor is not None or self.trace.step.full:
            self.overflow()
        return result

    def _learn(self, func: torch._ops.OpOverload) -> tuple[OpFacts, Handler | None]:
        # why: special's handlers are written against this module
        from lazygt.record.handlers import handler_of

        f = facts(func)
        special = handler_of(f) or (_either if f.name in UNDECLARED_WRITES else None)
        self._known[id(func)] = f, special
        return f, special

    def _key(self, a: Any, hoist: int, f: OpFacts) -> Any:
        """One argument as it stands in a step's key."""
        kind = type(a)
        if kind is LazyTensor:
            return self.index_of(a)
        if hoist == 1 and kind in NUMBERS:
            self.trace.params.append(a)
            return kind
        if kind in _PLAIN:
            return a
        if kind is float or kind is complex:
            return exact(a)
        if kind is list or kind is tuple:
            return self._list_key(a, hoist, f)
        if isinstance(a, torch.Tensor):
            return self.index_of(a if isinstance(a, LazyTensor) else self.foreign(a, f))
        if kind is torch.device:
            return DEVICE
        if isinstance(a, torch.Generator):
            raise RuntimeError(
                f"{f.name}: expected a generator of device 'lazygt' but found one of "
                f"{a.device.type!r}; torch lets no Python device have generators of its own: "
                f"leave generator= out (the session's generator follows torch.manual_seed), or "
                f"draw on the CPU and .to('lazygt')"
            )
        return a

    def _list_key(self, items: Any, hoist: int, f: OpFacts) -> tuple[Any, ...]:
        """A list argument as it stands in a step's key; a schema's list is all of one kind."""
        first = type(items[0]) if items else None
        if hoist == 2:
            kinds = tuple(map(type, items))
            if NUMBERS.issuperset(kinds):
                self.trace.params.extend(items)
                return kinds
        elif first is int or first is bool:
            return tuple(items)
        elif first is LazyTensor:
            serial = self.serial
            return tuple(
                [
                    t._storage.index
                    if type(t) is LazyTensor and t._view is None and t._storage.serial == serial
                    else self._key(t, 0, f)
                    for t in items
                ]
            )
        return tuple([self._key(item, 1 if hoist == 2 else 0, f) for item in items])

    def foreign(self, t: torch.Tensor, f: OpFacts) -> LazyTensor:
        """A CPU tensor among lazy ones: torch lets 0-dim ones mix, and CPU indices."""
        if t.device.type == "cpu" and (t.dim() == 0 or f.name in _CPU_INDICES):
            return self.to_lazy(t)
        raise mixed_error(t, f)

    # -- values --------------------------------------------------------------------------

    def index_of(self, t: LazyTensor) -> int:
        """The number of a handle's current value in the trace; it enters if need be."""
        storage = t._storage
        if storage.serial != self.serial:
            self._enter(storage)
        view = t._view
        if view is None:
            return storage.index
        if view.serial != self.serial or view.base != storage.index:
            views.replay(self, view, storage)
        return view.index

    def _enter(self, storage: Storage) -> None:
        """A value from before this trace becomes an input of it."""
        if storage.recorder is not self:
            raise closed_error() if storage.recorder.closed else _other_session()
        trace = self.trace
        if storage.host is not None:
            storage.remote = self.sink.upload(storage.host, storage.meta)
            storage.host = None
        if storage.blank:
            self._write_blank(storage)
            return
        if storage.remote is None:
            raise LazyGTError(
                "the value of this tensor was lost: the flush that shipped it was interrupted"
            )
        meta, sharding = storage.meta, storage.remote.sharding
        key = meta if sharding is None else (meta, sharding)
        step = trace.step.children.get(key)
        if step is None:
            self.note_miss(trace, meta, None, None)
            step = self.trie.add(TrieNode(trace.step, key, input=meta))
        try:
            trace.inputs.append((weakref.ref(storage), storage.remote))
            trace.step = step
        except BaseException:
            trace.settle()
            raise
        storage.index, storage.serial = ~(step.inputs - 1), trace.serial

    def _write_blank(self, storage: Storage) -> None:
        """The memory of ``torch.empty`` is needed after all: record the op that makes it."""
        meta = storage.meta
        f = facts(torch.ops.aten.empty_strided.default)
        key = (f, meta.shape, meta.stride, "dtype", meta.dtype)
        node = Node(f.name, (meta.shape, meta.stride),
                    (("dtype", meta.dtype), ("device", DEVICE)), (meta,))  # fmt: skip
        self.own(storage, self.internal(key, node, f))

    def own(self, storage: Storage, index: int) -> None:
        """The storage shows value ``index`` of the trace from here on."""
        trace = self.trace
        trace.owners[index] = weakref.ref(storage)
        storage.blank, storage.index, storage.serial, storage.remote = (
            False,
            index,
            trace.serial,
            None,
        )

    def internal(self, key: tuple[Any, ...], node: Node, f: OpFacts | None = None) -> int:
        """Advance by an op that the user did not write; returns its first result's number."""
        try:
            trace = self.trace
            step = trace.step.children.get(key)
            if step is None:
                self.note_miss(trace, key, f, None)
                step = self.trie.add(TrieNode(trace.step, key, node, facts=f))
            trace.step = step
            trace.call_sites.append(user_call_site(1))
            trace.owners.extend([None] * (step.values - step.first))
        except BaseException:
            self.trace.settle()
            raise
        return step.first

    # -- results of a step that is not just one fresh tensor -------------------------------

    def _results(
        self,
        trace: Trace,
        step: TrieNode,
        f: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        node = step.node
        assert node is not None
        trace.owners.extend([None] * (step.values - step.first))
        if node.written:
            targets = written_tensors(f, args, kwargs)
            index = step.first + len(node.fresh)
            for target, meta in zip(targets, node.written, strict=True):
                shown = meta_of(target)
                if meta.shape != shown.shape or meta.stride != shown.stride:
                    self.resized(target, meta)
                views.write(self, target, index)
                index += 1
        if f.outputs == ("vl",):
            return views.handles(self, f, step, args)
        made = [
            self.show(index, meta) if meta is not None else None
            for index, meta in enumerate(node.fresh, step.first)
        ]
        return returned(f, args, kwargs, made, step.numbers)

    def resized(self, t: LazyTensor, meta: TensorMeta) -> None:
        """``out=`` gave a tensor another shape: it shows a storage of its own from here on."""
        storage = Storage(self, 0, 0, meta)
        rebind(t, meta, storage, None)

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """A handle with a storage of its own for a value of the trace."""
        storage = Storage(self, self.serial, index, meta)
        self.trace.owners[index] = weakref.ref(storage)
        return wrapper(meta, storage, None)

    def note_miss(
        self, trace: Trace, key: Any, f: OpFacts | None, call_site: CallSite | None
    ) -> None:
        """A step is about to be added; only the first one of a trace is of interest."""
        if self.first_miss is None:
            self.first_miss = trace.step, key, f, call_site or user_call_site(1)

    # -- creation ------------------------------------------------------------------------

    def remote_tensor(self, meta: TensorMeta, remote: Any) -> LazyTensor:
        """A handle for a value that the workers hold already."""
        base = intern(meta.shape, meta.stride, meta.dtype)
        storage = Storage(self, 0, 0, base)
        storage.remote = remote
        return wrapper(base, storage, None)

    def blank(self, shape: Any, stride: Any, dtype: torch.dtype | None) -> LazyTensor:
        """``torch.empty``: memory that is only asked for when something is done with it."""
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise RuntimeError(f"Trying to create tensor with negative dimension: {list(sizes)}")
        steps = contiguous_stride(sizes) if stride is None else tuple(int(s) for s in stride)
        meta = intern(sizes, steps, dtype or torch.get_default_dtype())
        storage = Storage(self, 0, 0, meta)
        storage.blank = True
        return wrapper(meta, storage, None)

    def to_lazy(self, source: torch.Tensor) -> LazyTensor:
        """Upload a CPU tensor: its values are taken now."""
        source = source.detach()
        shape = tuple(source.shape)
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(source)
        stride = source.stride() if dense else contiguous_stride(shape)
        t = self.blank(shape, stride, source.dtype)
        self.fill(t, source)
        return t

    def fill(self, t: LazyTensor, source: torch.Tensor) -> None:
        """Give a whole, unviewed handle the values of a CPU tensor (``copy_``)."""
        storage = t._storage
        meta = storage.meta
        value = source.detach().resolve_conj().resolve_neg().to(meta.dtype)
        if tuple(value.shape) != meta.shape:
            value = value.expand(meta.shape)
        host = remote = None
        if meta.numel == 1 and not meta.dtype.is_complex:
            host = value.clone().reshape(meta.shape)
        else:
            remote = self.sink.upload(value, meta)
        storage.blank, storage.host, storage.remote, storage.serial = False, host, remote, 0

    def alias(self, t: LazyTensor) -> LazyTensor:
        """Another handle for the same values, with a version counter of its own."""
        return wrapper(meta_of(t), t._storage, t._view)

    # -- sync points ---------------------------------------------------------------------

    def flush(self, reason: str) -> None:
        """Ship what is recorded, without waiting for it."""
        with self.lock:
            self.sink.ship(self.trace, reason, None, False)

    def fetch(self, t: LazyTensor, reason: str) -> torch.Tensor:
        """The values of a handle as a CPU tensor of its own: ship, run, wait."""
        with self.lock:
            storage, view = t._storage, t._view
            if self.closed or storage.recorder is not self:
                raise closed_error() if storage.recorder.closed else _other_session()
            if storage.host is not None and view is None:
                return storage.host.clone()
            if view is not None:
                # the view's own elements travel, not the whole storage
                t = torch.ops.aten.clone.default(t)
                storage = t._storage
            elif storage.serial != self.serial and storage.remote is None:
                self._enter(storage)  # blank memory, or a lost value
            value: torch.Tensor = self.sink.ship(self.trace, reason, storage, False)
            return value

    def ship_pending(self, t: LazyTensor, reason: str) -> None:
        """Flush if the value of ``t`` is still only recorded."""
        storage = t._storage
        if not self.closed and storage.serial == self.serial and storage.index >= 0:
            self.flush(reason)

    def before_backward(self) -> None:
        """Remember the user's line: it is the one that torch's backward ops are recorded at."""
        self._backward_call_site = user_call_site(1)
        self.backward_error = None

    def raise_backward_error(self) -> None:
        """Raise what a backward op or a hook could not raise in the midst of the pass."""
        error, self.backward_error = self.backward_error, None
        if error is not None:
            raise error from None

    def after_backward(self) -> None:
        """The sync point at the end of ``.backward()``."""
        self.sink.after_backward()

    def next_trace(self) -> None:
        """Begin anew at the root."""
        self.serial = next(_SERIALS)
        self.shipped_ops += len(self.trace.call_sites)
        self.trace = Trace(self.serial, self.trie.root)
        self.first_miss = None
        self.forward_ops.clear()

    @property
    def ops(self) -> int:
        """Ops recorded since the session opened."""
        return self.shipped_ops + len(self.trace.call_sites)

    def overflow(self) -> None:
        """Flush a trace that has become too long, at a place that comes again.

        Cut at a fixed length, a loop would be cut at another point of its body every time, and
        each cut would be a new plan. So the first cut looks for the line that the trace came
        by least often, but more than once (once an iteration, most likely), and from then on
        traces end where that line comes round.
        """
        step = self.trace.step
        if step.full:
            self.anchor = self.trace.rarest_repeated()
        elif self.anchor != self.trace.here() or not self.trie.half_full(
            step, self.trace.bytes_alive
        ):
            return
        self.flush("trace too long")

    @property
    def backward_call_site(self) -> CallSite | None:
        """Where the user called ``.backward()`` last."""
        return self._backward_call_site

    def deep_copy(self, t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
        """See ``copies.deep_copy``."""
        return copies.deep_copy(self, t, memo)

    def keep_sharding(self, t: LazyTensor, before: Storage) -> None:
        """Lay a handle's values as the user has laid another storage's of that shape, unless
        something else was said of them."""
        storage = t._storage
        alike = t._view is None and storage.meta.shape == before.meta.shape
        here = before.recorder is self and not self.closed
        if before.placed is not None and storage.placed is None and alike and here:
            annotate.restore_sharding(t, before.placed)

    def host_copy(self, t: LazyTensor) -> torch.Tensor:
        """See ``copies.host_copy``."""
        return copies.host_copy(self, t)


#: Shared by all sessions, so that no other session's storage looks like one of this trace; 0 is
#: the serial of a storage that belongs to none.
_SERIALS = itertools.count(1)

#: Ops that take CPU index tensors on any device.
_CPU_INDICES = frozenset(
    {
        "aten.index.Tensor",
        "aten.index_put.default",
        "aten.index_put_.default",
        "aten._index_put_impl_.default",
        "aten._unsafe_index.Tensor",
        "aten._unsafe_index_put.default",
    }
)


def _either(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of an op that is ordinary but for writing only when a flag is set."""
    return NotImplemented


def closed_error() -> NoSession:
    """The error for a tensor of a session that has ended, or of another process."""
    if os.getpid() != _PID:
        return NoSession(
            "this lazygt tensor belongs to the process that this one was forked from, and can't be "
            "read here; what a DataLoader's worker process reads has to hang on its dataset, or to "
            "be on the CPU (device='cpu')"
        )
    return NoSession(
        "this lazygt tensor belongs to a session that is closed; its values went with the "
        "workers. Do the work inside `with lazygt.session():`, or fetch what you need later "
        "with .cpu() before the block ends."
    )


def _other_session() -> NoSession:
    return NoSession(
        "this lazygt tensor belongs to another session than the one that is open; move it with "
        ".cpu() there and .to('lazygt') here"
    )
