"""Changes of torch's flags while sessions are open: ops recorded before are shipped first.

torch has no callback for them, so its setters are wrapped. No flag is read while ops are recorded
or traces are shipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.backends import ContextProp

from lazygt.graph.flags import flushes_denormals
from lazygt.record.context import session_stack
from lazygt.record.patches import Patch

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
                    session.recorder.take_flags()
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
IN_SESSIONS = (
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
