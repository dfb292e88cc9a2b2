"""CUDA IPC: the sender packs parameters into a buffer that receivers on the same GPU map.

Handles are exported once per receiver and buffer, not per parameter or transfer: a batch of
parameters is one request. There are two buffers, so that receivers copy out of one while the
other is being packed; none is packed again before every receiver has copied it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.batches import Piece, Request, joined
from lazygt.transfer.control import Connection, Message
from lazygt.transfer.incoming import Incoming
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.peers import Peer
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender
from lazygt.transfer.spec import ALIGNMENT, Manifest, aligned
from lazygt.transfer.staging import Staging

GIB = 1 << 30
THRESHOLD_VARIABLE = "weight_transfer_threshold_cuda_ipc_GB"
_DEFAULT_THRESHOLD_GB = 1.0


class SharedDevice(Protocol):
    """Memory that another process can map; a GPU's, or a stand-in for it in tests."""

    device: torch.device

    def allocate(self, nbytes: int) -> Tensor:
        """A flat uint8 buffer."""

    def export(self, buffer: Tensor) -> list[Any]:
        """A handle for one other process: numbers and bytes only."""

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of which another process has sent a handle."""

    def synchronize(self) -> None:
        """Return when all that was queued on the device is done."""


class CudaDevice:
    """A GPU.

    Args:
        index: by default torch's current one; sender and receivers must mean the same GPU.

    Raises:
        RuntimeError: there is none.
    """

    def __init__(self, index: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "CUDA IPC needs a GPU, and torch sees none; use SharedMemoryTransferSender"
            )
        torch.cuda.init()
        chosen = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", chosen)

    def allocate(self, nbytes: int) -> Tensor:
        """A flat uint8 buffer on the GPU."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def export(self, buffer: Tensor) -> list[Any]:
        """The CUDA IPC handle and what torch needs beside it to map the buffer."""
        storage: Any = buffer.untyped_storage()
        return list(storage._share_cuda_())

    def open(self, handle: Sequence[Any]) -> Tensor:
        """Map a buffer of a process on the same GPU."""
        storages: Any = torch.UntypedStorage
        storage = storages._new_shared_cuda(*handle)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return whole.set_(storage, 0, (storage.nbytes(),), (1,))

    def synchronize(self) -> None:
        """Wait for the current stream."""
        torch.cuda.current_stream(self.device).synchronize()


def threshold_bytes(threshold_gb: float | None) -> int:
    """The argument, else the environment's, else 1 GiB; in bytes.

    Raises:
        ValueError: it is no number, negative, or above 0 and below 256 bytes.
    """
    given: float | str | None = threshold_gb
    if given is None:
        given = os.environ.get(THRESHOLD_VARIABLE, _DEFAULT_THRESHOLD_GB)
    try:
        nbytes = int(float(given) * GIB)
    except ValueError:
        nbytes = -1
    if nbytes < 0 or 0 < nbytes < ALIGNMENT:
        raise ValueError(
            f"{THRESHOLD_VARIABLE}={given!r}: expected GiB, 0 (a request a chunk) or more than "
            f"{ALIGNMENT / GIB:.1e}"
        )
    return nbytes


class CudaIpcTransferSender(Sender):
    """To receivers on the same GPU: packed buffers, one request a batch.

    Needs two buffers of the threshold's size (or the model's, if that is smaller) on the GPU.

    Args:
        threshold_gb: GiB gathered before a request goes out; by default the environment's
            ``weight_transfer_threshold_cuda_ipc_GB``, else 1. 0: each chunk is a request.
        device: where the buffers lie.
        verify: xor64 is computed on the GPU; crc32 brings every byte to the host.
    """

    strategy = "cuda-ipc"
    SLOTS = 2

    def __init__(
        self,
        *,
        threshold_gb: float | None = None,
        device: SharedDevice | None = None,
        verify: str = "xor64",
        skip_unchanged: bool = False,
    ) -> None:
        self._threshold = threshold_bytes(threshold_gb)
        self._device = device if device is not None else CudaDevice()
        self._buffers: list[Tensor] = []
        self._made = 0
        self._known_to: set[Peer] = set()
        super().__init__(verify=verify, skip_unchanged=skip_unchanged)

    @property
    def threshold(self) -> int:
        return self._threshold

    def prepare(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        extent = max(out.manifest.extent, ALIGNMENT)
        size = min(self._threshold // ALIGNMENT * ALIGNMENT or extent, extent)
        if not self._buffers or self._buffers[0].numel() < size:
            self._made += 1
            self._known_to.clear()
            self._buffers.clear()  # before the new ones: never four at a time
            self._buffers.extend(self._device.allocate(size) for _ in range(self.SLOTS))
        self._known_to &= set(peers)

    def invitation(self, out: Outgoing, peer: Peer) -> tuple[Message, Sequence[int]]:
        if peer in self._known_to:
            return {"buffers": self._made, "handles": []}, ()
        self._known_to.add(peer)
        handles = [self._device.export(buffer) for buffer in self._buffers]
        return {"buffers": self._made, "handles": handles}, ()

    def carry(self, out: Outgoing, request: Request) -> None:
        number = out.requests
        self.wait_staged(out, number - self.SLOTS + 1)
        buffer = self._buffers[number % self.SLOTS]
        for run in joined(request):
            whole = out.travelling(run.param)
            target = buffer[run.place : run.place + run.nbytes]
            target.copy_(whole[run.begin : run.begin + run.nbytes])
        self._device.synchronize()
        checks = [0] * len(request)
        if out.check is not None:
            places = [buffer[piece.place : piece.place + piece.nbytes] for piece in request]
            checks = self._crew.check(places, out.check)
        self.announce(out, request, checks, buffer=number % self.SLOTS)

    def release(self) -> None:
        self._buffers.clear()
        if self._device.device.type == "cuda":
            torch.cuda.ipc_collect()


class CudaIpcTransferReceiver(Receiver):
    """Copies what a `CudaIpcTransferSender` on the same GPU packs; see `Receiver`.

    Args:
        device: see `CudaDevice`.
    """

    strategy = CudaIpcTransferSender.strategy

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        device: SharedDevice | None = None,
    ) -> None:
        self._device = device if device is not None else CudaDevice()
        self._staging = Staging(self._device.device)
        self._buffers: list[Tensor] = []
        super().__init__(address, name=name, expect=expect)

    def invited(self, begin: Message, link: Connection) -> None:
        if begin["handles"]:
            self._buffers.clear()
            self._buffers.extend(self._device.open(handle) for handle in begin["handles"])

    def staging(self, begin: Message, link: Connection, extent: int) -> Tensor | None:
        return self._staging.buffer(extent)

    def receive(
        self, incoming: Incoming, data: Message, pieces: Sequence[Piece], link: Connection
    ) -> None:
        if not 0 <= data["buffer"] < len(self._buffers):
            raise ProtocolError(f"a request in unknown buffer {data['buffer']}")
        buffer = self._buffers[data["buffer"]]
        for piece in joined(pieces):
            if not 0 <= piece.place <= buffer.numel() - aligned(piece.nbytes):
                raise ProtocolError("a piece lies outside of its buffer")
            incoming.run(piece).copy_(buffer[piece.place : piece.place + piece.nbytes])
        self._device.synchronize()  # the sender packs this buffer again once we have answered

    def close(self) -> None:
        super().close()
        self._buffers.clear()
        self._staging.close()
