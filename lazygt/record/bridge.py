"""Python side of the native recorder (``lazygt/native``).

The *trie* (a prefix tree of recorded programs, ``record.trie``) has a step for each recorded op.
C++ records hits: ops whose step the trie knows. A miss, and any op that is more than one step,
comes here: the Python recorder handles it, on the storages, views and steps that C++ shares.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import Any

import torch

from lazygt.errors import LazyGTError
from lazygt.graph.mesh import Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.ops import (
    MASKABLE,
    UNDECLARED_WRITES,
    OpFacts,
    facts,
    viewed_argument,
    writing_facts,
)
from lazygt.graph.source import CallSite, is_library
from lazygt.record import chains, handlers, host_values, views
from lazygt.record.infer import Inference
from lazygt.record.miss import on_miss
from lazygt.record.recorder import Recorder
from lazygt.record.rng import SessionGenerator
from lazygt.record.tensor import (
    NATIVE,
    LazyTensor,
    Owner,
    Storage,
    ViewChain,
    ViewOp,
    is_lazy,
    storage_of,
)
from lazygt.record.trace import Living, Trace, TraceOwner, TracePoint, new_serial
from lazygt.record.trie import TraceTrie, TrieNode


class RecordKind(IntEnum):
    """Kinds of ops by their path through the C++ recorder; ``facts.h`` has the same numbers."""

    PYTHON = 0  # by the Python recorder
    ORDINARY = 1  # as a step, in C++; so are the next five, with the exceptions that they name
    MASKED = 2  # not if an index is a mask
    DEVICE = 3  # not if another device is named
    BOTH_LAZY = 4  # not if one of the first two arguments is no lazy tensor (``copy_``)
    FLAGGED = 5  # with other facts if a flag is set, by which the op writes more (batch norm)
    RESHAPED = 6  # not if the shape stays the same (``view``): then as TWIN
    TWIN = 7  # no step: another handle for the same values (``detach``)
    ITSELF = 8  # no step: the first argument is returned
    ITEM = 9  # no step: a number of the client is read in C++, any other by Python
    AS_VIEW = 10  # as a view of that shape (``_reshape_alias``)
    DRAW = 11  # as a step, while the workers have the random stream
    BLANK = 12  # no step: ``torch.empty``


#: Handler of an op -> its kind; other handlers are Python's.
_KINDS: dict[Any, RecordKind] = {
    handlers.copy: RecordKind.BOTH_LAZY,
    handlers.empty: RecordKind.BLANK,
    handlers.empty_strided: RecordKind.BLANK,
    handlers.item: RecordKind.ITEM,
    handlers.same: RecordKind.ITSELF,
    handlers.to_copy: RecordKind.DEVICE,
    handlers.to_other_device: RecordKind.DEVICE,
    handlers.flagged: RecordKind.FLAGGED,
    views.same_view: RecordKind.TWIN,
    views.same_shape_view: RecordKind.RESHAPED,
}


def describe_op(func: Any) -> tuple[int, int, OpFacts, OpFacts | None]:
    """Return an op's description for C++.

    Returns:
        Its kind; the position of the argument that decides (for DEVICE and FLAGGED); its facts;
        and, for FLAGGED, its facts if that argument is set.
    """
    f = facts(func)
    handler, _ = handlers.handler_of(f)
    data_dependent = f.dynamic and handler is not handlers.item
    if data_dependent or (f.random and handler is not None):
        return RecordKind.PYTHON, 0, f, None
    if func is torch.ops.aten._reshape_alias.default:
        return RecordKind.AS_VIEW, 0, f, None
    if f.random:
        return RecordKind.DRAW, 0, f, None
    if handler is None:
        return (RecordKind.MASKED if f.name in MASKABLE else RecordKind.ORDINARY), 0, f, None
    kind = _KINDS.get(handler, RecordKind.PYTHON)
    if kind is RecordKind.DEVICE:
        names = [a.name for a in func._schema.arguments]
        return kind, names.index("device"), f, None
    if kind is RecordKind.FLAGGED:
        return kind, UNDECLARED_WRITES[f.name][1], f, writing_facts(func)
    return kind, 0, f, None


class NativeTrace(Trace):
    """Trace with its newest part in C++; Python reads that part on demand.

    Args:
        owner: owner of the storages of its values.
        native: the C++ recorder, which begins the trace at the trie's root.
    """

    __slots__ = ("_call_sites", "_ids", "_native", "_params", "_serial", "_step")

    # without the base's __init__: it sets attributes that C++ has, which are properties here
    def __init__(self, owner: Owner, trie: TraceTrie, inference: Inference, native: Any) -> None:
        self.owner, self.trie, self.inference = owner, trie, inference
        self._serial = new_serial()
        self.first_miss = None
        self.forward_ops = {}
        self.uploaded = {}
        self.split = 0
        self._repeat = None
        #: run-time numbers and call sites that were read from C++ so far
        self._params: list[Any] = []
        self._call_sites: Any = []
        #: ids of the inputs' blocks, once the trace has ended
        self._ids: Collection[int] = ()
        #: the step that was read from C++ last
        self._step: TrieNode = trie.root
        #: the C++ recorder; None once the trace has ended
        self._native = native
        native.begin(self._serial, trie.root, self)

    def seal(self) -> None:
        """End the trace: copy its data from C++, which then begins another one."""
        self._step, self._serial = self.step, self.serial
        self._ids, params, sites, self.shown = self._native.end()
        self._native = None
        # in most traces Python has read nothing before
        self._params = [*self._params, *params] if self._params else params
        self._call_sites = [*self._call_sites, *sites] if self._call_sites else sites

    @property
    def untouched(self) -> bool:
        """True if Python has recorded nothing in the trace, so that C++ may replace it."""
        noted = self._params or self._call_sites or self.forward_ops or self.split
        return not noted and self.first_miss is None and self._repeat is None

    # -- state shared with C++ ---------------------------------------------------------------------

    @property
    def serial(self) -> int:  # type: ignore[override]
        """The trace's number."""
        serial: int = self._serial if self._native is None else self._native.serial
        return serial

    @property
    def step(self) -> TrieNode:
        """The step of the trie that the trace has reached."""
        if self._native is not None:
            self._step = self._native.step
        return self._step

    @step.setter
    def step(self, step: TrieNode) -> None:
        self._native.step = step

    @property
    def params(self) -> list[Any]:  # type: ignore[override]
        """The run-time numbers of the trace."""
        if self._native is not None:
            self._params += self._native.take_params()
        return self._params

    @property
    def call_sites(self) -> Any:  # type: ignore[override]
        """The user's frame of each op, by op number: a list, or C++'s own after the end."""
        if self._native is not None:
            self._call_sites += self._native.take_marks()
        return self._call_sites

    # -- values ------------------------------------------------------------------------------------

    def index_of(self, t: LazyTensor) -> int:
        """Return the value number of a handle; a value of an earlier trace becomes an input."""
        number: int = self._native.index_of(t)
        return number

    def enter(self, storage: Storage) -> None:
        """Make the value of a storage, from before this trace, an input of it."""
        self.make_enterable(storage)
        self._native.enter(storage)

    def own(self, storage: Storage, index: int) -> None:
        """Set the storage's current value to value ``index`` of the trace."""
        self._native.own(storage, index)

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """Return a handle with a new storage for value ``index``."""
        t: LazyTensor = self._native.show(index, meta)
        return t

    def show_views(self, source: LazyTensor) -> list[LazyTensor]:
        """Return a handle for each view of ``source`` that the current step makes."""
        handles: list[LazyTensor] = self._native.show_views(source)
        return handles

    # -- end of the trace --------------------------------------------------------------------------

    def alive(self) -> Living:
        """Return the values of the trace that live handles still show."""
        living: Living = self._native.alive()
        return living

    def release_inputs(self) -> Collection[int]:
        """Return the ids of the ended trace's inputs, which C++ has released."""
        return self._ids

    def bytes_alive(self) -> int:
        """Return the bytes of this trace's values that handles, autograd's included, still show."""
        return sum(storage.meta.nbytes for storage in self._native.made())

    def rebind(self, plan: Any, living: Any, values: Any, backward: CallSite | None) -> None:
        """Bind the storages that are alive to the outputs of the trace's run."""
        if type(values) is list:  # in blocks
            super().rebind(plan, living, values, backward)
            return
        sites = self._call_sites
        if type(sites) is list:
            sites = NATIVE.CallSites(sites)
        plan.shown.rebind(living, values, sites, backward)

    # -- steps -------------------------------------------------------------------------------------

    def reach(self, step: TrieNode) -> None:
        """Advance to the step of an op."""
        self._native.advance(step)

    def reserve(self, step: TrieNode) -> None:
        """Reserve capacity for the storages of a step's values."""
        self._native.reserve()

    @property
    def room(self) -> int:
        """Number of values that storages are reserved for."""
        room: int = self._native.room
        return room

    @property
    def entered(self) -> list[Any]:
        """The workers' references of the trace's inputs, until the trace ends."""
        entered: list[Any] = self._native.entered
        return entered

    def settle(self) -> None:
        """Roll the trace's lists back to the step that was reached, after an error."""
        if self._native is not None:
            self._native.settle()

    # -- callbacks of C++ on a miss ----------------------------------------------------------------

    def view_again(
        self, view: ViewChain, op: ViewOp, number: int, index: int, meta: TensorMeta
    ) -> None:
        """Replay one view op on value ``index``, at position ``number``; reach its step."""
        try:
            self.reach(self.step_again(view, op, number, index, meta))
        except BaseException:
            self.settle()
            raise

    @property
    def last_number(self) -> int:
        """The last run-time number of the trace: the position of a view."""
        number: int = self.params[-1]
        return number

    def write_back(self, t: LazyTensor, index: int) -> None:
        """Update a view's base after a write to the view; ``index`` is the written value."""
        views.write(self, t, index)


