"""LazyTensor: the user's handle, a shape and dtype over a storage; and its view chains."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from lazygt import native
from lazygt.graph.mesh import Mesh, Sharding
from lazygt.graph.meta import TensorMeta, intern
from lazygt.graph.node import Arg, Node
from lazygt.graph.ops import OpFacts, undispatched
from lazygt.graph.placement import Replicate, placement_to_torch
from lazygt.record.untyped_storage import DEVICE_0 as DEVICE_0
from lazygt.record.untyped_storage import AddressRange, LazyStorage, new_range, untyped_storage_of

if TYPE_CHECKING:
    from typing_extensions import TypeIs

    from lazygt.runtime.values import RemoteValue


#: The C++ extension, if it records; else None.
NATIVE: Any = native.recording()


class State(Enum):
    """Location of a storage's value."""

    RECORDED = "recorded, not computed yet"
    REMOTE = "on the workers"
    HOST = "a number in the client"
    BLANK = "not written yet"
    LOST = "lost: its flush was interrupted"
    CLOSED = "lost: the session is closed"


class Owner(Protocol):
    """Interface of the recorder, as far as its storages and handles need it."""

    closed: bool
    lock: threading.RLock
    #: True once a single number was stored on the client
    has_numbers: bool

    @property
    def serial(self) -> int:
        """The number of the trace that is being recorded."""

    @property
    def mesh(self) -> Mesh:
        """The workers as a grid with named axes."""

    def index_of(self, t: LazyTensor) -> int:
        """Return the number of a handle's value in the trace."""

    def internal(self, key: tuple[Any, ...], node: Node, f: OpFacts | None = None) -> int:
        """Record an op that the user did not write; return its first result's number."""

    def own(self, storage: Storage, index: int) -> None:
        """Set a storage's value to value ``index`` of the trace."""

    def show(self, index: int, meta: TensorMeta) -> LazyTensor:
        """Return a new handle for a value of the trace."""

    def upload(self, source: torch.Tensor, meta: TensorMeta) -> RemoteValue:
        """Copy a CPU tensor for the workers; return its remote value."""

    def overwritten(self, storage: Storage, before: Held) -> None:
        """Note that no op of a trace, but an upload, replaced a storage's full value."""

    def flush(self, reason: str) -> None:
        """Ship the recorded ops, without waiting for them."""

    def fetch(self, t: LazyTensor, reason: str, as_number: bool = False) -> Any:
        """Return a handle's values as a CPU tensor of its own, or as a Python number."""

    def keep_sharding(self, t: LazyTensor, before: Storage) -> None:
        """Give a handle the placement of another storage of the same shape."""


class Storage:
    """Value that one or more handles view, like a storage of torch's.

    Attributes:
        serial, index: serial of the trace that the value is in, and the value's number there (an
            input's is negative).
        remote: the value on the workers.
        host: the value on the client: a single number that no op has combined with worker data.
        blank: True after ``torch.empty``, until the first write.
        placed: the sharding that the user gave it (its annotation), or None; later values of the
            storage get it, too.
    """

    __slots__ = ("__weakref__", "_addresses", "blank", "host", "index", "meta", "owner", "placed",
                 "remote", "saved", "serial")  # fmt: skip
    #: set by ``LazyTensor.host_copy`` only
    saved: tuple[weakref.ref[torch.UntypedStorage], Any]
    _addresses: AddressRange

    def __init__(self, owner: Owner, serial: int, index: int, meta: TensorMeta) -> None:
        self.owner = owner
        self.serial = serial
        self.index = index
        self.meta = meta
        self.remote: RemoteValue | None = None
        self.host: torch.Tensor | None = None
        self.placed: Sharding | None = None
        self.blank = False

    @property
    def state(self) -> State:
        """Location of the value now."""
        owner = self.owner
        if owner.closed:
            return State.CLOSED
        if self.index >= 0 and self.serial == owner.serial:
            return State.RECORDED
        if self.remote is not None:
            return State.REMOTE
        if self.host is not None:
            return State.HOST
        return State.BLANK if self.blank else State.LOST

    def set_recorded(self, serial: int, index: int) -> None:
        """Set the value to value ``index`` of trace ``serial``, which an op makes."""
        self.blank, self.index, self.serial, self.remote = False, index, serial, None

    def set_remote(self, remote: RemoteValue) -> None:
        """Set the value to one that is on the workers."""
        self.blank, self.serial, self.host, self.remote = False, 0, None, remote

    def set_host(self, value: torch.Tensor) -> None:
        """Set the value to a number on the client."""
        self.blank, self.serial, self.host, self.remote = False, 0, value, None

    @property
    def addresses(self) -> AddressRange:
        """Address range that ``data_ptr()`` and ``untyped_storage()`` report."""
        if not hasattr(self, "_addresses"):
            self._addresses = new_range(self.meta.extent * self.meta.dtype.itemsize)
        return self._addresses


