"""Hot path of recording: each op advances the trace by one step of the trie (``record.trie``).

Every op comes to ``Recorder.record``. On a hit the recorder looks the step up in a dictionary and
makes the handles of its results. On a miss (``miss``) the results' metas are inferred, and a wrong
shape or dtype raises torch's own exception on the user's line.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lazygt.graph.flags import Flags, read_flags
from lazygt.graph.mesh import Mesh
from lazygt.graph.meta import TensorMeta, typed_key
from lazygt.graph.node import DEVICE, Node
from lazygt.graph.ops import UNDECLARED_WRITES, OpFacts, facts, writing_facts
from lazygt.graph.source import CallSite, user_call_site
from lazygt.record import annotate, host_values, views
from lazygt.record.custom.definitions import CustomOps
from lazygt.record.handlers import Handler, data_dependent, draw_in_client, handler_of
from lazygt.record.infer import Inference
from lazygt.record.miss import NUMBERS, on_miss
from lazygt.record.rng import SessionGenerator
from lazygt.record.tensor import (
    DEVICE_0,
    STRIDED,
    Held,
    LazyTensor,
    State,
    Storage,
    graph_meta,
    is_lazy,
    make_wrapper,
    storage_of,
    view_of,
    wrapper,
)
from lazygt.record.trace import Trace, TracePoint, TraceSink, closed_error
from lazygt.record.trie import TraceTrie

#: Frames between the user's and ``user_call_site`` at least: _record, record, the dispatch.
_CALLER = 4
_ref = weakref.ref
#: Types of values that are in a step's key unchanged.
_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.layout, torch.memory_format})


class Recorder:
    """Recorder of ops into the current trace; it decides when to ship the trace.

    Args:
        worker_device: type of the device that the workers compute on.
        ship_code: True if code of custom ops may be sent to the workers.
        heeds_threads: workers use as many threads as the program has set in torch.
    """

    #: the session that submits the traces; it sets this attribute itself
    sink: TraceSink
    #: the recorder in C++, if the extension records
    native: Any = None

    def __init__(
        self,
        trie: TraceTrie,
        worker_device: str,
        ship_code: bool = True,
        heeds_threads: bool = False,
    ) -> None:
        self.definitions = CustomOps(worker_device, ship_code)
        self.trie = trie
        #: type of the device that the workers compute on
        self.worker_device = worker_device
        #: torch's flags under which the trace is recorded
        self.flags: Flags = ()
        self._heeds_threads = heeds_threads
        #: flags -> inference under them
        self._inferences: dict[Flags, Inference] = {(): Inference(worker_device)}
        self.lock = self._make_lock()
        self.generator = self._make_generator(worker_device)
        self.closed = self.has_numbers = False
        self.trace = self._make_trace()
        #: callback for storages whose value an upload replaced
        self.on_overwritten: Callable[[Storage, Held], None] | None = None
        #: ops of the traces before this one
        self.shipped_ops = 0
        #: id of an op -> its facts, its handler, and the keyword that the handler acts on
        self._known: dict[int, tuple[OpFacts, Handler | None, str | None]] = {}
        self._backward_call_site: CallSite | None = None
        #: error of a backward op or hook, raised when the backward pass has ended
        self.backward_error: BaseException | None = None
        #: the op before which over-long traces end, once one has
        self.anchor: TracePoint | None = None

    def _make_lock(self) -> threading.RLock:
        return threading.RLock()

    def _make_generator(self, device_type: str) -> SessionGenerator:
        return SessionGenerator(self, device_type)

    def _make_trace(self) -> Trace:
        return Trace(self, self.trie, self.inference)

    # -- the hot path --------------------------------------------------------------------

    def record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record one op; return the user's result.

        Raises:
            NoSession: the session is closed.
            Exception: torch's own, when the op can't take such arguments.
        """
        try:
            try:
                known = self._known.get(id(func))
                f, handler, keyword = known if known is not None else self._look_up(func)
                if self.closed:
                    raise closed_error()
                if handler is not None and (keyword is None or (kwargs and keyword in kwargs)):
                    result = handler(self, func, args, kwargs or {})
                    if result is not NotImplemented:
                        return result
                    if f.name in UNDECLARED_WRITES and args[UNDECLARED_WRITES[f.name][1]]:
                        f = writing_facts(func)
                if f.random:
                    if self.generator.is_elsewhere(args, kwargs):
                        return draw_in_client(self, f, args, kwargs or {})
                    args, kwargs = self.generator.before_draw(args, kwargs)
                return self._record(f, func, args, kwargs)
            except BaseException:
                self.trace.settle()
                raise
        except BaseException:
            self.trace.settle()  # again: Ctrl-C may have interrupted the first call
            raise

    def record_plain(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record an op in the ordinary way, bypassing its handler."""
        return self._record(facts(func), func, args, kwargs)

    def _record(
        self,
        f: OpFacts,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Look the op's step up by its key (a miss adds it), and return the user's results.

        An op whose tensors are all numbers of the client is computed there instead, unrecorded.
        """
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
                    result = host_values.compute(self, func, args, kwargs or {})
                    if result is not NotImplemented:
                        del trace.params[trace.step.params :]
                        return result
                add(trace.index_of(a))
            elif hoist == 1 and kind in NUMBERS:
                add(kind)
                trace.params.append(a)
            elif kind in _PLAIN:
                add(a)
            elif kind is list and f.pointwise and _begins_on_host(a):
                result = host_values.compute(self, func, args, kwargs or {})
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
        path_key = tuple(key)
        step = trace.step.children.get(path_key)
        if step is None:
            step = on_miss(trace, path_key, f, args, kwargs or {})
        trace.step = step
        trace.call_sites.append(user_call_site(_CALLER))
        make = step.make
        if make is not None:
            storage = Storage(self, serial, step.first, make)
            trace.storages.append(_ref(storage))
            if not make.plain:
                return wrapper(make, storage, None)
            # ``wrapper`` written out: a call less an op
            t = make_wrapper(LazyTensor, make.shape, None, None, None, make.dtype, STRIDED,
                             DEVICE_0)  # fmt: skip
            t.__dict__ = {"_storage": storage, "_view": None}
            return t
        if step.itself and args[0]._view is None:
            storage = args[0]._storage
            trace.storages.append(weakref.ref(storage))
            storage.index, storage.serial, storage.remote = step.first, serial, None
            return args[0]
        if f.one_view:
            return views.handle(trace, step, args)
        if step.node is not None and step.node.dynamic:
            return data_dependent(self, trace, f, args, kwargs or {})
        return views.results(trace, step, f, args, kwargs or {})

    def custom_op(
        self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a custom op; called by a handler, inside ``record``."""
        if f.random:
            args, kwargs = self.generator.before_draw(args, kwargs)
        return self._record(f, f.func, args, kwargs)

    def record_custom(self, f: OpFacts, args: tuple[Any, ...]) -> Any:
        """Record a custom op that torch's dispatcher has not dispatched, such as ``apply``."""
        try:
            if self.closed:
                raise closed_error()
            result = self.custom_op(f, args)
        except BaseException:
            self.trace.settle()
            raise
        if self.anchor is not None or self.trace.step.full:
            self.overflow()
        return result

    def _look_up(self, func: torch._ops.OpOverload) -> tuple[OpFacts, Handler | None, str | None]:
        """Return an op's facts, handler and the handler's keyword, and cache them."""
        f = facts(func)
        entry = self._known[id(func)] = f, *handler_of(f)
        return entry

    def _key(self, a: Any, hoist: int, f: OpFacts) -> Any:
        """Return one argument's element of a step's key; append run-time numbers to the trace."""
        kind = type(a)
        if kind is LazyTensor:
            return self.trace.index_of(a)
        if hoist == 1 and kind in NUMBERS:
            self.trace.params.append(a)
            return kind
        if kind in _PLAIN:
            return a
        if kind is float or kind is complex:
            return typed_key(a)
        if kind is list or kind is tuple:
            return self._list_key(a, hoist, f)
        if isinstance(a, torch.Tensor):
            return self.trace.index_of(a) if is_lazy(a) else self._upload_argument(a, f)
        if kind is torch.device:
            return DEVICE
        return a

    def _upload_argument(self, t: torch.Tensor, f: OpFacts) -> int:
        """Upload a CPU operand, note the upload for a miss, and return its value number."""
        lazy = host_values.upload_operand(self, t, f)
        index = self.trace.index_of(lazy)
        self.trace.uploaded[id(t)] = index, graph_meta(lazy)
        return index

    def _list_key(self, items: Any, hoist: int, f: OpFacts) -> tuple[Any, ...]:
        """Return a list's element of a step's key; by the schema its items are of one type."""
        first_type = type(items[0]) if items else None
        if hoist == 2:
            kinds = tuple(map(type, items))
            if NUMBERS.issuperset(kinds):
                self.trace.params.extend(items)
                return kinds
        elif first_type is int or first_type is bool:
            return tuple(items)
        elif first_type is LazyTensor:
            serial = self.trace.serial
            return tuple(
                [
                    t._storage.index
                    if type(t) is LazyTensor and t._view is None and t._storage.serial == serial
                    else self._key(t, 0, f)
                    for t in items
                ]
            )
        return tuple([self._key(item, 1 if hoist == 2 else 0, f) for item in items])

    # -- interface for storages and handles (``Owner``) --------------------------------------------

    @property
    def serial(self) -> int:
        """The number of the trace that is being recorded."""
        return self.trace.serial

    @property
    def mesh(self) -> Mesh:
        """The workers as a grid with named axes."""
        return self.sink.mesh

    def index_of(self, t: LazyTensor) -> int:
        """See ``Trace.index_of``."""
        return self.trace.index_of(t)

    def internal(self, key: tuple[Any, ...], node: Node, f: OpFacts | None = None) -> int:
        """See ``Trace.internal``."""
        return self.trace.internal(key, node, f)

    def own(self, storage: Storage, index: int) -> None:
        """See ``Trace.own``."""
        self.trace.own(storage, index)

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """See ``Trace.show``."""
        return self.trace.show(index, meta)

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> Any:
        """Copy a CPU tensor for the workers; return its remote value."""
        return self.sink.upload(source, meta)

    def overwritten(self, storage: Storage, before: Held) -> None:
        """Note that an upload, not an op of a trace, replaced a storage's full value.

        Args:
            before: the replaced value.
        """
        if self.on_overwritten is not None:
            self.on_overwritten(storage, before)

    def keep_sharding(self, t: LazyTensor, before: Storage) -> None:
        """Give a handle the placement of another storage of the same shape.

        A handle with a placement of its own retains that.
        """
        storage = storage_of(t)
        same_shape = view_of(t) is None and storage.meta.shape == before.meta.shape
        is_own = before.owner is self and not self.closed
        if before.placed is not None and storage.placed is None and same_shape and is_own:
            annotate.restore_sharding(t, before.placed)

    # -- sync points ---------------------------------------------------------------------

    def flush(self, reason: str) -> None:
        """Ship the recorded ops, without waiting for them."""
        with self.lock:
            self.sink.submit(self.trace, reason, None, False)

    def fetch(self, t: LazyTensor, reason: str, as_number: bool = False) -> Any:
        """Return a handle's values as a CPU tensor of its own; ships the trace and waits.

        Args:
            as_number: a Python number is enough for a single value.
        """
        with self.lock:
            storage = storage_of(t)
            self.trace.check(storage)
            if view_of(t) is not None:
                # only the view's elements are sent, not the full storage
                storage = storage_of(torch.ops.aten.clone.default(t))
            elif storage.host is not None:
                return storage.host.clone()
            elif storage.state in (State.BLANK, State.LOST):
                self.trace.enter(storage)
            return self.sink.submit(self.trace, reason, storage, False, as_number)

    def before_backward(self) -> None:
        """Note the user's line, which torch's backward ops are recorded at."""
        self._backward_call_site = user_call_site(1)
        self.backward_error = None

    def raise_backward_error(self) -> None:
        """Raise the error that a backward op or a hook stored during the pass."""
        error, self.backward_error = self.backward_error, None
        if error is not None:
            raise error from None

    def after_backward(self) -> None:
        """Make the sync point at the end of ``.backward()``."""
        self.sink.after_backward()

    @property
    def inference(self) -> Inference:
        """Inference of results under the current flags."""
        return self._inferences[self.flags]

    @property
    def ops_inferred(self) -> int:
        """Number of runs of meta kernels."""
        return sum(inference.runs for inference in self._inferences.values())

    def ship_before_flags_change(self) -> None:
        """Ship the ops that were recorded under the current flags."""
        with self.lock:
            if self.trace.step.depth and not self.closed:
                self.flush("torch flag changed")

    def update_flags(self) -> None:
        """Read torch's flags; if they changed, begin a new trace under them."""
        flags = read_flags(self._heeds_threads)
        if flags == self.flags or self.closed:
            return
        with self.lock:
            self.ship_before_flags_change()
            self.flags = flags
            self._inferences.setdefault(flags, Inference(self.worker_device))
            self.trie.set_root(flags)
            self.next_trace()

    def next_trace(self) -> None:
        """Begin a new trace at the root."""
        self.shipped_ops += self.trace.step.ops
        self.trace = self._make_trace()

    @property
    def ops(self) -> int:
        """Number of ops recorded since the session opened."""
        return self.shipped_ops + self.trace.step.ops

    def overflow(self) -> None:
        """Flush a trace that has become too long, at a program point that recurs.

        Flushed at a fixed length, a loop would be split at another point of its body every time,
        and each trace would need a new plan. So the first overflow selects the line that the trace
        passed least often, but more than once (most likely once an iteration), and later traces end
        at that line.
        """
        step = self.trace.step
        if step.full:
            self.anchor = self.trace.rarest_repeated()
        elif self.anchor != self.trace.current_point() or not self.trie.half_full(
            step, self.trace.bytes_alive
        ):
            return
        self.flush("trace too long")

    def call_site_of(self, index: int) -> CallSite | None:
        """Return the user's call of the op that computes value ``index`` of the trace.

        For an op of a backward pass that is the call of ``.backward()``.
        """
        return self.trace.call_site_of(index) or self._backward_call_site

    @property
    def backward_call_site(self) -> CallSite | None:
        """The user's last call of ``.backward()``."""
        return self._backward_call_site


def _begins_on_host(items: list[Any]) -> bool:
    """Return whether a list begins with a single number that is on the client."""
    first = items[0] if items else None
    return is_lazy(first) and first._storage.host is not None


def recorder_of(t: LazyTensor) -> Recorder:
    """Return the recorder of the session that a tensor belongs to."""
    owner = storage_of(t).owner
    assert isinstance(owner, Recorder)
    return owner
