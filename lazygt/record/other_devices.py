"""Errors for programs written for torch's own devices, with the code for a session.

``.cuda()`` and ``device="cuda"`` without a GPU raise them, and so do torch's wrappers of modules
for several of its devices. ``torch.cuda.synchronize()`` waits for the workers' GPUs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch._utils import _get_available_device_type as _device_type

from lazygt.graph.source import with_line
from lazygt.record.context import NAME, OpenSession, current_session
from lazygt.record.patches import Patch
from lazygt.record.tensor import is_lazy

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
IN_SESSIONS = (
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
