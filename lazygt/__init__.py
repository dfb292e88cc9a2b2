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
from lazygt.errors import *  # noqa: F403
from lazygt.errors import __all__ as _errors
from lazygt.host.gc_pause import gc_paused as _gc_paused

__version__ = _VERSION

#: Module -> its public names, which are loaded on first use.
_MODULES = {
    "lazygt.recovery.checkpoint.checkpointing": "resume",
    "lazygt.observe.explain": "explain",
    "lazygt.observe.picture": "render to_networkx",
    "lazygt.observe.timeline": "profile",
    "lazygt.observe.why": "why",
    "lazygt.parallel.distribute": "distribute local_batch_norm redistribute",
    "lazygt.parallel.fsdp": "fully_shard shard_optimizer_state",
    "lazygt.parallel.fsdp_module": "FSDPModule",
    "lazygt.parallel.pipeline": "stage",
    "lazygt.parallel.styles": (
        "ColwiseParallel ParallelStyle PrepareModuleInput PrepareModuleInputOutput "
        "PrepareModuleOutput RowwiseParallel SequenceParallel VocabParallel"
    ),
    "lazygt.parallel.tensor_parallel": "data_parallel parallelize_module",
    "lazygt.pool.pool_client": "Pool",
    "lazygt.record.custom.functions": "apply",
    "lazygt.record.tensor": "LazyTensor",
    "lazygt.session": "Session current session",
    "lazygt.simulation.program": "simulate",
    "lazygt.settings": "Compile Planning PoolAccess Recovery Tracing Workers",
    "lazygt.sweeps.running": "sweep",
    "lazygt.transfer": "transfer_weights",
    "torch.distributed.tensor": "Partial Replicate Shard",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

#: Former name -> torch's word for it, which is the name now.
_TORCH_NAMES = {
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
    if name not in _MODULE_OF:
        advice = f": use lazygt.{_TORCH_NAMES[name]}" if name in _TORCH_NAMES else ""
        raise AttributeError(f"module 'lazygt' has no attribute {name!r}{advice}")
    value = getattr(import_module(_MODULE_OF[name]), "Session" if name == "session" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF, "serving"})


#: ``lazygt top`` watches a session from outside, and starts at once: without torch.
_IS_TOP_COMMAND = os.path.basename((sys.argv or [""])[0]) == "lazygt" and sys.argv[1:2] == ["top"]

with _gc_paused():
    if not _IS_TOP_COMMAND:
        from lazygt import transfer as transfer

    # a worker process runs plans: device, recorder and session are the client's alone
    if not _IS_TOP_COMMAND and os.environ.get("LAZYGT_WORKER") != "1":
        from lazygt.record.device import register as _register
        from lazygt.record.tensor import show_with as _show_with
        from lazygt.session import Session as Session

        session = Session  # used like torch.device

        def _notebook() -> _Viewer:
            """Load the viewer of tensors and sessions in notebooks."""
            from lazygt.observe import notebook  # why: only notebooks ask

            return notebook

        _show_with(_notebook)
        _register()

if TYPE_CHECKING:
    from torch.distributed.tensor import Partial as Partial
    from torch.distributed.tensor import Replicate as Replicate
    from torch.distributed.tensor import Shard as Shard

    from lazygt import serving as serving
    from lazygt.observe.explain import explain as explain
    from lazygt.observe.picture import render as render
    from lazygt.observe.picture import to_networkx as to_networkx
    from lazygt.observe.timeline import profile as profile
    from lazygt.observe.why import why as why
    from lazygt.parallel.distribute import distribute as distribute
    from lazygt.parallel.distribute import local_batch_norm as local_batch_norm
    from lazygt.parallel.distribute import redistribute as redistribute
    from lazygt.parallel.fsdp import fully_shard as fully_shard
    from lazygt.parallel.fsdp import shard_optimizer_state as shard_optimizer_state
    from lazygt.parallel.fsdp_module import FSDPModule as FSDPModule
    from lazygt.parallel.pipeline import stage as stage
    from lazygt.parallel.styles import ColwiseParallel as ColwiseParallel
    from lazygt.parallel.styles import ParallelStyle as ParallelStyle
    from lazygt.parallel.styles import PrepareModuleInput as PrepareModuleInput
    from lazygt.parallel.styles import PrepareModuleInputOutput as PrepareModuleInputOutput
    from lazygt.parallel.styles import PrepareModuleOutput as PrepareModuleOutput
    from lazygt.parallel.styles import RowwiseParallel as RowwiseParallel
    from lazygt.parallel.styles import SequenceParallel as SequenceParallel
    from lazygt.parallel.styles import VocabParallel as VocabParallel
    from lazygt.parallel.tensor_parallel import data_parallel as data_parallel
    from lazygt.parallel.tensor_parallel import parallelize_module as parallelize_module
    from lazygt.pool.pool_client import Pool as Pool
    from lazygt.record.custom.functions import apply as apply
    from lazygt.record.tensor import LazyTensor as LazyTensor
    from lazygt.record.tensor import Viewer as _Viewer
    from lazygt.recovery.checkpoint.checkpointing import resume as resume
    from lazygt.session import current as current
    from lazygt.settings import Compile as Compile
    from lazygt.settings import Planning as Planning
    from lazygt.settings import PoolAccess as PoolAccess
    from lazygt.settings import Recovery as Recovery
    from lazygt.settings import Tracing as Tracing
    from lazygt.settings import Workers as Workers
    from lazygt.simulation.program import simulate as simulate
    from lazygt.sweeps.running import sweep as sweep
    from lazygt.transfer import transfer_weights as transfer_weights
else:
    __all__ = sorted([*_errors, *_MODULE_OF, "serving", "transfer"])
