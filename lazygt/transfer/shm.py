"""Shared memory: the sender writes into a memfd that every receiver of the host maps.

Two slots, each the size of the model. Readers hold tensors in one while the sender fills the
other, so a transfer is one copy, however many receivers there are. A slot is faulted in once and
reused; it is written again only when no receiver holds a tensor in it.

Receivers may hold blocks instead of whole parameters. A slot then has room for each different
layout, and whoever has the values writes them there: this process, or the workers of a session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lazygt.runtime.shared_memory import Arena, tensor_over
from lazygt.transfer.batches import Piece, Request, threshold_bytes
from lazygt.transfer.bytework import Copy, Work, as_bytes, travels_as_it_is
from lazygt.transfer.control import Connection, Message
from lazygt.transfer.direct import Direct
from lazygt.transfer.extractor import Extractor
from lazygt.transfer.holding import Holding
from lazygt.transfer.incoming import Incoming, Wake
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.parts import Layout, layout_of
from lazygt.transfer.peer import Peer
from lazygt.transfer.receiver import Receiver
from lazygt.transfer.sender import Sender
from lazygt.transfer.spec import ALIGNMENT, Manifest
from lazygt.transfer.ways import SharedWay
from lazygt.transfer.writer import memory_of

_BEING_COPIED = 3  # requests; enough to keep the threads busy while the extractor works


class Slot:
    """Memory for one version, seen from the sender.

    Attributes:
        memory: how the processes that write into it find it.
        known_to: receivers that have its descriptor.
        digests: of the parameters in it, as far as they are known.
    """

    def __init__(self, number: int, extent: int) -> None:
        self.number, self.extent = number, extent
        room = max(extent, ALIGNMENT)
        self.arena = Arena.create(room)
        self.offset = self.arena.allocate(room).offset
        self.flat = self.arena.view(self.offset, room)
        self.memory = memory_of(self.arena)
        self.known_to: set[Peer] = set()
        self.digests: dict[int, bytes] = {}

    def run(self, manifest: Manifest, piece: Piece) -> Tensor:
        """Where a piece belongs."""
        begin = manifest.places[piece.param] + piece.begin
        return self.flat[begin : begin + piece.nbytes]

    def close(self) -> None:
        """Give the memory up; the kernel frees it when the last receiver has done so, too."""
        del self.flat
        self.arena.close()


class SharedMemoryTransferSender(Sender):
    """To receivers on the same host, without GPUs: one copy into memory that all of them map.

    Needs twice the model's bytes on the host (not per receiver), and no other memory.

    Args:
        threshold_gb: GiB of a request; receivers check one while the next is being copied.
        verify, skip_unchanged: see `Sender`.
    """

    strategy = "shared-memory"

    def __init__(
        self,
        *,
        threshold_gb: float = 1 / 16,
        verify: str = "crc32",
        skip_unchanged: bool = False,
    ) -> None:
        self._threshold = threshold_bytes(threshold_gb)
        super().__init__(verify=verify, skip_unchanged=skip_unchanged)
        self._slots: list[Slot] = []
        self._made = 0
        self._current: Slot | None = None
        self._target: Slot | None = None
        self._copying: deque[tuple[Request, Work]] = deque()
        self._layout: Layout | None = None
        self._direct = Direct(self._peers, torch.device("cpu"))

    @property
    def threshold(self) -> int:
        return self._threshold

    def prepare(self, out: Outgoing, peers: Sequence[Peer]) -> None:
        self._layout = layout_of(out.manifest, peers)
        extent = self._layout.extent
        if any(slot.extent != extent for slot in self._slots):
            self.forget()
        self._target = next((slot for slot in self._slots if slot is not self._current), None)
        if self._target is None:
            self._made += 1
            self._target = Slot(self._made, extent)
            self._slots.append(self._target)
        for slot in self._slots:
            slot.known_to &= set(peers)

    def invitation(self, out: Outgoing, peer: Peer) -> tuple[Message, Sequence[int]]:
        slot = self._target
        assert slot is not None
        fds = () if peer in slot.known_to else (slot.arena.fd,)
        slot.known_to.add(peer)
        live = [one.number for one in self._slots]
        assert self._layout is not None
        offset = slot.offset + self._layout.bases[self._layout.of[peer]]
        return {"slot": slot.number, "offset": offset, "slots": live, "new": bool(fds)}, fds

    def requests(
        self, out: Outgoing, extractor: Extractor, peers: Sequence[Peer]
    ) -> Iterator[None]:
        layout, slot = self._layout, self._target
        assert layout is not None
        assert slot is not None
        if out.remote is None and layout.plain:
            yield from super().requests(out, extractor, peers)
            return
        live = [one.memory.inode for one in self._slots]
        way = SharedWay(slot.memory, slot.offset, live)
        yield from self._direct.requests(out, extractor, layout, way, self._threshold)

    def carry(self, out: Outgoing, request: Request) -> None:
        slot = self._target
        assert slot is not None
        for piece in request:
            slot.digests.pop(piece.param, None)
        copies = [self._copy(out, piece, slot.run(out.manifest, piece)) for piece in request]
        self._copying.append((request, self._crew.copy(copies, out.check)))
        while self._copying and (len(self._copying) > _BEING_COPIED or self._copying[0][1].done()):
            self._announce_oldest(out)

    def finish(self, out: Outgoing) -> None:
        while self._copying:
            self._announce_oldest(out)

    def keep(self, out: Outgoing, unchanged: Sequence[int]) -> None:
        current, target = self._current, self._target
        assert target is not None
        for number in unchanged:
            assert current is not None
            if target.digests.get(number) != out.digests[number]:
                piece = Piece(number, 0, out.manifest.params[number].nbytes, 0)
                target.run(out.manifest, piece).copy_(current.run(out.manifest, piece))

    def ended(self, out: Outgoing, *, committed: bool) -> None:
        for _, work in self._copying:
            work.wait()  # of a transfer that failed: nothing may write into the slot any more
        self._copying.clear()
        unused = self._direct.ended()
        if self._target is not None:
            self._target.digests = dict(out.digests) if committed else {}
            if not unused:
                # a worker may still write into it: it is left to that, and never used again
                self._slots.remove(self._target)
                self._target.close()
        if committed:
            self._current = self._target
        self._target = None

    def forget(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots.clear()
        self._current = None
        self._direct.let_go()

    def release(self) -> None:
        self.forget()
        self._direct.close()

    def _announce_oldest(self, out: Outgoing) -> None:
        request, work = self._copying.popleft()
        self.announce(out, request, work.result())

    def _copy(self, out: Outgoing, piece: Piece, target: Tensor) -> Copy:
        tensor = out.tensors[piece.param]
        dtype = out.manifest.params[piece.param].torch_dtype
        begin, end = piece.begin, piece.begin + piece.nbytes
        if tensor.device.type == "cpu" and travels_as_it_is(tensor, dtype):
            return Copy(as_bytes(tensor)[begin:end], target)
        if tensor.device.type == "cpu" and travels_as_it_is(tensor, tensor.dtype):
            elements = tensor.detach().reshape(-1)
            run = elements[begin // dtype.itemsize : end // dtype.itemsize]
            return Copy(run, target.view(dtype))  # the copy casts: no second one of the tensor
        return Copy(out.travelling(piece.param)[begin:end].cpu(), target)


class SharedMemoryTransferReceiver(Receiver):
    """Reads what a `SharedMemoryTransferSender` on the same host wrote; see `Receiver`.

    Its parameters lie in memory shared with the other receivers: do not write to them.

    Args:
        mesh, rank, placements: what this receiver holds; see `Receiver`.
    """

    strategy = SharedMemoryTransferSender.strategy

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        mesh: Mapping[str, int] | str | None = None,
        rank: int = 0,
        placements: Mapping[str, Sequence[Any] | Mapping[str, Any]] | None = None,
    ) -> None:
        self._slots: dict[int, Arena] = {}
        self._held: set[int] = set()
        self._released: deque[int] = deque()
        holding = Holding.asked(mesh, rank, placements)
        super().__init__(address, name=name, expect=expect, holding=holding)

    def invited(self, begin: Message, link: Connection) -> None:
        if begin["new"]:
            self._slots[begin["slot"]] = Arena.attach(link.take_fd())
        for gone in self._slots.keys() - set(begin["slots"]):
            self._slots.pop(gone).close()  # its mapping goes with the last tensor in it

    def staging(self, begin: Message, link: Connection, extent: int) -> Tensor | None:
        number = begin["slot"]
        self._note_released()
        if number in self._held:
            return None
        self._held.add(number)
        release = partial(_release, self._released, number, self._wake)
        return tensor_over(self._slots[number], begin["offset"], extent, release)

    def receive(
        self, incoming: Incoming, data: Message, pieces: Sequence[Piece], link: Connection
    ) -> None:
        """Nothing: the bytes are there."""

    def keep(self, incoming: Incoming, unchanged: Sequence[int]) -> None:
        """Nothing: the sender has written them into the slot."""

    def holds_memory(self) -> bool:
        self._note_released()
        return bool(self._held)

    def close(self) -> None:
        super().close()
        while self._slots:
            self._slots.popitem()[1].close()

    def _note_released(self) -> None:
        while self._released:
            self._held.discard(self._released.popleft())


def _release(released: deque[int], number: int, wake: Wake, offset: int) -> None:
    """The last tensor in a slot has died; runs in any thread, maybe in a finalizer."""
    released.append(number)
    wake()
