"""Changes of torch's flags while sessions are open: ops recorded before are shipped first.

torch has no callback for them, so its setters are wrapped. No flag is read while ops are recorded
or traces are shipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._utils import _get_available_device_type as _device_type
from torch.backends import ContextProp

from lazygt.graph.flags import flushes_denormals
from lazygt.graph.source import with_line
from lazygt.record.context import NAME, OpenSession, current_session, session_stack
from lazygt.record.patches import Patch
from lazygt.record.tensor import is_lazy

# -- errors for programs written for torch's own devices, with the code for a session --------------
# ``.cuda()`` and ``device="cuda"`` without a GPU raise them, and so do torch's wrappers of
# modules for several of its devices. ``torch.cuda.synchronize()`` waits for the workers' GPUs.

_init_cuda: Any = torch.cuda._lazy_init
_CUDA = (
    "In a lazygt session the device is 'lazygt', whatever the workers compute on: write "
    ".to('lazygt') for .cuda() and device='lazygt' for device='cuda', or leave the device out"
)


@functools.wraps(_init_cuda)
def _init_cuda_or_explain() -> None:
    """Initialise CUDA (``torch.cuda._lazy_init``); an error names the session's device."""
    try:
        _init_cuda()
    except (AssertionError, RuntimeError) as error:
        error.args = (with_line(f"{error}. {_CUDA}"),)
        raise


_synchronize_cuda: Any = torch.cuda.synchronize


@functools.wraps(_synchronize_cuda)
def _synchronize_workers(device: Any = None) -> None:
    """Wait also for the GPUs of a session's workers (``torch.cuda.synchronize``)."""
    session = current_session()
    if session is not None and session.device_type == "cuda" and not _is_inline(session):
        session.synchronize()
        if not torch.cuda.is_initialized():
            return  # this process has nothing there, and need not open a context
    _synchronize_cuda(device)


def _is_inline(session: OpenSession) -> bool:
    """Return whether the worker is in this process: it calls ``torch.cuda.synchronize``."""
    return session.config.launcher == "inline"


def _refusing_lazy_modules(wrapper: Any) -> Any:
    """Wrap ``__init__`` of DataParallel or DDP: lazy modules raise NotImplementedError."""
    init = wrapper.__init__

    @functools.wraps(init)
    def init_or_refuse(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if _would_be_lazy(wrapper, module):
            raise NotImplementedError(with_line(
                f"{wrapper.__name__} of a module on device 'lazygt': a session shows its workers "
                f"as one device. Open it with lazygt.session(mesh={{'data': 2}}), which starts 2 "
                f"workers, write lazygt.data_parallel(module) in place of the wrapper, and cut "
                f"batches with lazygt.distribute(batch, {{'data': lazygt.Shard(0)}})"
            ))  # fmt: skip
        init(self, module, *args, **kwargs)

    return init_or_refuse


def _would_be_lazy(wrapper: Any, module: nn.Module) -> bool:
    """Return whether the wrapper would get a lazy module, or make the module lazy."""
    moves = wrapper is nn.DataParallel and _device_type() == NAME
    return moves or any(map(is_lazy, module.parameters()))


_WRAPPERS: tuple[Any, ...] = (nn.DataParallel, nn.parallel.DistributedDataParallel)
DEVICE_PATCHES = (
    Patch(
        torch.cuda, "_lazy_init", _init_cuda_or_explain, "its error knows torch's own devices alone"
    ),
    Patch(torch.cuda, "synchronize", _synchronize_workers, "it knows this process's work alone"),
    *(
        Patch(
            wrapper,
            "__init__",
            _refusing_lazy_modules(wrapper),
            "it knows torch's own devices alone",
        )
        for wrapper in _WRAPPERS
    ),
)


# -- changes of torch's flags while sessions are open: ops recorded before are shipped first -------

#: Flags with a setter ``_set_NAME`` and a getter ``_get_NAME`` in ``torch._C``.
_NAMED = (
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cublas_allow_tf32",
    "cudnn_allow_tf32",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "deterministic_fill_uninitialized_memory",
    "float32_matmul_precision",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "onednn_allow_tf32",
)
_WHY = "what was recorded before a flag changes runs under the flags that it was recorded under"


def _watched(setter: Callable[..., Any], unchanged: Callable[..., bool]) -> Callable[..., Any]:
    """Wrap a setter of a flag: sessions ship their ops before, and read the flags after.

    Args:
        unchanged: predicate of the setter's arguments: the flag has this value already.
    """

    @functools.wraps(setter)
    def watched(*args: Any, **kwargs: Any) -> Any:
        """Ship the sessions' ops if the flag changes, set the flag, and update the sessions."""
        sessions = tuple(session_stack)
        try:
            if not _is_certainly_unchanged(unchanged, args, kwargs):
                for session in sessions:
                    session.recorder.ship_before_flags_change()
        finally:
            try:
                result = setter(*args, **kwargs)
            finally:
                for session in sessions:
                    session.recorder.update_flags()
        return result

    return watched


def _is_certainly_unchanged(unchanged: Callable[..., bool], args: Any, kwargs: Any) -> bool:
    """Return ``unchanged(*args, **kwargs)``; False if torch can't tell."""
    try:
        return unchanged(*args, **kwargs)
    except (RuntimeError, TypeError):  # torch names no value, or the setter refuses these
        return False


def _has(getter: Callable[[], Any]) -> Callable[..., bool]:
    """Return a predicate: the getter's value equals the setter's arguments."""
    return lambda *args: bool(getter() == (args[0] if len(args) == 1 else args))


def _is_deterministic(mode: bool, *, warn_only: bool = False) -> bool:
    warns = torch._C._get_deterministic_algorithms_warn_only()
    return torch._C._get_deterministic_algorithms() == mode and warns == warn_only


def _has_precision(backend: str, op: str, value: str) -> bool:
    return torch._C._get_fp32_precision_getter(backend, op) == value


def _never(*args: Any) -> bool:
    return False


def _patch(owner: Any, name: str, unchanged: Callable[..., bool]) -> Patch:
    """Return the patch of one setter."""
    return Patch(owner, name, _watched(getattr(owner, name), unchanged), _WHY)


_C = torch._C
FLAG_PATCHES = (
    *[_patch(_C, f"_set_{name}", _has(getattr(_C, f"_get_{name}"))) for name in _NAMED],
    _patch(_C, "_set_default_dtype", _has(torch.get_default_dtype)),
    _patch(_C, "_set_default_tensor_type", _never),
    _patch(_C, "_set_deterministic_algorithms", _is_deterministic),
    _patch(_C, "_set_fp32_precision_setter", _has_precision),
    # modules of torch.backends refer to some setters by names of their own
    _patch(ContextProp, "__set__", lambda prop, module, value: prop.getter() == value),
    *[_patch(owner, "set_num_threads", _has(torch.get_num_threads)) for owner in (torch, _C)],
    *[_patch(owner, "set_flush_denormal", _has(flushes_denormals)) for owner in (torch, _C)],
)
