"""Backward passes, and the delivery of exceptions raised in them.

torch's device guard for a Python device calls Python in a noexcept destructor. When a Python
exception passes that, the process ends: one raised by a backward op, a hook, or the hook that
unpacks a saved tensor. So an exception raised there is put aside, the rest of the pass is skipped,
and ``run_backward`` raises it when the engine has returned. Ctrl-C is not raised there at all: see
``runtime.interrupts``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from lazygt.errors import LazyGTError
from lazygt.graph.source import PACKAGE
from lazygt.record.context import recorder, session_stack
from lazygt.record.host_values import blank
from lazygt.record.patches import Patch
from lazygt.record.recorder import Recorder
from lazygt.record.tensor import NATIVE, is_lazy
from lazygt.runtime.interrupts import DEFER_INTERRUPT

# -- torch's accelerator: lazygt in threads with a session, CUDA in all others ---------------------
# torch has one accelerator a process, a private backend before CUDA. Autograd takes its streams
# from the accelerator alone, so a backward pass of CUDA tensors fails wherever device lazygt is
# registered (pytorch/pytorch#161129). The extension makes torch decide by thread instead
# (``accelerator.cpp``).

#: The engine's assertion about a node on a device that is not the accelerator.
_ASSERT = "opt_ready_stream && opt_parent_stream"


def _shared() -> bool:
    """Make torch choose its accelerator by thread; return False if it can't, or has no CUDA."""
    return bool(torch.backends.cuda.is_built() and NATIVE and NATIVE.share_accelerator())


SHARED = _shared()


def select(lazygt_current: bool) -> None:
    """Set this thread's accelerator: lazygt, or the one that torch has without lazygt.

    Args:
        lazygt_current: True for lazygt.
    """
    if SHARED:
        NATIVE.take_accelerator(lazygt_current)


@contextmanager
def selected(lazygt_current: bool) -> Iterator[None]:
    """Context in which ``select(lazygt_current)`` holds; the earlier choice is restored after it.

    Raises:
        LazyGTError: CUDA tensors have a backward pass, and torch can't decide by thread.
    """
    if SHARED:
        before = NATIVE.take_accelerator(lazygt_current)
        try:
            yield
        finally:
            NATIVE.take_accelerator(before)
        return
    try:
        yield
    except RuntimeError as error:
        if _ASSERT not in str(error):
            raise
        raise LazyGTError(
            "torch runs no backward pass of CUDA tensors in a process with another accelerator, "
            "which device lazygt is (pytorch/pytorch#161129). Build lazygt's extension (run "
            "`lazygt build-native`), with which both work, or train on CUDA in a process that does "
            "not import lazygt."
        ) from error


# -- backward passes, and the delivery of exceptions raised in them --------------------------------

_autograd: Any = torch.autograd
_autograd_node = torch._C._current_autograd_node
#: torch's own way into the autograd engine
_engine_run_backward = _autograd._engine_run_backward
_node_hooks: Any = torch.autograd.function._HookMixin
_register_on_node = _node_hooks._register_hook
_saved_hooks: Any = torch.autograd.graph.saved_tensors_hooks
_set_up_saved_hooks = _saved_hooks.__init__


def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the engine for ``Tensor.backward``, ``autograd.backward`` or ``grad``.

    The engine runs on the caller's thread, as for CPU tensors, so the user's frames are on the
    stack. Replaces ``torch.autograd._engine_run_backward``.
    """
    if not (session_stack and any(is_lazy(t) for t in outputs)):
        with selected(False):
            return _engine_run_backward(outputs, *args, **kwargs)
    session_recorder = session_stack[-1].recorder
    nested = _autograd_node() is not None
    DEFER_INTERRUPT.adopt()
    if not nested:
        session_recorder.before_backward()
    try:
        with torch.autograd.set_multithreading_enabled(False), selected(True):
            result = _engine_run_backward(outputs, *args, **kwargs)
    except RuntimeError:
        session_recorder.raise_backward_error()
        raise
    session_recorder.raise_backward_error()
    if not nested:
        if kwargs.get("accumulate_grad"):
            session_recorder.after_backward()
        DEFER_INTERRUPT.deliver()
    return result


def called_by_engine() -> bool:
    """Return whether the autograd engine called this op without user code in between."""
    if _autograd_node() is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame is None or frame.f_code is _engine_run_backward.__code__


def deferred_error(active: Recorder, error: BaseException) -> Any:
    """Store a backward op's error on the recorder, to be raised after the pass.

    Returns:
        An object that can't become a tensor, so C++ raises an error with its class's name as text,
        and the pass ends.
    """
    active.backward_error = error
    return type(f"{type(error).__name__}: {error}", (), {})()


def _deferring(hook: Callable[..., Any], fallback: Callable[[], Any]) -> Callable[..., Any]:
    """Wrap a hook: under autograd, store its exception and return ``fallback()``."""

    if getattr(hook, "is_deferring", False):
        return hook

    @functools.wraps(hook, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        """Call the hook, or return ``fallback()`` after an error in the pass."""
        active = session_stack[-1].recorder if session_stack else None
        if active is None or _autograd_node() is None:
            return hook(*args, **kwargs)
        if active.backward_error is not None:
            return fallback()
        try:
            return hook(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again by run_backward
            _defer(active, error)
            return fallback()

    call.is_deferring = True  # type: ignore[attr-defined]
    return call


def _defer(active: Recorder, error: BaseException) -> None:
    """Store the first error of a backward pass; later ones follow from it."""
    if active.backward_error is None:  # else this one only follows from that
        active.backward_error = error


def deferring(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a gradient hook: under autograd, store its exception and keep the gradient as it is."""
    return _deferring(hook, lambda: None)


def _register_hook(backward_hooks: Any, hook: Callable[..., Any]) -> Any:
    """Register a wrapped hook on a node (replaces ``Node.register_hook``)."""
    return _register_on_node(backward_hooks, deferring(hook))


@functools.wraps(_set_up_saved_hooks)
def _init_saved_hooks(
    self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]
) -> None:
    """Initialise ``saved_tensors_hooks`` with a wrapped unpack hook."""
    unpack = _deferring(unpack_hook, lambda: blank(recorder(), (0,), None, None))
    _set_up_saved_hooks(self, pack_hook, unpack)


_NOEXCEPT = "what is raised in a backward pass must not pass C++ that is noexcept"
_DEFERRING = (
    Patch(_node_hooks, "_register_hook", staticmethod(_register_hook), _NOEXCEPT),
    Patch(_saved_hooks, "__init__", _init_saved_hooks, _NOEXCEPT),
)
PATCHES = (
    Patch(_autograd, "_engine_run_backward", run_backward, "its end is a sync point"),
    *(_DEFERRING if NATIVE is None else ()),
)


def move_hooks(t: torch.Tensor) -> None:
    """Register a tensor's hooks on its new TensorImpl, after a swap of TensorImpls."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(t, name)
        if hooks is not None:
            if NATIVE is None:
                hooks.update({number: deferring(hook) for number, hook in hooks.items()})
            setattr(t, name, hooks)  # torch hands them to the TensorImpl
