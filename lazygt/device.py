"""Device ``lazygt`` for torch: the only file that touches torch's private-backend API.

Registered once, at import. What an op does then depends on the open session; without one, any
use raises NoSession.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any, Protocol

import torch
import torch.utils._device
from torch.utils.backend_registration import (
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from lazygt import tensor
from lazygt.autocast import fall_through, register_autocast
from lazygt.composites import register_composites
from lazygt.config import Config
from lazygt.errors import NoSession
from lazygt.recorder import Recorder, closed_error
from lazygt.tensor import LazyTensor

NAME = "lazygt"


class OpenSession(Protocol):
    """What the device needs of a session."""

    config: Config
    recorder: Recorder
    device_type: str

    def synchronize(self) -> None:
        """Ship what is recorded and wait for it."""


_open: list[OpenSession] = []
_libraries: list[torch.library.Library] = []
#: torch keeps bare pointers to them, so they must not be collected
_hook, _guard = _DummyPrivateUse1Hook(), _DummyDeviceGuard()


# -- sessions ------------------------------------------------------------------------------


def current_session() -> OpenSession | None:
    """The innermost open session, or None."""
    return _open[-1] if _open else None


def open_session(session: OpenSession) -> None:
    """Make a session the one that ops go to."""
    _open.append(session)
    if session.config.default_device:
        _patch_factories()


def close_session(session: OpenSession) -> None:
    """Undo ``open_session``."""
    if session in _open:
        _open.remove(session)
    if not any(s.config.default_device for s in _open):
        _unpatch_factories()


def recorder() -> Recorder:
    """The recorder of the open session.

    Raises:
        NoSession: with what to do about it.
    """
    if not _open:
        raise NoSession(
            "device 'lazygt' needs an open session: do this inside `with lazygt.session():`"
        )
    return _open[-1].recorder


def _after_fork() -> None:
    """A forked child (a DataLoader's worker) has no session: its tensors are CPU tensors."""
    _open.clear()
    _unpatch_factories()


os.register_at_fork(after_in_child=_after_fork)


# -- ops -----------------------------------------------------------------------------------


def _torch_dispatch(
    cls: type, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Every op on a LazyTensor comes here, on whatever thread."""
    if not _open:
        if func in _NEEDS_NO_SESSION:
            return args[0]
        raise closed_error()
    active = _open[-1].recorder
    try:
        if active.backward_error is not None and _called_by_engine():
            return _carrier(active, active.backward_error)
        with active.lock:
            result = active.record(func, args, kwargs)
            if active.anchor is not None or active.stretch.step.full:
                active.overflow()
            return result
    except BaseException as error:
        if not _called_by_engine():
            raise
        return _carrier(active, error)


def _dispatch(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """The same for an op that reaches lazygt in another way."""
    return _torch_dispatch(LazyTensor, func, (), args, kwargs)


_NEEDS_NO_SESSION = frozenset({torch.ops.aten.detach_.default})


def _fallback(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Ops that reach the backend without a LazyTensor among their arguments: factories."""
    recorder()
    return _dispatch(func, args, kwargs)


def _empty(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
           pin_memory: Any = None, memory_format: Any = None) -> torch.Tensor:  # fmt: skip
    if layout not in (None, torch.strided):
        raise RuntimeError(f"device 'lazygt' has strided tensors only, not {layout}")
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        meta = torch.empty(size, device="meta", memory_format=memory_format)
        stride = meta.stride()
    return recorder().blank(size, stride, dtype)


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None,
                   device: Any = None, pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    return recorder().blank(size, stride, dtype)


def _zero_tensor(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                 pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """Zeros with memory: the ones without work only where all of torch's dispatcher is on."""
    return torch.zeros(size, dtype=dtype, device=device or tensor.DEVICE_0)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    return _dispatch(torch.ops.aten.copy_.default, (target, source), {})


def _pin_memory(source: torch.Tensor, device: Any = None) -> torch.Tensor:
    """``pin_memory()`` of a CPU tensor: itself.

    Uploads go through shared memory, so pinning would gain nothing; torch itself would ask this
    device for an allocator of pinned memory, which Python can't give it.
    """
    return source


def _refuse_layout(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        f"{func}: device 'lazygt' has dense strided tensors only, no sparse, quantized or nested "
        f"ones. Make such a tensor on the CPU (device='cpu') and .to_dense() it before "
        f".to('lazygt')."
    )


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> Any:
    return _copy_from(source, target)


# -- backward ------------------------------------------------------------------------------------
#
# torch's device guard for a Python device calls Python in a noexcept destructor. When a Python
# exception passes that, the process ends: one raised by a backward op, a hook, or the hook that
# unpacks a saved tensor. So what is raised there goes aside, what is left of the pass is skipped,
# and ``_run_backward`` raises it when the engine has returned.

_autograd: Any = torch.autograd
_builtins: Any = torch.jit._builtins
_autograd_node = torch._C._current_autograd_node
#: torch's own way into the autograd engine
_engine_run_backward = _autograd._engine_run_backward


def _run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Every backward pass comes here: ``Tensor.backward``, ``autograd.backward`` and ``grad``.

    It runs on the caller's thread, as one of CPU tensors does: the user's frames are on the stack.
    """
    if not (_open and any(type(t) is LazyTensor for t in outputs)):
        return _engine_run_backward(outputs, *args, **kwargs)
    active = _open[-1].recorder
    nested = _autograd_node() is not None
    if not nested:
        active.before_backward()
    try:
        with torch.autograd.set_multithreading_enabled(False):
            result = _engine_run_backward(outputs, *args, **kwargs)
    except RuntimeError:
        active.raise_backward_error()
        raise
    active.raise_backward_error()
    if not nested and kwargs.get("accumulate_grad"):
        active.after_backward()
    return result


def _called_by_engine() -> bool:
    """Whether the autograd engine itself runs this op, with no Python of the user's between."""
    if _autograd_node() is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is None or frame.f_code is _engine_run_backward.__code__


def _carrier(active: Recorder, error: BaseException) -> Any:
    """How an error leaves a backward op: aside.

    What is returned can't be made a tensor of, so that C++ raises an error of its own, whose text
    is this class's name, and the pass ends.
    """
    active.backward_error = error
    return type(f"{type(error).__name__}: {error}", (), {})()


def _deferring(hook: Callable[..., Any], instead: Callable[[], Any]) -> Callable[..., Any]:
    """A hook whose exceptions go aside while autograd runs; it returns ``instead()`` then."""

    @functools.wraps(hook, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        active = _open[-1].recorder if _open else None
        if active is None or _autograd_node() is None:
            return hook(*args, **kwargs)
        if active.backward_error is not None:
            return instead()
        try:
            return hook(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again by _run_backward
            _put_aside(active, error)
            return instead()

    return call


def _put_aside(active: Recorder, error: BaseException) -> None:
    if active.backward_error is None:  # else this one only follows from that
        active.backward_error = error


def _nothing() -> None:
    return None


def _defer_hooks() -> None:
    """See to every way to register a hook."""
    mixin: Any = torch.autograd.function._HookMixin
    register_on_node = mixin._register_hook
    saved: Any = torch.autograd.graph.saved_tensors_hooks
    set_up = saved.__init__

    def register_hook(backward_hooks: Any, hook: Callable[..., Any]) -> Any:
        return register_on_node(backward_hooks, _deferring(hook, _nothing))

    @functools.wraps(set_up)
    def init(self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
        set_up(self, pack_hook, _deferring(unpack_hook, lambda: recorder().blank((0,), None, None)))

    mixin._register_hook = staticmethod(register_hook)
    saved.__init__ = init
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        setattr(LazyTensor, name, _registering(getattr(torch.Tensor, name)))


def _registering(register: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(register)
    def registering(self: LazyTensor, hook: Callable[..., Any]) -> Any:
        return register(self, _deferring(hook, _nothing))

    return registering


# -- the device module: torch.lazygt ---------------------------------------------------------


class DeviceModule(ModuleType):
    """``torch.lazygt``: what torch asks of a device's module."""

    #: torch.utils.checkpoint asks for it before it keeps the generator's state
    _initialized = True

    def is_initialized(self) -> bool:
        """True: there is nothing to initialise."""
        return True

    def is_available(self) -> bool:
        """True: a session can always be opened."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """1 inside a session, which shows its workers as one device; else 0."""
        return 1 if _open else 0

    def current_device(self) -> int:
        """0."""
        return 0

    def set_device(self, device: Any) -> None:
        """There is only device 0."""
        index = torch.device(device).index if not isinstance(device, int) else device
        if index not in (None, 0):
            raise RuntimeError(f"lazygt has one device, lazygt:0; got {device!r}")

    def synchronize(self, device: Any = None) -> None:
        """Ship what is recorded and wait for it."""
        if _open:
            _open[-1].synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes that ``torch.autocast("lazygt")`` may use."""
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        """Seed the session's generator (a recorded op, no sync point)."""
        if _open:
            active = _open[-1].recorder
            with active.lock:
                active.generator.manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """What ``torch.manual_seed`` calls."""
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        """The generator's state as a lazy tensor of bytes (no sync point)."""
        active = recorder()
        with active.lock:
            return active.generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        """Set the generator's state (a recorded op)."""
        active = recorder()
        with active.lock:
            active.generator.set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """One state: there is one device."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Set the state of the one device."""
        self.set_rng_state(states[0])

    class device:  # noqa: N801 - torch's own name
        """A context manager that selects a device; there is only one."""

        def __init__(self, device: Any) -> None:
            self.idx = 0

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: Any) -> None:
            return None


# -- factories: the default device inside a session -------------------------------------------

#: (owner, name) -> torch's own function
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}
#: Constructors of what lazygt has none of: they go on making CPU tensors.
_NOT_STRIDED = frozenset(
    {
        "empty_quantized",
        "sparse_coo_tensor",
        "sparse_compressed_tensor",
        "sparse_csr_tensor",
        "sparse_csc_tensor",
        "sparse_bsr_tensor",
        "sparse_bsc_tensor",
    }
)
#: Made from torch's list once, before anything is patched (torch caches that list as well).
_constructors: list[Callable[..., Any]] = []


def _patch_factories() -> None:
    """Have torch's factories default to ``lazygt``.

    ``torch.set_default_device`` does the same with a TorchFunctionMode, through which every
    call of every torch function goes: 1.5 to 3 us an op, measured, where recording one takes 5.
    """
    if _originals:
        return
    if not _constructors:
        _constructors.extend(torch.utils._device._device_constructors())
    for function in _constructors:
        name = function.__name__.removeprefix("fft_")
        for owner in (torch, torch.fft):
            if getattr(owner, name, None) is function and name not in _NOT_STRIDED:
                _patch(owner, name, _defaulting(function))
    _patch(torch, "normal", _defaulting_normal(torch.normal))
    for owner in (torch, torch.random):
        _patch(owner, "get_rng_state", _get_rng_state)
        _patch(owner, "set_rng_state", _set_rng_state)


def _patch(owner: Any, name: str, function: Callable[..., Any]) -> None:
    original = _originals[owner, name] = getattr(owner, name)
    known_as = _builtins._find_builtin(original)
    if known_as is not None:  # else torch.jit.script would try to compile the factory's Python
        _builtins._register_builtin(function, known_as)
    setattr(owner, name, function)


def _unpatch_factories() -> None:
    for (owner, name), function in _originals.items():
        setattr(owner, name, function)
    _originals.clear()


@functools.cache
def _defaulting(function: Callable[..., Any]) -> Callable[..., Any]:
    converts = function.__name__ in ("as_tensor", "asarray")

    @functools.wraps(function)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("device") is None
            and _stays_free(kwargs)
            and not (converts and args and isinstance(args[0], torch.Tensor))
        ):
            kwargs["device"] = tensor.DEVICE_0
        return function(*args, **kwargs)

    return factory


@functools.cache
def _defaulting_normal(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.normal`` is a factory only when it is given a size."""
    factory = _defaulting(function)

    @functools.wraps(function)
    def normal(*args: Any, **kwargs: Any) -> Any:
        sized = len(args) == 3 or "size" in kwargs
        return (factory if sized else function)(*args, **kwargs)

    return normal


def _get_rng_state() -> torch.Tensor:
    """``torch.get_rng_state`` inside a session: the state of the workers' generator.

    A lazy tensor, so that torch.utils.checkpoint costs no sync point. It carries the state of the
    client's own CPU generator, which DataLoaders and CPU tensors draw from.
    """
    own = torch.default_generator.get_state()
    lock: Any = _open[-1].recorder.lock
    if lock._is_owned():
        return own
    state = torch.lazygt.get_rng_state()  # type: ignore[attr-defined]
    state._client_state = own
    return state  # type: ignore[no-any-return]


def _set_rng_state(new_state: torch.Tensor) -> None:
    """``torch.set_rng_state`` inside a session: sets both generators."""
    own = getattr(new_state, "_client_state", new_state)
    if isinstance(own, LazyTensor):
        own = own.cpu()
    torch.default_generator.set_state(own)
    session = _open[-1]
    if session.recorder.lock._is_owned():  # type: ignore[attr-defined]
        return
    if isinstance(new_state, LazyTensor) or session.device_type == "cpu":
        torch.lazygt.set_rng_state(new_state)  # type: ignore[attr-defined]


def _stays_free(kwargs: dict[str, Any]) -> bool:
    """Whether nothing else says where the tensor is to be."""
    lock: Any = _open[-1].recorder.lock
    if lock._is_owned():  # lazygt itself, or torch working for it
        return False
    if torch._C._len_torch_function_stack() and _inner_device_context():
        return False
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != NAME:
        return False
    out = kwargs.get("out")
    return out is None


def _inner_device_context() -> bool:
    """Whether the user has set a device of his own (``with torch.device("cpu")``)."""
    return any(
        isinstance(torch._C._get_function_stack_at(i), torch.utils._device.DeviceContext)
        for i in range(torch._C._len_torch_function_stack())
    )


# -- torch.load(map_location="lazygt") ----------------------------------------------------------


class _LoadedStorage(torch.UntypedStorage):
    """A CPU storage on its way to the workers.

    torch.load makes an empty tensor on its device and calls ``set_`` with it; there the bytes are
    uploaded, once a storage, so that tensors which share one in the file share a cell.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the tensors made of it are to be."""
        return tensor.DEVICE_0


def _deserialize(storage: Any, location: str) -> Any:
    """What torch.load asks each device: whether it takes a storage with such a location."""
    if location != NAME and not location.startswith(f"{NAME}:"):
        return None
    recorder()
    torch.lazygt.set_device(location)  # type: ignore[attr-defined]
    storage.__class__ = _LoadedStorage
    return storage


def _no_tag(storage: Any) -> str | None:
    """Nothing is ever saved as lying on lazygt: checkpoints are made of CPU tensors."""
    return None


# -- registration ----------------------------------------------------------------------------


def register() -> None:
    """Tell torch of the device; done once, at import."""
    module = DeviceModule(f"torch.{NAME}")
    rename_privateuse1_backend(NAME)
    generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, module)
    torch._C._acc.register_python_privateuseone_hook(_hook)
    torch._C._acc.register_python_privateuseone_device_guard(_guard)
    _autograd._engine_run_backward = _run_backward
    _defer_hooks()
    sys.modules[f"torch.{NAME}"] = module
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": _copy_from,
        "_efficientzerotensor": _zero_tensor,
        "_copy_from_and_resize": _copy_from_and_resize,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", _pin_memory, "CPU")
    for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1"):
        everything.fallback(_refuse_layout, key)
    fall_through(everything)
    _libraries.extend((everything, aten))
    _libraries.append(register_composites(lambda: _open[-1].device_type if _open else "cpu"))
    _libraries.append(register_autocast())
    # before torch's own (priority 23), which asks for a storage in this process and crashes
    torch.serialization.register_package(9, _no_tag, _deserialize)
    # set here, not defined there: it saves a Python call an op
    LazyTensor.__torch_dispatch__ = classmethod(_torch_dispatch)  # type: ignore[assignment]


__all__ = ["LazyTensor", "close_session", "current_session", "open_session", "register"]
