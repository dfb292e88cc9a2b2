"""Data-dependent results: only the values can tell their shapes, so lazygt ships and asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lazygt.errors import ProtocolError
from lazygt.graph.ops import OpFacts, returned_write
from lazygt.record.trace import Trace, written_tensors
from lazygt.record.views import write

if TYPE_CHECKING:
    from lazygt.record.recorder import Recorder


def ask(
    recorder: Recorder,
    trace: Trace,
    f: OpFacts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Results that only the values can tell: ship the trace and ask."""
    reply = recorder.sink.ship(trace, f"data-dependent: {f.name}", None, True)
    targets = list(written_tensors(f, args, kwargs))
    results = sum(kind[0] != "w" for kind in f.outputs)
    if (len(reply.returned), len(reply.written)) != (results, len(targets)):
        raise ProtocolError(f"worker 0 told of other results than {f.name} has")
    for target, (meta, remote) in zip(targets, reply.written, strict=True):
        if meta.shape != tuple(target.shape):
            recorder.resized(target, meta)
        if target._view is None:
            target._storage.remote, target._storage.serial = remote, 0
            target._storage.blank = False
        else:
            value = recorder.remote_tensor(meta, remote)
            recorder.index_of(target)  # a new trace has begun: what it is a view of enters
            write(recorder, target, recorder.index_of(value))
    out: list[Any] = []
    fresh = iter(reply.returned)
    for position, kind in enumerate(f.outputs):
        if kind[0] == "w":
            which = returned_write(f, position)
            out.append(kwargs[which] if isinstance(which, str) else args[which])
        else:
            out.append(_received(recorder, next(fresh)))
    if not out:
        return None
    return out[0] if len(out) == 1 else tuple(out)


def _received(recorder: Recorder, item: Any) -> Any:
    """A result of a dynamic op: a tensor (meta and value), a list, or a Python value."""
    if isinstance(item, list):
        return [_received(recorder, one) for one in item]
    if isinstance(item, tuple):
        return recorder.remote_tensor(*item)
    return item
