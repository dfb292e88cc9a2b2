"""The hot path: the stream of ops, step by step through the trie; on a miss, a new step.

``Recorder.record`` is what every op comes to. On a hit it does a dictionary look-up and makes the
wrappers; on a miss it infers the results' metas (``infer``), where a wrong shape or dtype raises
torch's own exception on the user's line.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from lazygt import copies, dynamic, hostnumbers, views
from lazygt.errors import LazyGTError, NoSession
from lazygt.generator import SessionGenerator
from lazygt.graph.meta import TensorMeta, contiguous_stride, intern
from lazygt.graph.node import DEVICE, Arg, Node, Param, Ref
from lazygt.graph.ops import MASKABLE, OpFacts, facts, returned_write, writing_facts
from lazygt.graph.source import Mark, user_mark
from lazygt.infer import Inference
from lazygt.stretch import Shipper, Stretch, written_tensors
from lazygt.tensor import Cell, LazyTensor, rebind, wrapper
from lazygt.trie import Step, Trie

_NUMBERS = frozenset({int, float, bool, complex})
_PLAIN = frozenset({int, bool, float, str, complex, type(None), torch.dtype, torch.layout,
                    torch.memory_format})  # fmt: skip


class Recorder:
    """Records ops into the current stretch, and says when it has to be shipped."""

    def __init__(self, shipper: Shipper, trie: Trie, worker_device: str) -> None:
        self.shipper = shipper
        self.trie = trie
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
        self._known: dict[int, tuple[OpFacts, Callable[..., Any] | None]] = {}
        self._forward: dict[int, int] = {}
        self._backward_mark: Mark | None = None
        self.backward_error: BaseException | None = None
        #: the op before which over-long stretches end, once one has
        self.anchor: tuple[OpFacts | None, Mark | None] | None = None

    # -- the hot path --------------------------------------------------------------------

    def record(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
    ) -> Any:
        """Record one op; returns what the user sees.

        Raises:
            NoSession: after the session closed.
            Exception: torch's own, when the op can't take such arguments.
        """
        known = self._known.get(id(func))
        f, special = known if known is not None else self._learn(func)
        if self.closed:
            raise closed_error()
        if special is not None:
            result = special(self, func, args, kwargs or {})
            if result is not NotImplemented:
                return result
            if f.name in _BATCH_NORMS and args[_BATCH_NORMS[f.name]]:
                f = writing_facts(func)
        if f.random and not self.generator.started:
            self.generator.start()
        stretch = self.stretch
        params = stretch.params
        before = len(params)
        serial = stretch.serial
        key: list[Any] = [f]
        add = key.append
        try:
            for a, hoist in zip(args, f.hoist):  # noqa: B905 - strict= costs 0.1 us an op
                kind = type(a)
                if kind is LazyTensor:
                    cell = a._cell
                    if cell.serial == serial and a._view is None:
                        add(cell.index)
                        continue
                    if cell.host is not None and f.pointwise:
                        result = hostnumbers.compute(self, func, args, kwargs or {})
                        if result is not NotImplemented:
                            del params[before:]
                            return result
                    add(self.index_of(a))
                elif hoist == 1 and kind in _NUMBERS:
                    add(kind)
                    params.append(a)
                elif kind in _PLAIN:
                    add(a)
                elif kind is list and f.pointwise and hostnumbers.is_host(a):
                    result = hostnumbers.compute(self, func, args, kwargs or {})
                    if result is not NotImplemented:
                        del params[before:]
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
                step = self._miss(stretch, found, f, args, kwargs or {}, before)
        except BaseException:
            del params[before:]
            raise
        stretch.step = step
        stretch.marks.append(user_mark(1))
        make = step.make
        if make is not None:
            index = stretch.count
            stretch.count = index + 1
            cell = Cell(self, serial, index, make)
            stretch.owners.append(weakref.ref(cell))
            return wrapper(make, cell, None)
        if step.itself and args[0]._view is None:
            target = args[0]
            cell = target._cell
            index = stretch.count
            stretch.count = index + 1
            stretch.owners.append(weakref.ref(cell))
            cell.serial, cell.index, cell.remote = serial, index, None
            return target
        if f.one_view:
            return views.handle(self, step, args, found)
        if step.node is not None and step.node.dynamic:
            return dynamic.ask(self, stretch, f, args, kwargs or {})
        return self._results(stretch, step, f, args, kwargs or {}, found)

    def _learn(self, func: torch._ops.OpOverload) -> tuple[OpFacts, Callable[..., Any] | None]:
        # why: special's handlers are written against this module
        from lazygt.special import handler_of

        f = facts(func)
        self._known[id(func)] = f, handler_of(f)
        return self._known[id(func)]

    def _key(self, a: Any, hoist: int, f: OpFacts) -> Any:
        """One argument as it stands in a step's key."""
        kind = type(a)
        if kind is LazyTensor:
            return self.index_of(a)
        if hoist == 1 and kind in _NUMBERS:
            self.stretch.params.append(a)
            return kind
        if kind in _PLAIN:
            return a
        if kind is list or kind is tuple:
            return tuple(self._key(item, 1 if hoist == 2 else 0, f) for item in a)
        if isinstance(a, torch.Tensor):
            return self.index_of(self.foreign(a, f))
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

    def foreign(self, t: torch.Tensor, f: OpFacts) -> LazyTensor:
        """A CPU tensor among lazy ones: torch lets 0-dim ones mix, and CPU indices."""
        if t.device.type == "cpu" and (t.dim() == 0 or f.name in _CPU_INDICES):
            return self.to_lazy(t)
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"lazygt:0 and {t.device}! {f.name} got a {TensorMeta.of(t)} on {t.device}; "
            f"move it with .to('lazygt')"
        )

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
        step = stretch.step.children.get(cell.meta)
        if step is None:
            self._note_miss(stretch, cell.meta, None, None)
            step = self.trie.add(Step(stretch.step, cell.meta, input=cell.meta))
        stretch.step = step
        cell.serial, cell.index = stretch.serial, ~len(stretch.inputs)
        stretch.inputs.append((weakref.ref(cell), cell.remote))

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
        cell.serial, cell.index = stretch.serial, index
        cell.remote = None
        cell.blank = False
        stretch.owners[index] = weakref.ref(cell)

    def internal(self, key: tuple[Any, ...], node: Node, f: OpFacts | None = None) -> int:
        """Advance by an op that the user did not write; returns its first result's number."""
        stretch = self.stretch
        step = stretch.step.children.get(key)
        if step is None:
            self._note_miss(stretch, key, f, None)
            step = self.trie.add(Step(stretch.step, key, node, facts=f))
        stretch.step = step
        stretch.marks.append(user_mark(1))
        return self._number(stretch, len(node.results))

    @staticmethod
    def _number(stretch: Stretch, count: int) -> int:
        index = stretch.count
        stretch.count += count
        stretch.owners.extend([None] * count)
        return index

    # -- results of a step that is not just one fresh tensor -------------------------------

    def _results(
        self,
        stretch: Stretch,
        step: Step,
        f: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: tuple[Any, ...],
    ) -> Any:
        node = step.node
        assert node is not None
        first = self._number(stretch, len(node.results))
        targets = list(written_tensors(f, args, kwargs))
        for offset, (target, meta) in enumerate(zip(targets, node.written, strict=True)):
            if meta.shape != tuple(target.shape) or meta.stride != target.stride():
                self.resized(target, meta)
            views.write(self, target, first + len(node.fresh) + offset)
        if f.views and "f" not in "".join(f.outputs):
            return views.handles(self, f, args, key, first, node.fresh)
        return self._assemble(f, args, kwargs, first, list(node.fresh))

    def resized(self, t: LazyTensor, meta: TensorMeta) -> None:
        """``out=`` gave a tensor another shape: it shows a cell of its own from here on."""
        cell = Cell(self, 0, 0, meta)
        rebind(t, meta, cell, None)

    def _assemble(
        self,
        f: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        first: int,
        metas: list[TensorMeta | None],
    ) -> Any:
        """The op's return value out of fresh handles and the tensors it wrote."""
        made: list[Any] = [
            self.show(first + i, meta) if meta is not None else None for i, meta in enumerate(metas)
        ]
        out: list[Any] = []
        lists = sum(1 for kind in f.outputs if kind == "fl")
        single = len(f.outputs) - lists
        for position, kind in enumerate(f.outputs):
            if kind[0] == "w":
                which = returned_write(f, position)
                out.append(kwargs[which] if isinstance(which, str) else args[which])
            elif kind == "fl":
                taken = len(made) if lists == 1 and single == 0 else len(made) - (single - len(out))
                out.append(made[:taken])
                made = made[taken:]
            else:
                out.append(made.pop(0))
        if not out:
            return None
        return out[0] if len(out) == 1 else tuple(out)

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """A handle with a cell of its own for a value of the stretch."""
        cell = Cell(self, self.serial, index, meta)
        self.stretch.owners[index] = weakref.ref(cell)
        return wrapper(meta, cell, None)

    # -- misses --------------------------------------------------------------------------

    def _miss(
        self,
        stretch: Stretch,
        key: tuple[Any, ...],
        f: OpFacts,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        first_param: int,
    ) -> Step:
        """Infer the results and remember the step."""
        metas: dict[int, TensorMeta] = {}
        counter = [first_param]

        def template(a: Any, hoist: int) -> Arg:
            if isinstance(a, torch.Tensor):
                lazy = a if isinstance(a, LazyTensor) else self.foreign(a, f)
                index = self.index_of(lazy)
                metas[index] = _meta_of(lazy)
                return Ref(index)
            if hoist == 1 and type(a) in _NUMBERS:
                counter[0] += 1
                return Param(counter[0] - 1)
            if type(a) in (list, tuple):
                return tuple(template(item, 1 if hoist == 2 else 0) for item in a)
            return DEVICE if isinstance(a, torch.device) else a

        targs = tuple(template(a, hoist) for a, hoist in zip(args, f.hoist, strict=False))
        tkwargs = tuple(
            (name, template(a, f.hoist_named.get(name, 0))) for name, a in kwargs.items()
        )
        targets = [self.index_of(t) for t in written_tensors(f, args, kwargs)]
        if f.dynamic or _masked_index(f, args):
            node = Node(f.name, targs, tkwargs, (), tuple(targets), (), dynamic=True)
        else:
            results = self.inference.results(f, targs, tkwargs, metas, stretch.params)
            if results is None:
                node = Node(f.name, targs, tkwargs, (), tuple(targets), (), dynamic=True)
            else:
                node = Node(f.name, targs, tkwargs, results[0], tuple(targets), results[1])
        self._note_miss(stretch, key, f, user_mark(1))
        step = Step(stretch.step, key, node, facts=f)
        step.forward = self._link_backward(len(stretch.marks))
        step.itself = (
            f.outputs == ("w",) and f.writes == (0,) and node.written == (_meta_of(args[0]),)
        )
        if f.views:
            step.make = None
        return self.trie.add(step)

    def _note_miss(self, stretch: Stretch, key: Any, f: OpFacts | None, mark: Mark | None) -> None:
        if self.first_miss is None:
            self.first_miss = stretch.step, key, f, mark or user_mark(1)

    def _link_backward(self, number: int) -> int:
        """Tie a forward op to its autograd node, or a backward op to its forward op."""
        running = torch._C._current_autograd_node()
        if running is None:
            if torch.is_grad_enabled():
                self._forward.setdefault(torch.autograd._get_sequence_nr() - 1, number)
            return -1
        return self._forward.get(running._sequence_nr(), -1)

    def remote_tensor(self, meta: TensorMeta, remote: Any) -> LazyTensor:
        """A handle for a value that the workers hold already."""
        base = intern(meta.shape, meta.stride, meta.dtype)
        cell = Cell(self, 0, 0, base)
        cell.remote = remote
        return wrapper(base, cell, None)

    # -- creation ------------------------------------------------------------------------

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
        cell.serial, cell.blank = 0, False
        if meta.numel == 1 and not meta.dtype.is_complex:
            cell.host = value.clone().reshape(meta.shape)
            cell.remote = None
        else:
            cell.host = None
            cell.remote = self.shipper.upload(value, meta)

    def alias(self, t: LazyTensor) -> LazyTensor:
        """Another handle for the same values, with a version counter of its own."""
        return wrapper(TensorMeta.of(t), t._cell, t._view)

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
        self.shipper.after_backward()  # type: ignore[attr-defined]

    def next_stretch(self) -> None:
        """Begin anew at the root."""
        self.serial = next(_SERIALS)
        self.shipped_ops += len(self.stretch.marks)
        self.stretch = Stretch(self.serial, self.trie.root)
        self.first_miss = None
        self._forward.clear()

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
            self.anchor = self._rarest_repeated()
        elif self.anchor != self._here() or not self.trie.half_full(step):
            return
        self.flush("stretch too long")

    def _here(self) -> tuple[OpFacts | None, Mark | None]:
        stretch = self.stretch
        return stretch.step.facts, stretch.marks[-1] if stretch.marks else None

    def _rarest_repeated(self) -> tuple[OpFacts | None, Mark | None] | None:
        ops = [step for step in self.stretch.step.path() if step.node is not None]
        seen = Counter(
            (step.facts, mark) for step, mark in zip(ops, self.stretch.marks, strict=True)
        )
        repeated = [place for place, times in seen.items() if times > 1]
        return min(repeated, key=lambda place: seen[place], default=None)

    @property
    def backward_mark(self) -> Mark | None:
        """Where the user called ``.backward()`` last."""
        return self._backward_mark

    def deep_copy(self, t: LazyTensor, memo: dict[int, Any]) -> LazyTensor:
        """See ``copies.deep_copy``."""
        return copies.deep_copy(self, t, memo)

    def host_copy(self, t: LazyTensor) -> torch.Tensor:
        """See ``copies.host_copy``."""
        return copies.host_copy(self, t)


#: Shared by all sessions, so that no other session's cell looks like one of this stretch; 0 is
#: the serial of a cell that belongs to none.
_SERIALS = itertools.count(1)

_BATCH_NORMS = {
    "aten.native_batch_norm.default": 5,
    "aten.cudnn_batch_norm.default": 5,
    "aten.miopen_batch_norm.default": 5,
}

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


def _masked_index(f: OpFacts, args: tuple[Any, ...]) -> bool:
    """Whether an index contains a mask, so that the result's size depends on its values."""
    if f.name not in MASKABLE:
        return False
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _meta_of(t: LazyTensor) -> TensorMeta:
    return TensorMeta.of(t)


def closed_error() -> NoSession:
    """The error for a tensor of a session that has ended."""
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
