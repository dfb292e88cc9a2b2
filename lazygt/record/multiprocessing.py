"""Lazy tensors sent by ``multiprocessing``: they arrive as CPU tensors with their values.

Another process has no part in the session, so the values are fetched when a tensor is pickled: a
sync point. A queue pickles in its own thread, where an error is lost and the reader waits forever;
so ``put`` itself pickles objects that hold lazy tensors.
"""

from __future__ import annotations

import functools
import gc
import pickle
from collections import deque
from collections.abc import Callable
from multiprocessing import queues
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, dataloader
from torch.utils.hooks import warn_if_has_hooks

from lazygt.record.context import session_stack, was_used
from lazygt.record.copies import saved_form
from lazygt.record.patches import Patch
from lazygt.record.swap import on_host
from lazygt.record.tensor import DEVICE_0, LazyTensor, is_lazy

# -- DataLoader workers ----------------------------------------------------------------------------
# A DataLoader's worker process has no session. While a loader starts its processes, the lazy
# tensors that it refers to are CPU tensors, and the processes inherit those. Their batches are
# uploaded to the session, where the dataset is, like the batches of a loader without processes.

_iterator: Any = dataloader._MultiProcessingDataLoaderIter
_original_init: Any = _iterator.__init__
_process_data: Any = _iterator._process_data
#: Maximum number of objects searched for lazy tensors; a dataset has them near its root.
_MAX_OBJECTS = 100_000
_LEAF_TYPES = (torch.Tensor, ModuleType, type, FrameType, CodeType, str, bytes, int, float)


def _init_iterator(self: Any, loader: DataLoader[Any]) -> None:
    """Start a loader's worker processes with the dataset's lazy tensors as CPU tensors."""
    roots = (loader.dataset, loader.collate_fn, loader.worker_init_fn)
    lazy = lazy_tensors(roots) if session_stack else []
    self._is_of_session = bool(lazy)
    with on_host(lazy):
        _original_init(self, loader)


def _process_batch(self: Any, data: Any, worker_id: int) -> Any:
    """Return the loader's next batch, uploaded if the dataset is in the session."""
    batch = _process_data(self, data, worker_id)
    if self._is_of_session and session_stack:
        return tree_map_only(torch.Tensor, lambda t: t.to(DEVICE_0), batch)
    return batch


def lazy_tensors(roots: tuple[Any, ...]) -> list[LazyTensor]:
    """Return the lazy tensors reachable from objects: breadth-first search of references."""
    lazy, seen, pending = [], {id(root) for root in roots}, deque(roots)
    while pending and len(seen) < _MAX_OBJECTS:
        for referent in _referents(pending.popleft()):
            if id(referent) in seen:
                continue
            seen.add(id(referent))
            if is_lazy(referent):
                lazy.append(referent)
            elif not isinstance(referent, _LEAF_TYPES):
                pending.append(referent)
    return lazy


def _referents(obj: Any) -> list[Any]:
    """Return the objects that an object refers to directly; of a function not its globals."""
    if isinstance(obj, FunctionType):  # not its globals
        return [obj.__closure__, obj.__defaults__, obj.__kwdefaults__]
    return gc.get_referents(obj)


_NO_SESSION = "a loader's worker process has no session, and inherits the dataset"
_LOADER_PATCHES = (
    Patch(_iterator, "__init__", _init_iterator, _NO_SESSION),
    Patch(_iterator, "_process_data", _process_batch, _NO_SESSION),
)


# -- pickled tensors -------------------------------------------------------------------------------

#: Process that is being started -> the CPU tensors among its arguments.
_sent_copies: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


def register_reducers() -> None:
    """Register ``multiprocessing``'s reducers of tensors, lazy ones among them."""
    for cls in (torch.Tensor, Parameter, LazyTensor):
        ForkingPickler.register(cls, _reduce)


def _reduce(t: torch.Tensor) -> Any:
    """Reduce a tensor for ``ForkingPickler``; a lazy one as its CPU copy."""
    if not is_lazy(t):
        return reduce_tensor(t)
    if t.requires_grad and not t.is_leaf:
        raise RuntimeError(
            f"a tensor of shape {list(t.shape)} can't be sent to another process: it is the result "
            f"of a recorded forward pass (requires_grad=True, not a leaf), and autograd does not "
            f"cross processes. Send t.detach()"
        )
    warn_if_has_hooks(t)
    copy = saved_form(t)
    starting_process = get_spawning_popen()
    if starting_process is not None:  # the memory's descriptors are sent after all pickling
        _sent_copies.setdefault(starting_process, []).append(copy)
    return reduce_tensor(copy)


class _Pickled:
    """Object that is pickled already; unpickling returns the object itself."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self._data,)


def _sendable(queue: Any, item: Any) -> Any:
    """Return an item for a queue's thread to send, pickled if it holds lazy tensors.

    Raises:
        Exception: the item can't be pickled, and the queue would report this to nobody.
    """
    if not was_used() or not lazy_tensors(((item,),)):
        return item
    try:
        return _Pickled(bytes(ForkingPickler.dumps(item)))
    except Exception:
        base: Any = queues.Queue
        if type(queue)._on_queue_feeder_error is not base._on_queue_feeder_error:
            return item  # the queue reports errors, as that of concurrent.futures does
        raise


def _checking_put(cls: Any) -> Callable[..., None]:
    """Wrap a queue's ``put``: items with lazy tensors are pickled by the caller."""
    original = cls.put

    @functools.wraps(original)
    def put(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        original(self, _sendable(self, obj), *args, **kwargs)

    return put


_IN_A_THREAD = "an error of the thread that pickles reaches nobody"
PATCHES = (
    *_LOADER_PATCHES,
    *(
        Patch(cls, "put", _checking_put(cls), _IN_A_THREAD)
        for cls in (queues.Queue, queues.JoinableQueue)
    ),
)
