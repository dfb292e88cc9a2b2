"""Trace: the ops recorded since the last flush, with their values and inputs.

A trace is a path through a *trie* (a prefix tree, see ``record.trie``): its ops and inputs are
*steps*, nodes of the trie that it shares with equal earlier traces.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from lazygt.errors import LazyGTError, NoSession
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.meta import TensorMeta
from lazygt.graph.node import DEVICE, Node, Param
from lazygt.graph.ops import OpFacts, facts, returned_write
from lazygt.graph.source import CallSite, user_call_site
from lazygt.record import chains
from lazygt.record.ahead import prefetch_steps
from lazygt.record.infer import Inference
from lazygt.record.repeats import Repeat
from lazygt.record.tensor import (
    NATIVE,
    LazyTensor,
    Owner,
    Storage,
    ViewChain,
    ViewOp,
    new_storage,
    storage_of,
    view_of,
    wrapper,
)
from lazygt.record.trie import TraceTrie, TrieNode, producers

if TYPE_CHECKING:
    from lazygt.runtime.values import RemoteValue

#: (op, the user's frame that it was recorded at).
TracePoint = tuple[OpFacts | None, CallSite | None]
#: Serials of traces, shared by all sessions, so that no other session's storage looks like one of
#: this trace; 0 is the serial of a storage that belongs to none.
_SERIALS = itertools.count(1)
_PID = os.getpid()


def new_serial() -> int:
    """Return the number of a new trace."""
    serial: int = next(_SERIALS) if NATIVE is None else NATIVE.new_serial()
    return serial


class TraceSink(Protocol):
    """Interface of the session, as far as the recorder needs it."""

    mesh: Mesh

    def submit(
        self, trace: Trace, reason: str, fetch: Any, ask: bool, as_number: bool = False
    ) -> Any:
        """Run a trace.

        Args:
            reason: reason of the flush, for reports.
            fetch: the storage whose value is returned; None: none is.
            ask: the last op is data-dependent, and its results are requested.
            as_number: a Python number is enough for a fetched value.

        Returns:
            The fetched value, or the reply with the requested results; waits for it. Else None.
        """

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Copy a CPU tensor for the workers.

        The values are copied before this returns, so the caller may overwrite them; the copy is
        sent with the next run.

        Args:
            source: the CPU tensor.
            meta: layout and dtype of the value on the workers.

        Returns:
            The handle of the value.
        """

    def after_backward(self) -> None:
        """Make the sync point at the end of ``.backward()``."""


class Living(NamedTuple):
    """Storages that still show a value of a trace, with the numbers of these values."""

    storages: list[Storage]
    numbers: tuple[int, ...]


class Shown:
    """Weak references to the storages of an ended trace's values and inputs, by number."""

    def __init__(
        self,
        values: Sequence[weakref.ref[Storage] | None],
        inputs: Sequence[weakref.ref[Storage]],
    ) -> None:
        self._values, self._inputs = values, inputs

    @property
    def values(self) -> list[Storage | None]:
        """Storage of each value; None for a dead or missing one."""
        return [None if reference is None else reference() for reference in self._values]

    @property
    def inputs(self) -> list[Storage | None]:
        """Storage of each input; None for a dead one."""
        return [reference() for reference in self._inputs]


class TraceOwner(Owner, Protocol):
    """Interface of a recorder, as far as the modules that record by it need it."""

    trace: Trace
    sink: TraceSink


