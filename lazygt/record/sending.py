"""Lazy tensors sent by ``multiprocessing``: they arrive as CPU tensors with their values.

Another process has no part in the session, so the values are fetched when a tensor is pickled: a
sync point. A queue pickles in a thread of its own, where an error is lost and the reader waits for
good; so ``put`` itself pickles objects that hold lazy tensors.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from multiprocessing import queues
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn import Parameter
from torch.utils.hooks import warn_if_has_hooks

from lazygt.record.context import was_used
from lazygt.record.copies import saved_form
from lazygt.record.dataloader import lazy_tensors
from lazygt.record.patches import Patch
from lazygt.record.tensor import LazyTensor, is_lazy

#: Process that is being started -> the CPU tensors among its arguments.
_handed_on: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


def register_reducers() -> None:
    """Register ``multiprocessing``'s reducers of tensors, lazy ones among them."""
    for cls in (torch.Tensor, Parameter, LazyTensor):
        ForkingPickler.register(cls, _reduce)


def _reduce(t: torch.Tensor) -> Any:
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
    starting = get_spawning_popen()
    if starting is not None:  # it hands on descriptors of the memory when it has pickled all
        _handed_on.setdefault(starting, []).append(copy)
    return reduce_tensor(copy)


class _Pickled:
    """Object that was pickled already; unpickling gives the object itself."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return pickle.loads, (self._data,)


def _sendable(queue: Any, item: Any) -> Any:
    """Return an item for the thread of a queue to send.

    Raises:
        Exception: the item can't be pickled, and the queue would tell nobody.
    """
    if not was_used() or not lazy_tensors(((item,),)):
        return item
    try:
        return _Pickled(bytes(ForkingPickler.dumps(item)))
    except Exception:
        base: Any = queues.Queue
        if type(queue)._on_queue_feeder_error is not base._on_queue_feeder_error:
            return item  # the queue tells the waiting thread, as that of concurrent.futures does
        raise


def _putting(cls: Any) -> Callable[..., None]:
    own = cls.put

    @functools.wraps(own)
    def put(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
        own(self, _sendable(self, obj), *args, **kwargs)

    return put


_IN_A_THREAD = "an error of the thread that pickles reaches nobody"
PATCHES = tuple(
    Patch(cls, "put", _putting(cls), _IN_A_THREAD) for cls in (queues.Queue, queues.JoinableQueue)
)
