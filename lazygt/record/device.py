"""torch device ``lazygt``: the only file that touches torch's private-backend API.

Registered once, at import. The effect of an op then depends on the open session; without one, any
use raises NoSession.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
import torch.utils._device
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import (
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from lazygt.record import (
    autograd,
    bridge,
    copies,
    factories,
    host_rng,
    multiprocessing,
    rng,
    session_patches,
    subclasses,
    swap,
    tensor,
    torch_compile,
)
from lazygt.record.context import NAME, OpenSession, note_use, recorder, session_stack
from lazygt.record.custom import registry
from lazygt.record.formulas import autocast, derivatives
from lazygt.record.formulas.decompositions import (
    CPU_KERNELS,
    DECOMPOSED,
    GPU_KERNELS,
    register_decompositions,
    register_for_gpus,
)
from lazygt.record.formulas.derivatives import register_derivatives
from lazygt.record.formulas.recurrent import RECURRENT, register_recurrent
from lazygt.record.handlers import refuse_layout
from lazygt.record.patches import Patches
from lazygt.record.tensor import NATIVE, Above, LazyTensor, is_lazy
from lazygt.record.trace import closed_error
from lazygt.runtime.interrupts import DEFER_INTERRUPT

_libraries: list[torch.library.Library] = []
#: Owned here, because torch has bare pointers to them.
_hook, _guard = _DummyPrivateUse1Hook(), _DummyDeviceGuard()


#: Also active while no session is open: the patches then answer as torch itself would.
_ALWAYS = Patches(*autograd.PATCHES, *swap.PATCHES, *subclasses.PATCHES, *multiprocessing.PATCHES,
                  *derivatives.PATCHES, *autocast.PATCHES, *registry.PATCHES,
                  *(subclasses.METHOD_PATCHES if NATIVE is not None else ()))  # fmt: skip
_IN_SESSIONS = Patches(
    *swap.IN_SESSIONS, *session_patches.DEVICE_PATCHES, *session_patches.FLAG_PATCHES
)
#: Lock of the stack of sessions, and of the patches that depend on the stack.
_patch_lock = threading.RLock()


# -- sessions ------------------------------------------------------------------------------


def open_session(session: OpenSession) -> None:
    """Make a session the target of ops; a session may be opened again inside itself.

    Raises:
        BaseException: Ctrl-C, or an error of a module in which factories are replaced. Torch is as
            it was before.
    """
    try:
        with DEFER_INTERRUPT, _patch_lock:
            if session.device_type != "cpu":
                _prepare_for_gpus()
            session_stack.append(session)
            note_use()
            _update_patches()
        session.recorder.update_flags()
    except BaseException:
        leave_session(session)
        raise


@functools.cache
def _prepare_for_gpus() -> None:
    """Register the kernels that only sessions on GPUs need, once in a process."""
    _libraries.append(register_for_gpus(_fallback if NATIVE is None else None))
    if NATIVE is not None:
        for name in GPU_KERNELS:
            NATIVE.record_whole("aten", name)


def leave_session(session: OpenSession) -> None:
    """Undo the last ``open_session`` of a session."""
    with DEFER_INTERRUPT, _patch_lock:
        for index in reversed(range(len(session_stack))):
            if session_stack[index] is session:
                del session_stack[index]
                break
        _update_patches()


def close_session(session: OpenSession) -> None:
    """Undo every ``open_session`` of a session."""
    with DEFER_INTERRUPT, _patch_lock:
        session_stack[:] = [other for other in session_stack if other is not session]
        _update_patches()


def _update_patches() -> None:
    """Apply the patches of torch that the open sessions need; undo all others."""
    defaulting = any(s.config.default_device for s in session_stack)
    on_cpus = any(s.device_type == "cpu" for s in session_stack)
    with ExitStack() as stack:  # each callback runs, even if another raises
        stack.callback(_activate)
        stack.callback(autograd.select, bool(session_stack))
        stack.callback(_IN_SESSIONS.apply if session_stack else _IN_SESSIONS.undo)
        stack.callback(factories.patch if defaulting else factories.unpatch)
        stack.callback(host_rng.install if on_cpus else host_rng.uninstall)


def _activate() -> None:
    """Set the recorder that C++ sends ops to, and autograd's view replay on a mesh."""
    if NATIVE is not None:
        session = session_stack[-1] if session_stack else None
        recorder: Any = session and session.recorder
        NATIVE.activate(recorder and recorder.native)
        # by view replay, as for Python subclasses: strides say nothing of blocks on a mesh
        torch._C._set_view_replay_enabled(session is not None and session.mesh.world_size > 1)


