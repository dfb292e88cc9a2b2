"""New weights in other processes, whole or not at all. See docs/transfer.md.

    lazygt.transfer(model, sender)      sends a model to all receivers of the sender

Senders and receivers: `SharedMemoryTransferSender`, `BroadcastTransferSender`,
`CudaIpcTransferSender`, each with a receiver named alike.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazygt.transfer.broadcast import BroadcastTransferReceiver, BroadcastTransferSender
    from lazygt.transfer.cuda_ipc import CudaIpcTransferReceiver, CudaIpcTransferSender
    from lazygt.transfer.errors import (
        ManifestMismatch,
        ReceiverDied,
        ReceiverFrozen,
        ReceiverRefused,
        SenderGone,
        TransferError,
        VersionHeld,
    )
    from lazygt.transfer.extractor import Chunk, Extractor, ModuleExtractor
    from lazygt.transfer.facade import transfer
    from lazygt.transfer.receiver import Receiver
    from lazygt.transfer.report import Progress, TransferReport
    from lazygt.transfer.sender import Sender
    from lazygt.transfer.shm import SharedMemoryTransferReceiver, SharedMemoryTransferSender
    from lazygt.transfer.spec import Manifest, ParamSpec

_WHERE = {
    "BroadcastTransferReceiver": "broadcast",
    "BroadcastTransferSender": "broadcast",
    "Chunk": "extractor",
    "CudaIpcTransferReceiver": "cuda_ipc",
    "CudaIpcTransferSender": "cuda_ipc",
    "Extractor": "extractor",
    "Manifest": "spec",
    "ManifestMismatch": "errors",
    "ModuleExtractor": "extractor",
    "ParamSpec": "spec",
    "Progress": "report",
    "Receiver": "receiver",
    "ReceiverDied": "errors",
    "ReceiverFrozen": "errors",
    "ReceiverRefused": "errors",
    "Sender": "sender",
    "SenderGone": "errors",
    "SharedMemoryTransferReceiver": "shm",
    "SharedMemoryTransferSender": "shm",
    "TransferError": "errors",
    "TransferReport": "report",
    "VersionHeld": "errors",
    "transfer": "facade",
}

__all__ = [
    "BroadcastTransferReceiver",
    "BroadcastTransferSender",
    "Chunk",
    "CudaIpcTransferReceiver",
    "CudaIpcTransferSender",
    "Extractor",
    "Manifest",
    "ManifestMismatch",
    "ModuleExtractor",
    "ParamSpec",
    "Progress",
    "Receiver",
    "ReceiverDied",
    "ReceiverFrozen",
    "ReceiverRefused",
    "Sender",
    "SenderGone",
    "SharedMemoryTransferReceiver",
    "SharedMemoryTransferSender",
    "TransferError",
    "TransferReport",
    "VersionHeld",
    "transfer",
]


class _Package(ModuleType):
    """Loads a name when it is first asked for, and may be called: ``lazygt.transfer(...)``."""

    def __getattr__(self, name: str) -> Any:
        if name not in _WHERE:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{self.__name__}.{_WHERE[name]}"), name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> TransferReport:
        report: TransferReport = self.transfer(*args, **kwargs)
        return report


sys.modules[__name__].__class__ = _Package
