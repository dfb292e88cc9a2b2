"""lazygt: deferred execution for PyTorch.

with lazygt.session() as s:
    ...ordinary torch code...
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lazygt import transfer
from lazygt.errors import (
    CodeError,
    CollectiveMismatch,
    ExecutionError,
    GatherWarning,
    GraphError,
    IdleWarning,
    LazyGTError,
    NoSession,
    PipelineWarning,
    ProtocolError,
    SecurityError,
    WorkerDied,
    WorkerFrozen,
)
from lazygt.transfer import transfer_weights

__version__ = "0.1.0"

#: Where the names stand that are loaded when they are asked for: what looks at sessions, and in a
#: worker all that users name. A worker process runs plans; the front (device, recorder, session)
#: is the client's alone.
_WHERE = {
    "LazyTensor": "lazygt.record.tensor",
    "Session": "lazygt.session",
    "apply": "lazygt.record.functions",
    "column_parallel": "lazygt.parallel.styles",
    "current": "lazygt.session",
    "data_parallel": "lazygt.parallel.tensor_parallel",
    "distribute": "lazygt.parallel.distribute",
    "explain": "lazygt.observe.explain",
    "fully_shard": "lazygt.parallel.fsdp",
    "parallelize": "lazygt.parallel.tensor_parallel",
    "prepare_module_input": "lazygt.parallel.styles",
    "profile": "lazygt.observe.timeline",
    "redistribute": "lazygt.parallel.distribute",
    "render": "lazygt.observe.picture",
    "row_parallel": "lazygt.parallel.styles",
    "sequence_parallel": "lazygt.parallel.styles",
    "session": "lazygt.session",
    "shard_optimizer_state": "lazygt.parallel.optimizer_state",
    "stage": "lazygt.parallel.pipeline",
    "to_networkx": "lazygt.observe.picture",
    "vocab_parallel": "lazygt.parallel.styles",
    "why": "lazygt.observe.why",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lazygt' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), "Session" if name == "session" else name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from lazygt.observe.explain import explain
    from lazygt.observe.picture import render, to_networkx
    from lazygt.observe.timeline import profile
    from lazygt.observe.why import why
    from lazygt.record.tensor import Viewer as _Viewer

if os.environ.get("LAZYGT_WORKER") != "1":
    from lazygt.parallel.distribute import distribute, redistribute
    from lazygt.parallel.fsdp import fully_shard
    from lazygt.parallel.optimizer_state import register as _follow
    from lazygt.parallel.optimizer_state import shard_optimizer_state
    from lazygt.parallel.pipeline import stage
    from lazygt.parallel.styles import (
        column_parallel,
        prepare_module_input,
        row_parallel,
        sequence_parallel,
        vocab_parallel,
    )
    from lazygt.parallel.tensor_parallel import data_parallel, parallelize
    from lazygt.record.device import register as _register
    from lazygt.record.functions import apply
    from lazygt.record.registrations import watch as _watch
    from lazygt.record.tensor import LazyTensor
    from lazygt.record.tensor import show_with as _show_with
    from lazygt.session import Session, current
    from lazygt.session import Session as session  # noqa: N813 - used like torch.device

    def _notebook() -> _Viewer:
        from lazygt.observe import notebook  # why: only notebooks ask

        return notebook

    _show_with(_notebook)
    _register()
    _follow()
    _watch()

__all__ = [
    "CodeError",
    "CollectiveMismatch",
    "ExecutionError",
    "GatherWarning",
    "GraphError",
    "IdleWarning",
    "LazyGTError",
    "LazyTensor",
    "NoSession",
    "PipelineWarning",
    "ProtocolError",
    "SecurityError",
    "Session",
    "WorkerDied",
    "WorkerFrozen",
    "apply",
    "column_parallel",
    "current",
    "data_parallel",
    "distribute",
    "explain",
    "fully_shard",
    "parallelize",
    "prepare_module_input",
    "profile",
    "redistribute",
    "render",
    "row_parallel",
    "sequence_parallel",
    "session",
    "shard_optimizer_state",
    "stage",
    "to_networkx",
    "transfer",
    "transfer_weights",
    "vocab_parallel",
    "why",
]
