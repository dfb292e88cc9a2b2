"""DataLoaders with worker processes over a dataset in the session.

Such a process has no session. While a loader starts its processes, the lazy tensors that it holds
are CPU tensors, and the processes inherit those; their batches go to the session, where the dataset
is, as those of a loader without processes do.
"""

from __future__ import annotations

import gc
from collections import deque
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, dataloader

from lazygt.record.context import session_stack
from lazygt.record.patches import Patch
from lazygt.record.swap import on_host
from lazygt.record.tensor import DEVICE_0, LazyTensor, is_lazy

_iterator: Any = dataloader._MultiProcessingDataLoaderIter
_start: Any = _iterator.__init__
_process_data: Any = _iterator._process_data
#: Number of objects searched for lazy tensors; a dataset holds them near its top.
_MOST_OBJECTS = 100_000
_ENDS = (torch.Tensor, ModuleType, type, FrameType, CodeType, str, bytes, int, float)


def _starting(self: Any, loader: DataLoader[Any]) -> None:
    roots = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
    held = lazy_tensors(roots) if session_stack else []
    self._is_of_session = bool(held)
    with on_host(held):
        _start(self, loader)


def _processing(self: Any, data: Any, worker_id: int) -> Any:
    batch = _process_data(self, data, worker_id)
    if self._is_of_session and session_stack:
        return tree_map_only(torch.Tensor, lambda t: t.to(DEVICE_0), batch)
    return batch


def lazy_tensors(roots: tuple[Any, ...]) -> list[LazyTensor]:
    """Return the lazy tensors that objects hold, by any attributes, lists and closures."""
    lazy, seen, waiting = [], {id(root) for root in roots}, deque(roots)
    while waiting and len(seen) < _MOST_OBJECTS:
        for held in _held_by(waiting.popleft()):
            if id(held) in seen:
                continue
            seen.add(id(held))
            if is_lazy(held):
                lazy.append(held)
            elif not isinstance(held, _ENDS):
                waiting.append(held)
    return lazy


def _held_by(something: Any) -> list[Any]:
    if isinstance(something, FunctionType):  # not its globals
        return [something.__closure__, something.__defaults__, something.__kwdefaults__]
    return gc.get_referents(something)


_NO_SESSION = "a loader's worker process has no session, and inherits the dataset"
PATCHES = (
    Patch(_iterator, "__init__", _starting, _NO_SESSION),
    Patch(_iterator, "_process_data", _processing, _NO_SESSION),
)
