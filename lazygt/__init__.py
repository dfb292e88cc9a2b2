"""lazygt: deferred execution for PyTorch.

with lazygt.session() as s:
    ...ordinary torch code...
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

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

#: What users name stands in these, and in ``errors`` and ``transfer``.
_FRONT = (
    "session", "functions", "fsdp", "optimizer_state", "pipeline", "sharding", "styles",
    "tensor", "tensor_parallel",
)  # fmt: skip

# A worker process runs plans; the front (device, recorder, session) is the client's alone.
if os.environ.get("LAZYGT_WORKER") != "1":
    from lazygt import faces as _faces  # noqa: F401 - graphs, plans and sessions show themselves
    from lazygt.device import register as _register
    from lazygt.fsdp import fully_shard
    from lazygt.functions import apply
    from lazygt.optimizer_state import register as _follow
    from lazygt.optimizer_state import shard_optimizer_state
    from lazygt.pipeline import stage
    from lazygt.registrations import watch as _watch
    from lazygt.session import Session, current
    from lazygt.session import Session as session  # noqa: N813 - used like torch.device
    from lazygt.sharding import distribute, redistribute
    from lazygt.styles import (
        column_parallel,
        prepare_module_input,
        row_parallel,
        sequence_parallel,
        vocab_parallel,
    )
    from lazygt.tensor import LazyTensor
    from lazygt.tensor_parallel import data_parallel, parallelize

    _register()
    _follow()
    _watch()
else:

    def __getattr__(name: str) -> Any:
        """What a module of the user's names that a worker imports; nothing is registered here."""
        if name not in __all__:
            raise AttributeError(f"module 'lazygt' has no attribute {name!r}")
        wanted = "Session" if name == "session" else name
        fronts = map(import_module, (f"lazygt.{each}" for each in _FRONT))
        found = next(getattr(front, wanted) for front in fronts if hasattr(front, wanted))
        globals()[name] = found
        return found


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
    "fully_shard",
    "parallelize",
    "prepare_module_input",
    "redistribute",
    "row_parallel",
    "sequence_parallel",
    "session",
    "shard_optimizer_state",
    "stage",
    "transfer",
    "transfer_weights",
    "vocab_parallel",
]