class Held(NamedTuple):
    """Snapshot of a storage's value, if that is no result of the trace."""

    key: int | None  # key, sharding: id and sharding of a value on the workers
    sharding: Sharding | None
    host: torch.Tensor | None  # a value on the client

    @property
    def known(self) -> bool:
        """True if there is a value."""
        return self.key is not None or self.host is not None

    @staticmethod
    def of(storage: Storage) -> Held:
        """Return a storage's present value."""
        remote = storage.remote
        if remote is None:
            return Held(None, None, storage.host)
        return Held(remote.id, remote.sharding, None)


if NATIVE is None:
    #: Constructor of storages: ``(owner, serial, index, meta)``.
    new_storage: Callable[..., Storage] = Storage
else:

    class NativeStorage(NATIVE.Cell):  # type: ignore[misc]
        """C++'s storage."""

        __slots__ = ()

        state, addresses = Storage.state, Storage.addresses
        set_recorded, set_remote = Storage.set_recorded, Storage.set_remote
        set_host = Storage.set_host

    NATIVE.set_storage_type(NativeStorage)
    NATIVE.View.meta = property(lambda view: moved_by(view.ops[-1].meta, view.shift))
    new_storage = NativeStorage


class ViewOp:
    """View op between a storage and a handle, without its operand.

    Attributes:
        key: the op's key in the trie, as of the step that recorded it.
        position: position of the viewed operand among the arguments.
        meta: meta of its result number ``which``, in a graph.
        pitch: bytes from one position to the next, if the position is a run-time number.
    """

    __slots__ = ("args", "facts", "key", "kwargs", "meta", "pitch", "position", "which")

    def __init__(
        self,
        facts: OpFacts,
        key: tuple[Any, ...],
        position: int,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        which: int,
        meta: TensorMeta,
        pitch: int | None = None,
    ) -> None:
        self.facts, self.key, self.position = facts, key, position
        self.args, self.kwargs, self.which = args, kwargs, which
        self.meta, self.pitch = meta, pitch

    @property
    def absolute(self) -> bool:
        """True if its offset counts from the storage's start, for any operand (``as_strided``)."""
        return self.facts.func is torch.ops.aten.as_strided.default


class ViewChain:
    """Chain of views from a storage to a handle, with its value in the current trace.

    Attributes:
        ops: the view ops from the storage to the handle.
        serial, base, index: numbers of the trace, the storage's value, and the view's value.
        numbers: positions of those ops that take one at run time.
        params: numbers of these positions among the trace's run-time numbers.
        shift: bytes from the view's offset in the metas of graphs to its actual one.
    """

    __slots__ = ("base", "index", "numbers", "ops", "params", "serial", "shift")

    def __init__(
        self,
        ops: tuple[ViewOp, ...],
        serial: int,
        base: int,
        index: int,
        numbers: tuple[int, ...] = (),
        params: tuple[int, ...] = (),
        shift: int = 0,
    ) -> None:
        self.ops = ops
        self.serial, self.base, self.index = serial, base, index
        self.numbers, self.params, self.shift = numbers, params, shift

    @property
    def meta(self) -> TensorMeta:
        """The handle's meta."""
        return moved_by(self.ops[-1].meta, self.shift)

    def copy(self) -> ViewChain:
        """Return the same chain for another storage."""
        return ViewChain(self.ops, 0, 0, 0, self.numbers, (), self.shift)


