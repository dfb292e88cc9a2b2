"""Whether a new tensor goes to the open session, or where something else says."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._device

from lazygt.record.context import session_stack


def stays_free(kwargs: dict[str, Any]) -> bool:
    """Whether nothing else says where the tensor is to be."""
    if not session_stack:  # a module that was imported in a session keeps what it was given there
        return False
    lock: Any = session_stack[-1].recorder.lock
    if lock._is_owned():  # lazygt itself, or torch working for it
        return False
    if torch._C._len_torch_function_stack() and _inner_device_context():
        return False
    generator = kwargs.get("generator")
    if generator is not None and not session_stack[-1].recorder.generator.is_own(generator):
        return False
    out = kwargs.get("out")
    return out is None


def _inner_device_context() -> bool:
    """Whether the user has set a device of his own (``with torch.device("cpu")``)."""
    return any(
        isinstance(torch._C._get_function_stack_at(i), torch.utils._device.DeviceContext)
        for i in range(torch._C._len_torch_function_stack())
    )
