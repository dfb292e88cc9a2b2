"""Atomic transfer of new weights to other processes. See docs/transfer.md.

    lazygt.transfer_weights(model, sender)      sends a model to all receivers of the sender

Senders and receivers: `SharedMemoryTransferSender`, `BroadcastTransferSender`,
`CudaIpcTransferSender`, each with a receiver named alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

#: File -> its public names. A file is imported on the first use of one of its names.
_FILES = {
    "manifest": "Chunk Extractor Manifest ModuleExtractor ParamSpec",
    "receiver": "Receiver",
    "sender": "Sender",
    "transaction": "Progress TransferReport",
    "transfer_errors": (
        "ManifestMismatch ReceiverDied ReceiverFrozen ReceiverRefused SenderGone TransferError "
        "VersionHeld"
    ),
    "transports.cuda_ipc": "CudaIpcTransferReceiver CudaIpcTransferSender",
    "transports.process_group": "BroadcastTransferReceiver BroadcastTransferSender",
    "transports.shared_memory": "SharedMemoryTransferReceiver SharedMemoryTransferSender",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lazygt.transfer.manifest import Chunk as Chunk
    from lazygt.transfer.manifest import Extractor as Extractor
    from lazygt.transfer.manifest import Manifest as Manifest
    from lazygt.transfer.manifest import ModuleExtractor as ModuleExtractor
    from lazygt.transfer.manifest import ParamSpec as ParamSpec
    from lazygt.transfer.receiver import Receiver as Receiver
    from lazygt.transfer.sender import Sender as Sender
    from lazygt.transfer.transaction import Progress as Progress
    from lazygt.transfer.transaction import TransferReport as TransferReport
    from lazygt.transfer.transfer_errors import ManifestMismatch as ManifestMismatch
    from lazygt.transfer.transfer_errors import ReceiverDied as ReceiverDied
    from lazygt.transfer.transfer_errors import ReceiverFrozen as ReceiverFrozen
    from lazygt.transfer.transfer_errors import ReceiverRefused as ReceiverRefused
    from lazygt.transfer.transfer_errors import SenderGone as SenderGone
    from lazygt.transfer.transfer_errors import TransferError as TransferError
    from lazygt.transfer.transfer_errors import VersionHeld as VersionHeld
    from lazygt.transfer.transports.cuda_ipc import (
        CudaIpcTransferReceiver as CudaIpcTransferReceiver,
    )
    from lazygt.transfer.transports.cuda_ipc import CudaIpcTransferSender as CudaIpcTransferSender
    from lazygt.transfer.transports.process_group import (
        BroadcastTransferReceiver as BroadcastTransferReceiver,
    )
    from lazygt.transfer.transports.process_group import (
        BroadcastTransferSender as BroadcastTransferSender,
    )
    from lazygt.transfer.transports.shared_memory import (
        SharedMemoryTransferReceiver as SharedMemoryTransferReceiver,
    )
    from lazygt.transfer.transports.shared_memory import (
        SharedMemoryTransferSender as SharedMemoryTransferSender,
    )
else:
    __all__ = sorted([*_FILE_OF, "transfer_weights"])


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)
    globals()[name] = value
    return value


def transfer_weights(
    source: nn.Module | Mapping[str, Tensor] | Extractor,
    sender: Sender | None,
    *,
    version: int | None = None,
    timeout: float = 60.0,
    progress: bool | None = None,
) -> TransferReport:
    """Send the weights of ``source`` to every receiver of ``sender``, atomically.

    Args:
        source: a module, a mapping of tensors, or an extractor made with casts, groups or other
            names. The workers of a lazygt session, sharded or not, send their own values. So do
            the ranks of a torchrun trainer with a module of DTensors (FSDP2): every rank calls,
            and one has the sender.
        sender: None on the other ranks of such a trainer.
        version: greater than the receivers' own; by default the last one plus 1.
        timeout: seconds for the whole transfer.
        progress: draw a bar; None: only if standard error is a terminal.

    Raises:
        TypeError: the source is none of these, or has a parameter that can't be sent; or there is
            no sender.
        ValueError: none of the ranks of a trainer has a sender, or several have.
        TransferError: the transfer failed; receivers keep their version, and it may be tried again
            at once. Its subclasses name the receiver and the reason: see
            `lazygt.transfer.transfer_errors`.
        ExecutionError, WorkerDied, WorkerFrozen: the session could not compute the values, or
            lost a worker; receivers keep their version, too.
    """
    # why: `import lazygt` need not load modules that only some scripts use
    from torch import nn
    from tqdm import tqdm

    # why: as above
    from lazygt.transfer.manifest import ModuleExtractor

    if isinstance(source, nn.Module | Mapping):
        source = ModuleExtractor(source)
    elif not hasattr(source, "manifest"):
        raise TypeError(
            f"transfer_weights() of a {type(source).__name__}: expected a module, a mapping of "
            f"tensors, or an extractor"
        )
    disabled = (None if progress is None else not progress) if sender is not None else True
    with tqdm(
        desc="transfer", unit="B", unit_scale=True, unit_divisor=1024, leave=False, disable=disabled
    ) as bar:

        def show(state: Progress) -> None:
            bar.total = state.total
            bar.update(state.done - bar.n)

        if isinstance(source, ModuleExtractor) and source.is_sharded():
            # why: torch.distributed, which only a trainer under torchrun has loaded already
            from lazygt.transfer.ranks import transfer_from_ranks

            return transfer_from_ranks(source, sender, version, timeout, show)
        if sender is None:
            raise TypeError("sender=None is for ranks of a trainer that has a model in blocks")
        return sender.send(source, version=version, timeout=timeout, progress=show)
