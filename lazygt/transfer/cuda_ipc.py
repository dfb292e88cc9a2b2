"""CUDA IPC: the sender packs parameters into a buffer that receivers on the same GPU map.

Handles are exported once per receiver and buffer, not per parameter or transfer: a batch of
parameters is one request. There are two buffers, so that receivers copy out of one while the
other is being packed; none is packed again before every receiver has copied it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.transfer.batches import Piece, Request, joined, threshold_bytes
from lazygt.transfer.control import Connection, Message
from lazygt.transfer.devices import CudaDevice, SharedDevice
from lazygt.transfer.direct import Direct
from lazygt.transfer.extractor import Extractor
from lazygt.transfer.holding import Holding
from lazygt.transfer.incoming import Block, Incoming
from lazygt.transfer.loans import Lent, Loans, LoanWay
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.parts import Layout, layout_of
from lazygt.transfer.peer import Peer
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender
from lazygt.transfer.spec import ALIGNMENT, Manifest, aligned
from lazygt.transfer.staging import Staging

THRESHOLD_VARIABLE = "weight_transfer_threshold_cuda_ipc_GB"
_DEFAULT_THRESHOLD_GB = 1.0


def threshold_asked(threshold_gb: float | None) -> int:
    """The argument, else the environment's, else 1 GiB; in bytes. Raises as `threshold_bytes`."""
    if threshold_gb is not None:
        return threshold_bytes(threshold_gb)
    given = os.environ.get(THRESHOLD_VARIABLE, _DEFAULT_THRESHOLD_GB)
    return threshold_bytes(given, THRESHOLD_VARIABLE)


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
        self._threshold = threshold_asked(threshold_gb)
        self._device = device if device is not None else CudaDevice()
        self._buffers: list[Tensor] = []
        self._made = 0
        self._known_to: set[Peer] = set()
        super().__init__(verify=verify, skip_unchanged=skip_unchanged)
        self._direct = Direct(self._peers, self._device.device)
        self._loans = Loans(self._peers, self.SLOTS)
        self._layout: Layout | None = None
        self._way: LoanWay | None = None

    @property
    def threshold(self) -> int:
        return self._threshold

    def prepare(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        self._layout = layout_of(out.manifest, peers)
        self._way = None
        if out.remote is None and self._layout.plain:
            self._make_buffers(out, peers)
        else:
            self._way = self._loans.way(out, self._layout)

    def _make_buffers(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        extent = max(out.manifest.extent, ALIGNMENT)
        size = min(self._threshold // ALIGNMENT * ALIGNMENT or extent, extent)
        if not self._buffers or self._buffers[0].numel() < size:
            self._made += 1
            self._known_to.clear()
            self._buffers.clear()  # before the new ones: never four at a time
            self._buffers.extend(self._device.allocate(size) for _ in range(self.SLOTS))
        self._known_to &= set(peers)

    def invitation(self, out: Outgoing, peer: Peer) -> tuple[Message, Sequence[int]]:
        if self._way is not None or peer in self._known_to:
            return {"buffers": self._made, "handles": []}, ()
        self._known_to.add(peer)
        handles = [self._device.export(buffer) for buffer in self._buffers]
        return {"buffers": self._made, "handles": handles}, ()

    def requests(
        self, out: Outgoing, extractor: Extractor, peers: Sequence[Peer]
    ) -> Iterator[None]:
        if self._way is None:
            yield from super().requests(out, extractor, peers)
            return
        assert self._layout is not None
        threshold = self._threshold // ALIGNMENT * ALIGNMENT
        yield from self._direct.requests(out, extractor, self._layout, self._way, threshold)

    def ended(self, out: Outgoing, *, committed: bool) -> None:
        self._direct.ended()
        if not committed:
            self._loans.forget()  # somebody may still pack or copy the buffers that there are

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
        self._direct.close()
        self._buffers.clear()
        if self._device.device.type == "cuda":
            torch.cuda.ipc_collect()


class CudaIpcTransferReceiver(Receiver):
    """Copies what a `CudaIpcTransferSender` on the same GPU packs; see `Receiver`.

    Args:
        device: see `CudaDevice`.
        mesh, rank, placements: what this receiver holds; see `Receiver`.
    """

    strategy = CudaIpcTransferSender.strategy

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        device: SharedDevice | None = None,
        mesh: Mapping[str, int] | str | None = None,
        rank: int = 0,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    ) -> None:
        self._device = device if device is not None else CudaDevice()
        self._staging = Staging(self._device.device)
        self._buffers: list[Tensor] = []
        self._lent = Lent(self._device)
        holding = Holding.asked(mesh, rank, placements)
        super().__init__(address, name=name, expect=expect, holding=holding)

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

    def bring(
        self, incoming: Incoming, message: Message, blocks: Sequence[Block], link: Connection
    ) -> None:
        incoming.unpack(self._lent.buffer(message), blocks, message["offsets"])
        self._device.synchronize()  # as above

    def close(self) -> None:
        super().close()
        self._buffers.clear()
        self._lent.close()
        self._staging.close()