def _after_fork() -> None:
    """Drop all sessions in a forked child, such as a DataLoader's worker."""
    global _patch_lock
    _patch_lock = threading.RLock()  # another thread of the parent may have it
    session_stack.clear()
    rng.discard_worker_state()
    _update_patches()


os.register_at_fork(after_in_child=_after_fork)


# -- ops -----------------------------------------------------------------------------------


def _torch_dispatch(
    cls: type, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Record an op on a LazyTensor, on any thread (implements ``__torch_dispatch__``)."""
    if not session_stack:
        if func in _NEEDS_NO_SESSION:
            return args[0]
        raise closed_error()
    active = session_stack[-1].recorder
    try:
        if active.backward_error is not None and autograd.called_by_engine():
            return autograd.deferred_error(active, active.backward_error)
        with active.lock:
            result = active.record(func, args, kwargs)
            if active.anchor is not None or active.trace.step.full:
                active.overflow()
            return result
    except BaseException as error:
        if not autograd.called_by_engine():
            raise
        return autograd.deferred_error(active, error)


def _dispatch(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Record an op that reaches lazygt by another path than ``__torch_dispatch__``."""
    return _torch_dispatch(LazyTensor, func, (), args, kwargs)


def _without_session(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle an op from C++ while no session is open: most raise NoSession."""
    if not any(map(is_lazy, tree_leaves((args, kwargs)))):
        recorder()
    return _dispatch(func, args, kwargs)


_NEEDS_NO_SESSION = frozenset({torch.ops.aten.detach_.default})


def _fallback(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Record an op without a LazyTensor among its arguments, such as a factory."""
    recorder()
    return _dispatch(func, args, kwargs)


def _zero_tensor(size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None,
                 pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """Return zeros with memory; torch's own, without memory, need the full dispatcher."""
    return torch.zeros(size, dtype=dtype, device=device or tensor.DEVICE_0)


def _empty_permuted(size: Any, physical_layout: Any, *, dtype: Any = None, layout: Any = None,
                    device: Any = None, pin_memory: Any = None) -> torch.Tensor:  # fmt: skip
    """Return a tensor with memory of its own, strided by ``physical_layout``.

    torch's own code returns a permuted view of other memory, also to ``empty_like``, which calls it
    for a meta tensor with ``device="lazygt"``.
    """
    meta = torch.empty_permuted(size, physical_layout, dtype=dtype, layout=layout, device="meta")
    device = device or tensor.DEVICE_0
    return torch.empty_strided(meta.shape, meta.stride(), dtype=dtype, device=device)


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    """Record ``target.copy_(source)`` between devices."""
    return _dispatch(torch.ops.aten.copy_.default, (target, source), {})


def _pin_memory(source: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a CPU tensor itself for ``pin_memory()``.

    Uploads go through shared memory, so pinning would gain nothing. torch would request an
    allocator of pinned memory from this device, and Python can't provide one.
    """
    return source


def _refuse_layout(func: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Raise NotImplementedError for an op on sparse, quantized or nested tensors."""
    return refuse_layout(None, func, args, kwargs)


def _copy_from_and_resize(source: torch.Tensor, target: torch.Tensor) -> Any:
    """Record ``target.copy_(source)``; a lazy target keeps its shape."""
    return _copy_from(source, target)


# -- the device module: torch.lazygt ---------------------------------------------------------


class DeviceModule(ModuleType):
    """``torch.lazygt``: the device module that torch expects of a backend."""

    #: read by torch.utils.checkpoint before it saves the generator's state
    _initialized = True

    def is_initialized(self) -> bool:
        """Return True: there is nothing to initialise."""
        return True

    def is_available(self) -> bool:
        """Return True: a session can always be opened."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        """Return 1 inside a session, which shows its workers as one device; else 0."""
        return 1 if session_stack else 0

    def current_device(self) -> int:
        """Return 0."""
        return 0

    def set_device(self, device: Any) -> None:
        """Raise RuntimeError for a device other than 0."""
        index = torch.device(device).index if not isinstance(device, int) else device
        if index not in (None, 0):
            raise RuntimeError(f"lazygt has one device, lazygt:0; got {device!r}")

    def synchronize(self, device: Any = None) -> None:
        """Ship the recorded ops and wait for them."""
        if session_stack:
            session_stack[-1].synchronize()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that ``torch.autocast("lazygt")`` may use."""
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        """Seed the session's generator (no sync point)."""
        if session_stack:
            session_stack[-1].recorder.generator.manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generator of every device, as ``torch.manual_seed`` asks."""
        self.manual_seed(seed)

    def get_rng_state(self, device: Any = NAME) -> torch.Tensor:
        """Return the generator's state as a lazy tensor of bytes (no sync point).

        Without a session the state is empty, for code that keeps and restores the state of every
        device around something on the CPU.
        """
        if not session_stack:
            return torch.empty(0, dtype=torch.uint8)
        return recorder().generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = NAME) -> None:
        """Set the generator's state (a recorded op)."""
        if not session_stack and not state.numel():
            return
        recorder().generator.set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return a list of one state: there is one device."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        """Set the state of the one device."""
        self.set_rng_state(states[0])

    class device:  # noqa: N801 - torch's own name
        """Context manager that selects a device; there is only one."""

        def __init__(self, device: Any) -> None:
            self.idx = 0

        def __enter__(self) -> None:
            return None

        def __exit__(self, *_: Any) -> None:
            return None


# -- torch.load(map_location="lazygt") ----------------------------------------------------------


class _LoadedStorage(torch.UntypedStorage):
    """CPU storage on its way to the workers.

    torch.load makes an empty tensor on its device and calls ``set_`` with the storage; the bytes
    are uploaded there, once a storage, so tensors that share one in the file share one here.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Device of the tensors that will be made of the storage."""
        return tensor.DEVICE_0


def _deserialize(storage: Any, location: str) -> Any:
    """Prepare a storage for upload if ``location`` is lazygt, else return None (``torch.load``)."""
    if location != NAME and not location.startswith(f"{NAME}:"):
        return None
    recorder()
    torch.lazygt.set_device(location)  # type: ignore[attr-defined]
    storage.__class__ = _LoadedStorage
    return storage


def _no_tag(storage: Any) -> str | None:
    """Return None: no storage is saved as lying on lazygt, since checkpoints have CPU tensors."""
    return None


# -- registration ----------------------------------------------------------------------------


def register() -> None:
    """Register the device with torch; called once, at import."""
    module = DeviceModule(f"torch.{NAME}")
    rename_privateuse1_backend(NAME)
    generate_methods_for_privateuse1_backend()
    torch._register_device_module(NAME, module)
    sys.modules[f"torch.{NAME}"] = module
    any_namespace = torch.library.Library("_", "IMPL")
    if NATIVE is None:
        torch._C._acc.register_python_privateuseone_hook(_hook)
        torch._C._acc.register_python_privateuseone_device_guard(_guard)
        any_namespace.fallback(_fallback, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Any]] = {
        "_copy_from": _copy_from,
        "_efficientzerotensor": _zero_tensor,
        "empty_permuted": _empty_permuted,
        "_copy_from_and_resize": _copy_from_and_resize,
    }
    for name, kernel in kernels.items():
        aten.impl(name, kernel, "PrivateUse1")
    aten.impl("_pin_memory", _pin_memory, "CPU")
    for key in ("SparsePrivateUse1", "SparseCsrPrivateUse1", "QuantizedPrivateUse1",
                "NestedTensorPrivateUse1"):  # fmt: skip
        any_namespace.fallback(_refuse_layout, key)
    sparse = torch.ops.aten._sparse_compressed_tensor_unsafe.default
    # torch would decompose the op into a sparse tensor of lazy indices and values
    aten.impl(sparse, functools.partial(_refuse_layout, sparse), "SparseCsrPrivateUse1")
    autocast.fall_through(any_namespace)
    _libraries.extend((any_namespace, aten))
    _libraries.append(register_decompositions(_fallback if NATIVE is None else None))
    _libraries.append(register_derivatives())
    _libraries.append(register_recurrent())
    _libraries.append(autocast.register_autocast())
    if NATIVE is not None:
        bridge.connect()
        written = {*kernels, *DECOMPOSED, *RECURRENT}
        NATIVE.register_device(written, set(CPU_KERNELS), _without_session)
    derivatives.register_optimizers()
    # before torch's own (priority 23), which asks for a storage in this process and crashes
    torch.serialization.register_package(9, _no_tag, _deserialize)
    tensor.connect(
        _torch_dispatch,
        Above(swap.move_to_host, autograd.deferring, copies.deep_copy, copies.saved_form),
    )
    registry.note_defined()
    _ALWAYS.apply()
    multiprocessing.register_reducers()
    torch_compile.patch_dynamo()