class Trace:
    """Ops recorded since the last flush.

    Attributes:
        owner: owner of the storages of its values.
        step: the step of the trie that it has reached.
        storages: value number -> the storage that shows it (None: nothing of the user's ever does).
        inputs: (storage, remote value) of each input; input k is value number ~k, a negative one.
        params: its run-time numbers.
        call_sites: the user's frame of each op, by op number.
        first_miss: (step, key, facts, call site) of the first step that the trie did not know.
        forward_ops: autograd's sequence number -> op.
        uploaded: id of a CPU tensor that an op was called with -> number and meta of its upload.
        split: number of ops in excess, since some of the user's ops are recorded as several.
        shown: the storages that have shown its values, once it has ended.
    """

    __slots__ = ("_repeat", "call_sites", "first_miss", "forward_ops", "inference", "inputs",
                 "owner", "params", "serial", "shown", "split", "step", "storages",
                 "trie", "uploaded")  # fmt: skip

    def __init__(self, owner: Owner, trie: TraceTrie, inference: Inference) -> None:
        self.owner, self.trie, self.inference = owner, trie, inference
        self.serial = new_serial()
        self.step = trie.root
        self.storages: list[weakref.ref[Storage] | None] = []
        self.inputs: list[tuple[weakref.ref[Storage], Any]] = []
        self.params: list[Any] = []
        self.call_sites: list[CallSite | None] = []
        self.first_miss: tuple[TrieNode, Any, OpFacts | None, CallSite | None] | None = None
        self.forward_ops: dict[int, int] = {}
        self.uploaded: dict[int, tuple[int, TensorMeta]] = {}
        self.split = 0
        self.shown: Shown
        self._repeat: Repeat | None = None

    @property
    def repeat(self) -> Repeat:
        """The earlier trace that this one repeats in other sizes."""
        if self._repeat is None:
            self._repeat = Repeat(self.trie)
        return self._repeat

    @property
    def untouched(self) -> bool:
        """True if Python has recorded nothing in the trace, so that C++ may replace it."""
        return False

    # -- values --------------------------------------------------------------------------

    def index_of(self, t: LazyTensor) -> int:
        """Return the value number of a handle; a value of an earlier trace becomes an input."""
        storage = storage_of(t)
        if storage.serial != self.serial:
            self.enter(storage)
        view = view_of(t)
        if view is None:
            return storage.index
        if view.serial != self.serial or view.base != storage.index:
            self._replay(view, storage)
        return view.index

    def enter(self, storage: Storage) -> None:
        """Make the value of a storage, from before this trace, an input of it."""
        self.make_enterable(storage)
        if storage.blank:
            self.write_blank(storage)
            return
        assert storage.remote is not None
        step = self.input_step(storage.meta, storage.remote.sharding)
        try:
            self.inputs.append((weakref.ref(storage), storage.remote))
            self.step = step
        except BaseException:
            self.settle()
            raise
        storage.index, storage.serial = ~(step.inputs - 1), self.serial

    def make_enterable(self, storage: Storage) -> None:
        """Ensure that a storage's value is on the workers or blank; raise if it was lost."""
        self.check(storage)
        if storage.host is not None:
            storage.set_remote(self.owner.upload(storage.host, storage.meta))
        if not storage.blank and storage.remote is None:
            raise LazyGTError(
                "the value of this tensor was lost: the flush that shipped it was interrupted"
            )

    def input_step(self, meta: TensorMeta, sharding: Sharding | None) -> TrieNode:
        """Return the step of an input with this meta and sharding; add it on a miss."""
        key = meta if sharding is None else (meta, sharding)
        step = self.step.children.get(key)
        if step is None:
            self.note_miss(meta, None, None)
            step = TrieNode(self.step, key, input=meta)
            self.repeat.follow(step, self.repeat.input(self.step, key, meta))
            self.trie.add(step)
            prefetch_steps(self)
        return step

    def check(self, storage: Storage) -> None:
        """Raise NoSession for a storage of another session, or of a closed one."""
        owner = storage.owner
        if owner is not self.owner or owner.closed:
            raise closed_error() if owner.closed else _other_session()

    def write_blank(self, storage: Storage) -> None:
        """Record the op that allocates the memory of ``torch.empty``, at its first use."""
        meta = storage.meta
        f = facts(torch.ops.aten.empty_strided.default)
        key = (f, meta.shape, meta.stride, "dtype", meta.dtype)
        node = Node(f.name, (meta.shape, meta.stride),
                    (("dtype", meta.dtype), ("device", DEVICE)), (meta,))  # fmt: skip
        self.own(storage, self.internal(key, node, f))

    def _replay(self, view: ViewChain, storage: Storage) -> None:
        """Replay a view chain, after a write to its storage or in a new trace."""
        base = index = storage.index
        meta, first = storage.meta, len(self.params)
        numbers, new_steps = iter(view.numbers), []
        try:
            for op in view.ops:
                number = 0 if op.pitch is None else next(numbers)
                step = self.step_again(view, op, number, index, meta)
                self.reach(step)
                assert step.node is not None
                index, result = step.first + op.which, step.node.fresh[op.which]
                assert result is not None
                meta = result
                new_steps.append(step)
        except BaseException:
            self.settle()
            raise
        if len(self.params) > first:
            chains.update_chain(self, view, new_steps, first)
        view.index, view.base, view.serial = index, base, self.serial

    def step_again(
        self, view: ViewChain, op: ViewOp, number: int, index: int, meta: TensorMeta
    ) -> TrieNode:
        """Return the step of a chain's op, replayed on value ``index``.

        Args:
            number: its position, if that is a run-time number; it is appended to the trace's.
            meta: meta of the value.
        """
        slot = op.position + 1
        key = (*op.key[:slot], index, *op.key[slot + 1 :])
        if op.pitch is not None:
            self.params.append(number)
        step = self.step.children.get(key)
        return chains.missing_step(self, view, op, key, index, meta) if step is None else step

    def own(self, storage: Storage, index: int) -> None:
        """Set the storage's current value to value ``index`` of the trace: an op has written it."""
        self.storages[index] = weakref.ref(storage)
        storage.set_recorded(self.serial, index)

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """Return a handle with a new storage for value ``index``."""
        storage = new_storage(self.owner, self.serial, index, meta)
        self.storages[index] = weakref.ref(storage)
        return wrapper(meta, storage, None)

    # -- steps ---------------------------------------------------------------------------

    def internal(self, key: tuple[Any, ...], node: Node, f: OpFacts | None = None) -> int:
        """Record an op that the user did not write; return its first result's number.

        Args:
            key: key of its step.
            node: the op, for a step that the trie does not know.
        """
        try:
            step = self.step.children.get(key)
            if step is None:
                self.note_miss(key, f, None)
                step = TrieNode(self.step, key, node, facts=f)
                self.repeat.follow(step, self.repeat.internal(self.step, key, node))
                self.trie.add(step)
                prefetch_steps(self)
            self.reach(step)
        except BaseException:
            self.settle()
            raise
        return step.first

    def reach(self, step: TrieNode) -> None:
        """Advance to the step of an op that the user did not write."""
        self.step = step
        self.call_sites.append(user_call_site(2))
        self.reserve(step)

    def reserve(self, step: TrieNode) -> None:
        """Reserve capacity for the storages of a step's values."""
        self.storages.extend([None] * (step.values - len(self.storages)))

    def hoist(self, number: Any) -> Param:
        """Append a run-time number to the trace, which the next step has to use; return its Param.

        It is hoisted out of the plan: a number that changes from run to run needs no new plan.
        """
        self.params.append(number)
        return Param(len(self.params) - 1)

    def note_miss(self, key: Any, f: OpFacts | None, call_site: CallSite | None) -> None:
        """Note that a step is about to be added; only the trace's first miss is stored."""
        if self.first_miss is None:
            self.first_miss = self.step, key, f, call_site or user_call_site(1)

    def settle(self) -> None:
        """Roll the lists back to the step that was reached, after an exception in an op.

        Numbers and inputs are noted before a step is reached, call sites and storages after it, so
        the step always determines the trace's entries.
        """
        step = self.step
        del self.params[step.params :]
        del self.inputs[step.inputs :]
        self.call_sites.extend([user_call_site(1)] * (step.ops - len(self.call_sites)))
        self.reserve(step)

    @property
    def room(self) -> int:
        """Number of values that storages are reserved for."""
        return len(self.storages)

    @property
    def entered(self) -> list[Any]:
        """The workers' references of the trace's inputs."""
        return [remote for _, remote in self.inputs]

    # -- end of the trace --------------------------------------------------------------------------

    def alive(self) -> Living:
        """Return the values of the trace that live handles still show."""
        storages, indices = [], []
        serial = self.serial
        for index, reference in enumerate(self.storages):
            storage = reference() if reference is not None else None
            if storage is not None and storage.index == index and storage.serial == serial:
                storages.append(storage)
                indices.append(index)
        return Living(storages, tuple(indices))

    def plan(self, outputs: tuple[int, ...]) -> Any | None:
        """Return a cached plan of a trace that ends here and yields ``outputs``, or None.

        A plan with more outputs is accepted: the others are freed with the next message. Python's
        garbage collector decides when a value dies, and this must not cost a miss.
        """
        step = self.step
        plan = step.plans.get(outputs)
        if plan is None:
            needed = set(outputs)
            plan = next(
                (
                    candidate
                    for available, candidate in step.plans.items()
                    if needed.issubset(available)
                ),
                None,
            )
        if plan is not None:
            self.trie.touch(id(plan))
        return plan

    def release_inputs(self) -> Collection[int]:
        """Drop the ended trace's references to its inputs; an input without others is freed.

        Returns:
            The ids of all their blocks.
        """
        released, self.inputs = self.inputs, []
        self.shown = Shown(self.storages, [storage for storage, _ in released])
        for storage, _ in released:
            entered = storage()
            if entered is not None and entered.serial == self.serial and entered.index < 0:
                entered.serial = 0
        ids: list[int] = []
        for _, remote in released:
            ids.append(remote.id)
            ids += [block.id for block in remote.rest]
        return ids

    def rebind(
        self, plan: Any, living: Living, values: Iterable[Any], backward: CallSite | None
    ) -> None:
        """Bind the storages that are alive to the outputs of the trace's run.

        Args:
            plan: the cached plan of the run.
            living: the storages, and their values' numbers in the trace.
            values: the plan's outputs.
            backward: the user's line for ops that have none of their own.
        """
        outputs = list(values)
        for storage, index in zip(living.storages, living.numbers, strict=True):
            position = plan.positions[index]
            value = outputs[position]
            value.sharding = plan.shardings[position]
            value.call_site = self.call_sites[plan.producers[position]] or backward
            storage.set_remote(value)

    def bytes_alive(self) -> int:
        """Return the bytes of this trace's values that handles, autograd's included, still show."""
        entered = {id(storage()) for storage, _ in self.inputs}
        storages = self.alive().storages
        return sum(storage.meta.nbytes for storage in storages if id(storage) not in entered)

    def call_site_of(self, index: int) -> CallSite | None:
        """Return the user's call of the op that makes a value; None for an input or a backward."""
        if index < 0:
            return None
        return self.call_sites[producers(self.step.path())[index]]

    def current_point(self) -> TracePoint:
        """Return the program point of the op recorded last: its facts and the user's line."""
        return self.step.facts, self.call_sites[-1] if self.call_sites else None

    def rarest_repeated(self) -> TracePoint | None:
        """Return the program point that the trace passed least often, but more than once."""
        ops = [step for step in self.step.path() if step.node is not None]
        seen = Counter(
            (step.facts, call_site) for step, call_site in zip(ops, self.call_sites, strict=True)
        )
        repeated = [point for point, count in seen.items() if count > 1]
        return min(repeated, key=lambda point: seen[point], default=None)


