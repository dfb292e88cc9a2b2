"""lazygt: deferred execution for PyTorch.

with lazygt.session() as s:
    ...ordinary torch code...
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lazygt.config import VERSION as _VERSION
from lazygt.errors import (
    AccessDenied,
    CheckpointError,
    CodeError,
    CollectiveMismatch,
    CompileWarning,
    ConnectionLost,
    DeviceLost,
    ExecutionError,
    GangTooLarge,
    GatherWarning,
    GraphError,
    IdleWarning,
    LazyGTError,
    MachineError,
    NoSession,
    OverQuota,
    PipelineWarning,
    PoolDraining,
    PoolError,
    PoolFull,
    ProtocolError,
    SecurityError,
    SessionEnded,
    VersionMismatch,
    WorkerDied,
    WorkerFrozen,
)
from lazygt.uncollected import uncollected as _uncollected

__version__ = _VERSION

#: Where the names stand that are loaded when they are asked for: what looks at sessions, torch's
#: placements (0.3 s), and in a worker all that users name. A worker process runs plans; the front
#: (device, recorder, session) is the client's alone.
_WHERE = {
    "ColwiseParallel": "lazygt.parallel.styles",
    "FSDPModule": "lazygt.parallel.fsdp_module",
    "LazyTensor": "lazygt.record.tensor",
    "ParallelStyle": "lazygt.parallel.styles",
    "Pool": "lazygt.pool.pool_client",
    "Partial": "torch.distributed.tensor",
    "PrepareModuleInput": "lazygt.parallel.styles",
    "PrepareModuleInputOutput": "lazygt.parallel.styles",
    "PrepareModuleOutput": "lazygt.parallel.styles",
    "Replicate": "torch.distributed.tensor",
    "RowwiseParallel": "lazygt.parallel.styles",
    "SequenceParallel": "lazygt.parallel.styles",
    "Session": "lazygt.session",
    "Shard": "torch.distributed.tensor",
    "VocabParallel": "lazygt.parallel.styles",
    "apply": "lazygt.record.custom.functions",
    "current": "lazygt.session",
    "data_parallel": "lazygt.parallel.tensor_parallel",
    "distribute": "lazygt.parallel.distribute",
    "explain": "lazygt.observe.explain",
    "fully_shard": "lazygt.parallel.fsdp",
    "local_batch_norm": "lazygt.parallel.batch_norm",
    "parallelize_module": "lazygt.parallel.tensor_parallel",
    "profile": "lazygt.observe.timeline",
    "redistribute": "lazygt.parallel.distribute",
    "render": "lazygt.observe.picture",
    "resume": "lazygt.checkpoint.program",
    "session": "lazygt.session",
    "simulate": "lazygt.simulation.program",
    "shard_optimizer_state": "lazygt.parallel.fsdp",
    "stage": "lazygt.parallel.pipeline",
    "sweep": "lazygt.sweeps.running",
    "to_networkx": "lazygt.observe.picture",
    "why": "lazygt.observe.why",
}

#: Names that torch has another word for -> that word.
_TORCHS = {
    "column_parallel": "ColwiseParallel",
    "parallelize": "parallelize_module",
    "prepare_module_input": "PrepareModuleInput",
    "row_parallel": "RowwiseParallel",
    "sequence_parallel": "SequenceParallel",
    "vocab_parallel": "VocabParallel",
}


def __getattr__(name: str) -> Any:
    if name == "serving":  # a room of its own, which sessions don't need
        return import_module("lazygt.serving")
    if name not in _WHERE:
        torchs = f": use lazygt.{_TORCHS[name]}" if name in _TORCHS else ""
        raise AttributeError(f"module 'lazygt' has no attribute {name!r}{torchs}")
    value = getattr(import_module(_WHERE[name]), "Session" if name == "session" else name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from torch.distributed.tensor import Partial, Replicate, Shard

    from lazygt import serving
    from lazygt.observe.explain import explain
    from lazygt.observe.picture import render, to_networkx
    from lazygt.observe.timeline import profile
    from lazygt.observe.why import why
    from lazygt.pool.pool_client import Pool
    from lazygt.record.tensor import Viewer as _Viewer
    from lazygt.simulation.program import simulate
    from lazygt.sweeps.running import sweep

#: ``lazygt top`` looks at a session from outside, and is to be there at once: without torch.
_LOOKS_ON = os.path.basename((sys.argv or [""])[0]) == "lazygt" and sys.argv[1:2] == ["top"]

with _uncollected():
    if not _LOOKS_ON:
        from lazygt import transfer
        from lazygt.transfer import transfer_weights

    if not _LOOKS_ON and os.environ.get("LAZYGT_WORKER") != "1":
        from lazygt.checkpoint.program import resume
        from lazygt.parallel.batch_norm import local_batch_norm
        from lazygt.parallel.distribute import distribute, redistribute
        from lazygt.parallel.fsdp import fully_shard, shard_optimizer_state
        from lazygt.parallel.fsdp_module import FSDPModule
        from lazygt.parallel.pipeline import stage
        from lazygt.parallel.styles import (
            ColwiseParallel,
            ParallelStyle,
            PrepareModuleInput,
            PrepareModuleInputOutput,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
            VocabParallel,
        )
        from lazygt.parallel.tensor_parallel import data_parallel, parallelize_module
        from lazygt.record.custom.functions import apply
        from lazygt.record.device import register as _register
        from lazygt.record.tensor import LazyTensor
        from lazygt.record.tensor import show_with as _show_with
        from lazygt.session import Session, current
        from lazygt.session import Session as session  # noqa: N813 - used like torch.device

        def _notebook() -> _Viewer:
            from lazygt.observe import notebook  # why: only notebooks ask

            return notebook

        _show_with(_notebook)
        _register()

__all__ = [
    "AccessDenied",
    "CheckpointError",
    "CodeError",
    "CollectiveMismatch",
    "ColwiseParallel",
    "CompileWarning",
    "ConnectionLost",
    "DeviceLost",
    "ExecutionError",
    "FSDPModule",
    "GangTooLarge",
    "GatherWarning",
    "GraphError",
    "IdleWarning",
    "LazyGTError",
    "LazyTensor",
    "MachineError",
    "NoSession",
    "OverQuota",
    "ParallelStyle",
    "Partial",
    "PipelineWarning",
    "Pool",
    "PoolDraining",
    "PoolError",
    "PoolFull",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ProtocolError",
    "Replicate",
    "RowwiseParallel",
    "SecurityError",
    "SequenceParallel",
    "Session",
    "SessionEnded",
    "Shard",
    "VersionMismatch",
    "VocabParallel",
    "WorkerDied",
    "WorkerFrozen",
    "apply",
    "current",
    "data_parallel",
    "distribute",
    "explain",
    "fully_shard",
    "local_batch_norm",
    "parallelize_module",
    "profile",
    "redistribute",
    "render",
    "resume",
    "serving",
    "session",
    "shard_optimizer_state",
    "simulate",
    "stage",
    "sweep",
    "to_networkx",
    "transfer",
    "transfer_weights",
    "why",
]