class NativeGenerator(SessionGenerator):
    """Generator that lets C++ record draws as ordinary steps while workers have the state."""

    def __init__(self, owner: TraceOwner, device_type: str, native: Any) -> None:
        self._native = native
        super().__init__(owner, device_type)

    @property
    def holds(self) -> bool:
        """True if the workers have the state that the next draw starts from."""
        holds: bool = self._native.draws
        return holds

    @holds.setter
    def holds(self, holds: bool) -> None:
        self._native.draws = holds


class NativeRecorder(Recorder):
    """Recorder with hits recorded in C++."""

    trace: NativeTrace

    def _make_lock(self) -> Any:
        """Create the C++ recorder; return its lock."""
        self.native = NATIVE.Recorder(self)
        self._anchor: TracePoint | None = None
        return self.native.lock

    def _make_generator(self, device_type: str) -> SessionGenerator:
        recorder: Recorder = self
        return NativeGenerator(recorder, device_type, self.native)

    def _make_trace(self) -> Trace:
        return NativeTrace(self, self.trie, self.inference, self.native)

    def next_trace(self) -> None:
        """Begin a new trace at the root."""
        self.shipped_ops += self.trace.step.ops
        self.trace.seal()
        self.trace = NativeTrace(self, self.trie, self.inference, self.native)

    def __del__(self) -> None:
        self.native.leave()

    @property
    def closed(self) -> bool:
        """True if the session is closed."""
        closed: bool = self.native.closed
        return closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        self.native.closed = closed

    @property
    def anchor(self) -> TracePoint | None:
        """The op before which over-long traces end, once one has."""
        return self._anchor

    @anchor.setter
    def anchor(self, anchor: TracePoint | None) -> None:
        self._anchor = anchor
        call_site = None if anchor is None else anchor[1]
        self.native.anchor = 0 if call_site is None else call_site[1]
        self.native.anchored = anchor is not None

    # -- callbacks of C++ --------------------------------------------------------------------------

    def step_for(self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrieNode:
        """Return the step of an op that missed in C++; its run-time numbers are already noted.

        Raises:
            LazyGTError: C++ noted other numbers than Python would.
        """
        params = self.trace.params
        noted = params[self.trace.step.params :]
        before = len(params)
        key = self._path_key(f, args, kwargs)
        recomputed = params[before:]
        del params[before:]
        if [*map(type, recomputed)] != [*map(type, noted)]:
            raise LazyGTError(f"{f.name}: C++ noted the numbers {noted}, Python {recomputed}")
        step = self.trace.step.children.get(key)
        return on_miss(self.trace, key, f, args, kwargs) if step is None else step

    def results(self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the user's results of an op at the trace's current step."""
        trace = self.trace
        step = trace.step
        if step.make is not None:
            return trace.show(step.first, step.make)
        assert step.node is not None
        if step.node.dynamic:
            recorder: Recorder = self
            return handlers.data_dependent(recorder, trace, f, args, kwargs)
        if f.one_view:
            return trace.show_views(args[viewed_argument(f)])[0]
        if f.outputs == ("vl",):
            return trace.show_views(args[viewed_argument(f)])
        return views.results(trace, step, f, args, kwargs)

    def _record(
        self, f: OpFacts, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record an op in Python: the cold path of ``Recorder.record``."""
        keywords = kwargs or {}
        if f.pointwise and self._has_host_number(args):
            result = host_values.compute(self, func, args, keywords)
            if result is not NotImplemented:
                return result
        key = self._path_key(f, args, keywords)
        step = self.trace.step.children.get(key)
        if step is None:
            step = on_miss(self.trace, key, f, args, keywords)
        self.trace.reach(step)
        return self.results(f, args, keywords)

    def _has_host_number(self, args: tuple[Any, ...]) -> bool:
        """Return whether an argument is a number of the client, or a list that begins with one."""
        for a in args:
            first = a[0] if type(a) is list and a else a
            if is_lazy(first):
                storage = storage_of(first)
                if storage.host is not None and storage.serial != self.trace.serial:
                    return True
        return False

    def _path_key(
        self, f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Return an op's key in the trie, and append its run-time numbers to the trace's."""
        key: list[Any] = [f]
        key += [self._key(a, hoist, f) for a, hoist in zip(args, f.hoist, strict=False)]
        for name, a in kwargs.items():
            key += (name, self._key(a, f.hoist_named.get(name, 0), f))
        return tuple(key)


class _ClosedOwner:
    """Owner of storages after their recorder is gone."""

    closed = True
    serial = 0


def connect() -> None:
    """Register Python's callbacks in C++; called once, when the device is registered."""
    NATIVE.connect(describe_op, chains.view_ops, is_library, _ClosedOwner())


def shown_of(
    numbers: tuple[int, ...], producers: tuple[int, ...], shardings: tuple[Sharding | None, ...]
) -> Any:
    """Return a plan's outputs in C++'s form, from which handles are bound to a run's results.

    Args:
        numbers: the outputs' value numbers in the trace.
        producers: for each output, the number of the recorded op that computes it.
    """
    return None if NATIVE is None else NATIVE.Outputs(numbers, producers, shardings)


def new_recorder(
    trie: TraceTrie, worker_device: str, ship_code: bool, heeds_threads: bool
) -> Recorder:
    """Return a new recorder for a session.

    Args:
        heeds_threads: workers use as many threads as the program has set in torch.
    """
    recorder_class = Recorder if NATIVE is None else NativeRecorder
    return recorder_class(trie, worker_device, ship_code, heeds_threads)