def moved_by(meta: TensorMeta, shift: int) -> TensorMeta:
    """Return the meta of a view with ``shift`` bytes added to its offset."""
    if not shift:
        return meta
    offset = meta.offset + shift // meta.dtype.itemsize
    return intern(meta.shape, meta.stride, meta.dtype, offset, meta.conj, meta.neg)


class _NativeClass(torch._C._TensorMeta):
    """Metaclass of ``LazyTensor`` where C++ records: handles are then of torch's own class."""

    def __instancecheck__(self, t: Any) -> bool:
        return is_lazy(t)


_LAZY_CLASS: Any = torch._C._TensorMeta if NATIVE is None else _NativeClass


class Above(NamedTuple):
    """LazyTensor's functions from modules above this one, which import it."""

    #: ``t.data = value`` for a value on the host; returns False if that is not possible
    move_to_host: Callable[[LazyTensor, torch.Tensor], bool]
    #: wrapper of a hook that stores exceptions while autograd runs
    deferring: Callable[[Callable[..., Any]], Callable[..., Any]]
    #: ``copy.deepcopy``, with its memo
    deep_copy: Callable[[LazyTensor, dict[int, Any]], LazyTensor]
    #: CPU tensor that is pickled instead
    saved_form: Callable[[LazyTensor], torch.Tensor]


_above: Above


def connect(dispatch: Callable[..., Any], above: Above) -> None:
    """Set LazyTensor's functions of importing modules; called once, at the device's registration.

    Args:
        dispatch: handler of every op. It becomes the method itself: a method that called it would
            cost a Python call an op.
    """
    global _above
    _above = above
    LazyTensor.__torch_dispatch__ = classmethod(dispatch)  # type: ignore[assignment]


class Viewer(Protocol):
    """Notebook view of tensors and sessions."""

    def tensor_html(self, t: LazyTensor, /) -> str:
        """Return HTML of a tensor's values, and of its shape, dtype and line."""

    def tensor_bundle(self, t: LazyTensor, /) -> dict[str, str]:
        """Return the text of ``repr``, and the same with the card."""

    def session_html(self, session: Any, /) -> str:
        """Return a session's counts."""


def viewer() -> Viewer:
    """Return the notebook viewer, loaded on first use: its module imports this one."""
    return _load_viewer()


def show_with(load: Callable[[], Viewer]) -> None:
    """Set the function that loads the viewer."""
    global _load_viewer
    _load_viewer = load


_load_viewer: Callable[[], Viewer]