def written_tensors(f: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors an op writes, in schema order: lists flattened, None skipped."""
    written = [args[position] for position in f.writes if position < len(args)]
    written += [kwargs[name] for name in f.writes_named if name in kwargs]
    flat: list[Any] = []
    for a in written:
        if isinstance(a, (list, tuple)):
            flat.extend(a)
        else:
            flat.append(a)
    return [t for t in flat if t is not None]


def user_results(
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fresh: list[Any],
    ints: tuple[int, ...] = (),
) -> Any:
    """Return an op's user-level result from its parts.

    Args:
        fresh: handles of the new results, in order.
        ints: ints that the op returns.
    """
    if f.outputs == ("fl",):
        return fresh
    results: list[Any] = []
    numbers = iter(ints)
    single = sum(kind != "fl" for kind in f.outputs)
    for position, kind in enumerate(f.outputs):
        if kind[0] == "w":
            argument = returned_write(f, position)
            results.append(kwargs[argument] if isinstance(argument, str) else args[argument])
        elif kind == "i":
            results.append(next(numbers))
        elif kind == "fl":
            length = len(fresh) - (single - len(results))
            results.append(fresh[:length])
            fresh = fresh[length:]
        else:
            results.append(fresh.pop(0))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def closed_error() -> NoSession:
    """Return the error for a tensor of a session that has ended, or of another process."""
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
    """Return the error for a tensor of another open session."""
    return NoSession(
        "this lazygt tensor belongs to another session than the one that is open; move it with "
        ".cpu() there and .to('lazygt') here"
    )
