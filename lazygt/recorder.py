"""The hot path: the stream of ops, step by step through the trie; on a miss, a new step.

``Recorder.record`` is what every op comes to. On a hit it does a dictionary look-up and makes the
wrappers; on a miss (``misses``) the results' metas are inferred, where a wrong shape or dtype
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

from lazygt import copies, dynamic, hostnumbers, placing, views
from lazygt.definitions import Definitions
from lazygt.errors import LazyGTError, NoSession
from lazygt.generator import SessionGenerator
from lazygt.graph.exact import exact
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Node
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, writing_facts
from lazygt.graph.source import Mark, user_mark
from lazygt.infer import Inference
from lazygt.misses import NUMBERS, new_step
from lazygt.mixed import mixed_error
from lazygt.stretch import Place, Shipper, Stretch, returned, written_tensors
from lazygt.tensor import (
    DEVICE_0,
    STRIDED,
    Cell,
    LazyTensor,
    make_wrapper,
    meta_of,
    rebind,
    wrapper,
)
from lazygt.trie import Step, Trie

Handler = Callable[..., Any]

#: Frames between the user's and ``user_mark`` at least: _record, record, the dispatch.
_CALLER = 4
_ref = weakref.ref
_PID = os.getpid()
#: Types whose values stand in a step's key as they are.
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format})


class Recorder:
    """Records ops into the current stretch, and says when it has to be shipped."""

    def __init__(
        self, shipper: Shipper, trie: Trie, worker_device: str, ship_code: bool = True
    ) -> None:
        self.shipper = shipper
        self.definitions = Definitions(worker_device, ship_code)
        self.trie = trie
        #: what the workers compute on
        self.worker_device = worker_device
        self.inference = Inference(worker_device)
        self.generator = SessionGenerator(self, worker_device)
        self.lock = threading.RLock()
        self.serial = next(_SERIALS)
        self.stretch = Stretch(self.serial, trie.root)
        self.closed = False
        #: ops of the stretches before this one
        self.shipped_ops = 0
        #: (step, key, facts) of the first miss of the stretch, for stats and ``why``
        self.first_miss: tuple[Step, Any, OpFacts | None, Mark | None] | None = None
        self._known: dict[int, tuple[OpFacts, Handler | None]] = {}
        #: autograd's sequence number -> op of the stretch
        self.forward_ops: dict[int, int] = {}
        self._backward_mark: Mark | None = None
        self.backward_error: BaseException | None = None
        #: the op before which over-long stretches end, once one has
        self.anchor: Place | None = None

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
                self.stretch.settle()
                raise
        except BaseException:
            self.stretch.settle()  # again: Ctrl-C may have ended that
            raise

    def record_plain(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record an op as it is, past what ``special`` does with it."""
        return self._record(facts(func), func, args, kwargs)

    def _record(
        self,
        f: OpFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        stretch = self.stretch
        serial = stretch.serial
        key: list[Any] = [f]
        add = key.append
        for a, hoist in zip(args, f.hoist):  # noqa: B905 - strict= costs 0.1 us an op
            kind = type(a)
            if kind is LazyTensor:
                cell = a._cell
                if cell.serial == serial:
                    view = a._view
                    if view is None:
                        add(cell.index)
                        continue
                    if view.base == cell.index and view.serial == serial:
                        add(view.index)
                        continue
                elif cell.host is not None and f.pointwise:
                    result = hostnumbers.compute(self, func, args, kwargs or {})
                    if result is not NotImplemented:
                        del stretch.params[stretch.step.params :]
                        return result
                add(self.index_of(a))
            elif hoist == 1 and kind in NUMBERS:
                add(kind)
                stretch.params.append(a)
            elif kind in _PLAIN:
                add(a)
            elif kind is list and f.pointwise and hostnumbers.is_host(a):
                result = hostnumbers.compute(self, func, args, kwargs or {})
                if result is not NotImplemented:
                    del stretch.params[stretch.step.params :]
                    return result
                add(self._key(a, hoist, f))
            else:
                add(self._key(a, hoist, f))
        if kwargs:
            for name, a in kwargs.items():
                add(name)
                add(self._key(a, f.hoist_named.get(name, 0), f))
        found = tuple(key)
        step = stretch.step.children.get(found)
        if step is None:
            step = new_step(self, stretch, found, f, args, kwargs or {})
        stretch.step = step
        stretch.marks.append(user_mark(_CALLER))
        make = step.make
        if make is not None:
            cell = Cell(self, serial, step.first, make)
            stretch.owners.append(_ref(cell))
            if not make.plain:
                return wrapper(make, cell, None)
            # ``wrapper`` written out: a call less an op
            t = make_wrapper(LazyTensor, make.shape, None, None, None, make.dtype, STRIDED,
                             DEVICE_0)  # fmt: skip
            t.__dict__ = {"_cell": cell, "_view": None}
            return t
        if step.itself and args[0]._view is None:
            cell = args[0]._cell
            stretch.owners.append(weakref.ref(cell))
            cell.index, cell.serial, cell.remote = step.first, serial, None
            return args[0]
        if f.one_view:
            return views.handle(self, step, args)
        if step.node is not None and step.node.dynamic:
            return dynamic.ask(self, stretch, f, args, kwargs or {})
        return self._results(stretch, step, f, args, kwargs or {})

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
            self.stretch.settle()
            raise
        if self.anchor is not None or self.stretch.step.full:
            self.overflow()
        return result

    def _learn(self, func: torch._ops.OpOverload) -> tuple[OpFacts, Handler | None]:
        # why: special's handlers are written against this module
        from lazygt.special import handler_of

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
            self.stretch.params.append(a)
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
                self.stretch.params.extend(items)
                return kinds
        elif first is int or first is bool:
            return tuple(items)
        elif first is LazyTensor:
            serial = self.serial
            return tuple(
                [
                    t._cell.index
                    if type(t) is LazyTensor and t._view is None and t._cell.serial == serial
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
        """The number of a handle's current value in the stretch; it enters if need be."""
        cell = t._cell
        if cell.serial != self.serial:
            self._enter(cell)
        view = t._view
        if view is None:
            return cell.index
        if view.serial != self.serial or view.base != cell.index:
            views.replay(self, view, cell)
        return view.index

    def _enter(self, cell: Cell) -> None:
        """A value from before this stretch becomes an input of it."""
        if cell.recorder is not self:
            raise closed_error() if cell.recorder.closed else _other_session()
        stretch = self.stretch
        if cell.host is not None:
            cell.remote = self.shipper.upload(cell.host, cell.meta)
            cell.host = None
        if cell.blank:
            self._write_blank(cell)
            return
        if cell.remote is None:
            raise LazyGTError(
                "the value of this tensor was lost: the flush that shipped it was interrupted"
            )
        meta, stored = cell.meta, cell.remote.stored
        key = meta if stored is None else (meta, stored)
        step = stretch.step.children.get(key)
        if step is None:
            self.note_miss(stretch, meta, None, None)
            step = self.trie.add(Step(stretch.step, key, input=meta))
        try:
            stretch.inputs.append((weakref.ref(cell), cell.remote))
            stretch.step = step
        except BaseException:
            stretch.settle()
            raise
        cell.index, cell.serial = ~(step.inputs - 1), stretch.serial

    def _write_blank(self, cell: Cell) -> None:
        """The memory of ``torch.empty`` is needed after all: record the op that makes it."""
        meta = cell.meta
        f = facts(torch.ops.aten.empty_strided.default)
        key = (f, meta.shape, meta.stride, "dtype", meta.dtype)
        node = Node(f.name, (meta.shape, meta.stride),
                    (("dtype", meta.dtype), ("device", DEVICE)), (meta,))  # fmt: skip
        self.own(cell, self.internal(key, node, f))

    def own(self, cell: Cell, index: int) -> None:
        """The cell shows value ``index`` of the stretch from here on."""
        stretch = self.stretch
        stretch.owners[index] = weakref.ref(cell)
        cell.blank, cell.index, cell.serial, cell.remote = False, index, stretch.serial, None

    def internal(self, key: tuple[Any, ...], node: Node, f: OpFacts | None = None) -> int:
        """Advance by an op that the user did not write; returns its first result's number."""
        try:
            stretch = self.stretch
            step = stretch.step.children.get(key)
            if step is None:
                self.note_miss(stretch, key, f, None)
                step = self.trie.add(Step(stretch.step, key, node, facts=f))
            stretch.step = step
            stretch.marks.append(user_mark(1))
            stretch.owners.extend([None] * (step.values - step.first))
        except BaseException:
            self.stretch.settle()
            raise
        return step.first

    # -- results of a step that is not just one fresh tensor -------------------------------

    def _results(
        self,
        stretch: Stretch,
        step: Step,
        f: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        node = step.node
        assert node is not None
        stretch.owners.extend([None] * (step.values - step.first))
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
        """``out=`` gave a tensor another shape: it shows a cell of its own from here on."""
        cell = Cell(self, 0, 0, meta)
        rebind(t, meta, cell, None)

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """A handle with a cell of its own for a value of the stretch."""
        cell = Cell(self, self.serial, index, meta)
        self.stretch.owners[index] = weakref.ref(cell)
        return wrapper(meta, cell, None)

    def note_miss(self, stretch: Stretch, key: Any, f: OpFacts | None, mark: Mark | None) -> None:
        """A step is about to be added; only the first one of a stretch is of interest."""
        if self.first_miss is None:
            self.first_miss = stretch.step, key, f, mark or user_mark(1)

    # -- creation ------------------------------------------------------------------------

    def remote_tensor(self, meta: TensorMeta, remote: Any) -> LazyTensor:
        """A handle for a value that the workers hold already."""
        base = intern(meta.shape, meta.stride, meta.dtype)
        cell = Cell(self, 0, 0, base)
        cell.remote = remote
        return wrapper(base, cell, None)

    def blank(self, shape: Any, stride: Any, dtype: torch.dtype | None) -> LazyTensor:
        """``torch.empty``: memory that is only asked for when something is done with it."""
        sizes = tuple(int(size) for size in shape)
        if any(size < 0 for size in sizes):
            raise RuntimeError(f"Trying to create tensor with negative dimension: {list(sizes)}")
        steps = contiguous_stride(sizes) if stride is None else tuple(int(s) for s in stride)
        meta = intern(sizes, steps, dtype or torch.get_default_dtype())
        cell = Cell(self, 0, 0, meta)
        cell.blank = True
        return wrapper(meta, cell, None)

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
        cell = t._cell
        meta = cell.meta
        value = source.detach().resolve_conj().resolve_neg().to(meta.dtype)
        if tuple(value.shape) != meta.shape:
            value = value.expand(meta.shape)
        host = remote = None
        if meta.numel == 1 and not meta.dtype.is_complex:
            host = value.clone().reshape(meta.shape)
        else:
            remote = self.shipper.upload(value, meta)
        cell.blank, cell.host, cell.remote, cell.serial = False, host, remote, 0

    def alias(self, t: LazyTensor) -> LazyTensor:
        """Another handle for the same values, with a version counter of its own."""
        return wrapper(meta_of(t), t._cell, t._view)

    # -- sync points ---------------------------------------------------------------------

    def flush(self, reason: str) -> None:
        """Ship what is recorded, without waiting for it."""
        with self.lock:
            self.shipper.ship(self.stretch, reason, None, False)

    def fetch(self, t: LazyTensor, reason: str) -> torch.Tensor:
        """The values of a handle as a CPU tensor of its own: ship, run, wait."""
        with self.lock:
            cell, view = t._cell, t._view
            if self.closed or cell.recorder is not self:
                raise closed_error() if cell.recorder.closed else _other_session()
            if cell.host is not None and view is None:
                return cell.host.clone()
            if view is not None:
                # the view's own elements travel, not the whole cell
                t = torch.ops.aten.clone.default(t)
                cell = t._cell
            elif cell.serial != self.serial and cell.remote is None:
                self._enter(cell)  # blank memory, or a lost value
            value: torch.Tensor = self.shipper.ship(self.stretch, reason, cell, False)
            return value

    def ship_pending(self, t: LazyTensor, reason: str) -> None:
        """Flush if the value of ``t`` is still only recorded."""
        cell = t._cell
        if not self.closed and cell.serial == self.serial and cell.index >= 0:
            self.flush(reason)

    def before_backward(self) -> None:
        """Remember the user's line: it is the one that torch's backward ops are recorded at."""
        self._backward_mark = user_mark(1)
        self.backward_error = None

    def raise_backward_error(self) -> None:
        """Raise what a backward op or a hook could not raise in the midst of the pass."""
        error, self.backward_error = self.backward_error, None
        if error is not None:
            raise error from None

    def after_backward(self) -> None:
        """The sync point at the end of ``.backward()``."""
        self.shipper.after_backward()

    def next_stretch(self) -> None:
        """Begin anew at the root."""
        self.serial = next(_SERIALS)
        self.shipped_ops += len(self.stretch.marks)
        self.stretch = Stretch(self.serial, self.trie.root)
        self.first_miss = None
        self.forward_ops.clear()

    @property
    def ops(self) -> int:
        """Ops recorded since the session opened."""
        return self.shipped_ops + len(self.stretch.marks)

    def overflow(self) -> None:
        """Flush a stretch that has become too long, at a place that comes again.

        Cut at a fixed length, a loop would be cut at another point of its body every time, and
        each cut would be a new plan. So the first cut looks for the line that the stretch came
        by least often, but more than once (once an iteration, most likely), and from then on
        stretches end where that line comes round.
        """
        step = self.stretch.step
        if step.full:
            self.anchor = self.stretch.rarest_repeated()
        elif self.anchor != self.stretch.here() or not self.trie.half_full(
            step, self.stretch.bytes_alive
        ):
            return
        self.flush("stretch too long")

    @property
    def backward_mark(self) -> Mark | None:
        """Where the user called ``.backward()`` last."""
        return self._backward_mark

    def deep_copy(self, t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
        """See ``copies.deep_copy``."""
        return copies.deep_copy(self, t, memo)

    def keep_place(self, t: LazyTensor, before: Cell) -> None:
        """Lay a handle's values as the user has laid another cell's of that shape, unless something
        else was said of them."""
        cell = t._cell
        alike = t._view is None and cell.meta.shape == before.meta.shape
        here = before.recorder is self and not self.closed
        if before.placed is not None and cell.placed is None and alike and here:
            placing.keep(t, before.placed)

    def host_copy(self, t: LazyTensor) -> torch.Tensor:
        """See ``copies.host_copy``."""
        return copies.host_copy(self, t)


#: Shared by all sessions, so that no other session's cell looks like one of this stretch; 0 is
#: the serial of a cell that belongs to none.
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