class LazyTensor(torch.Tensor, metaclass=_LAZY_CLASS):  # type: ignore[metaclass]
    """Tensor on device ``lazygt``: a handle for a value that workers hold or will compute.

    The class has no slots, so that a CPU tensor's object can become one (``swap``).
    """

    _storage: Storage
    _view: ViewChain | None
    #: class of the same tensor on the host; subclasses set it
    _host_class: ClassVar[type] = torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Raise RuntimeError: a placeholder that ``connect`` replaces."""
        raise RuntimeError("device 'lazygt' has not been registered")

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a parameter: libraries call ``type(p)(values, requires_grad=...)``.

        With sizes or a list ``type(t)(...)`` makes a tensor.
        """
        make = torch.Tensor if args and not _is_values(args[0]) else torch.nn.Parameter
        return make(*args, **kwargs)

    def _repr_html_(self) -> str:
        return viewer().tensor_html(self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return viewer().tensor_bundle(self)

    # -- sync points -------------------------------------------------------------------------------

    @property
    def placements(self) -> tuple[Any, ...]:
        """Placements of the value: one ``torch.distributed.tensor`` placement for each mesh axis.

        A value that is only recorded is shipped: its placements are decided then. A view has those
        of its copy.
        """
        if view_of(self) is not None:
            copy: LazyTensor = self.detach().clone()  # type: ignore[assignment]
            return copy.placements
        _ship_pending(self, "placements")
        remote, mesh = storage_of(self).remote, storage_of(self).owner.mesh
        if remote is None or remote.sharding is None:
            return tuple(placement_to_torch(Replicate()) for _ in mesh.names)
        return tuple(map(placement_to_torch, remote.sharding.placements))

    def tolist(self) -> Any:
        """Return the values as nested Python lists; a sync point."""
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as a new NumPy array; a sync point.

        Raises:
            RuntimeError: the tensor requires grad, and ``force`` is not set (as in torch).
        """
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. "
                "Use tensor.detach().numpy() instead."
            )
        return self.detach().cpu().resolve_conj().resolve_neg().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if storage_of(self).owner.closed:  # a debugger shows such ones too
            text = f"tensor(..., size={tuple(self.size())}, dtype={self.dtype}, session closed)"
        else:
            text = repr(self.detach().cpu())
        suffix = f", device='{self.device}'"
        if self.grad_fn is not None:
            suffix += f", grad_fn=<{self.grad_fn.name()}>"
        elif self.requires_grad:
            suffix += ", requires_grad=True"
        body = f"{text[:-1]}{suffix})"
        return f"Parameter containing:\n{body}" if isinstance(self, torch.nn.Parameter) else body

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        readable = self.dim() == 0 and not storage_of(self).owner.closed
        return format(self.item() if readable else str(self), spec)

    # -- identity and aliasing -----------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The same values without autograd history; if only recorded, they are shipped.

        Newly set values get the placement of the former ones, if they have the same shape and no
        placement of their own.
        """
        _ship_pending(self, "data")
        return alias(self)

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if not is_lazy(new):
            if _above.move_to_host(self, new):
                return
            raise RuntimeError(
                f"incompatible tensor type: the data of a lazygt tensor can't be set to one on "
                f"{new.device}; use .data = value.to('lazygt')"
            )
        before = storage_of(self)
        _set_data(self, new)
        _show(self, storage_of(new), view_of(new))
        if before.placed is not None:
            storage_of(self).owner.keep_sharding(self, before)

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyTensor:
        return _above.deep_copy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Reduce to an ordinary CPU tensor, so that a checkpoint needs no lazygt to be read."""
        return _above.saved_form(self).__reduce_ex__(protocol)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook; its exceptions are raised when the backward pass has ended."""
        return _register_hook(self, _above.deferring(hook))

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook; its exceptions are raised when the backward pass has ended."""
        return _register_accumulated_hook(self, _above.deferring(hook))

    def untyped_storage(self) -> LazyStorage:
        """Return a storage with an identity and a size, but no memory in this process."""
        return untyped_storage_of(self, storage_of(self).addresses)

    def data_ptr(self) -> int:
        """Return the first element's address in the storage's range; 0 for an empty tensor."""
        if not self.numel():
            return 0
        return storage_of(self).addresses.first + meta_of(self).offset * self.dtype.itemsize

    def is_shared(self) -> bool:
        """Return False: the memory is a worker's."""
        return False

    def is_pinned(self, device: Any = None) -> bool:
        """Return False: the memory is a worker's."""
        return False

    def share_memory_(self) -> LazyTensor:
        """Do nothing, as for CUDA tensors."""
        return self


def _ship_pending(t: LazyTensor, reason: str) -> None:
    """Flush if the value is still only recorded."""
    storage = storage_of(t)
    if storage.state is State.RECORDED:
        storage.owner.flush(reason)


def _is_values(argument: Any) -> bool:
    """Return whether ``nn.Parameter`` accepts an argument as data."""
    return argument is None or isinstance(argument, torch.Tensor)


#: Attributes that only a lazy tensor has in its ``__dict__``.
OF_LAZY = frozenset({"_storage", "_view"} if NATIVE is None else ())
_register_hook: Any = torch.Tensor.register_hook
_register_accumulated_hook: Any = torch.Tensor.register_post_accumulate_grad_hook
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]
make_wrapper = torch.Tensor._make_wrapper_subclass
STRIDED = torch.strided


def wrapper(meta: TensorMeta, storage: Storage, view: ViewChain | None) -> LazyTensor:
    """Return a new handle for a view of a storage; ``view`` None: all of the storage."""
    if NATIVE is not None:
        handle: LazyTensor = NATIVE.handle(meta, storage, view)
        return handle
    # by position: torch takes twice as long to read keywords
    if meta.plain:
        t = make_wrapper(LazyTensor, meta.shape, None, None, None, meta.dtype, STRIDED, DEVICE_0)
    else:
        t = make_wrapper(LazyTensor, meta.shape, meta.stride, meta.offset, None, meta.dtype,
                          STRIDED, DEVICE_0)  # fmt: skip
        if meta.conj:
            torch._C._set_conj(t, True)
        if meta.neg:
            torch._C._set_neg(t, True)
    # attributes of a dictionary display are read in a third of the time of assigned ones
    t.__dict__ = {"_storage": storage, "_view": view}
    return t


def is_lazy(t: object) -> TypeIs[LazyTensor]:
    """Return whether an object is a handle."""
    return isinstance(t, LazyTensor)


def storage_of(t: LazyTensor) -> Storage:
    """Return the storage that a handle views."""
    return t._storage


def view_of(t: LazyTensor) -> ViewChain | None:
    """Return a handle's chain of views; None: it shows all of its storage."""
    return t._view


if NATIVE is not None:
    is_lazy, storage_of, view_of = NATIVE.is_lazy, NATIVE.storage_of, NATIVE.view_of


def _show(t: LazyTensor, storage: Storage, view: ViewChain | None) -> None:
    """Set a handle's storage and view; a native handle has them after ``_set_data``."""
    if NATIVE is None:
        t._storage, t._view = storage, view


def host_class(t: LazyTensor) -> type:
    """Return the class of the same tensor on the host."""
    if NATIVE is not None:
        return type(t)
    if type(t) is LazyTensor and getattr(t, "_is_param", False):
        return torch.nn.Parameter
    return type(t)._host_class


def attributes(t: LazyTensor) -> dict[str, Any]:
    """Return the attributes that the user has set on a tensor."""
    return {name: a for name, a in t.__dict__.items() if name not in OF_LAZY}


def meta_of(t: LazyTensor) -> TensorMeta:
    """Return a handle's meta from lazygt's own records, without a call of torch."""
    view = view_of(t)
    return storage_of(t).meta if view is None else view.meta


def graph_meta(t: LazyTensor) -> TensorMeta:
    """Return a handle's meta in graphs: a view with a run-time position has ``SAMPLE``'s."""
    view = view_of(t)
    return storage_of(t).meta if view is None else view.ops[-1].meta


def rebind(t: LazyTensor, meta: TensorMeta, storage: Storage, view: ViewChain | None) -> None:
    """Make the handle ``t`` show another shape, storage or view (``t_``, ``set_``, ``out=``)."""
    # set_data is implemented at the autograd keys, which are off while an op is dispatched
    with undispatched():
        _set_data(t, wrapper(meta, storage, view))
    _show(t, storage, view)


def alias(t: LazyTensor) -> LazyTensor:
    """Return another handle for the same values, with a version counter of its own."""
    return wrapper(meta_of(t), storage_of(t), view_of(t))
