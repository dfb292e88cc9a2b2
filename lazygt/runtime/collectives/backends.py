"""Backends of collectives: sockets for small values, shared memory for large, or NCCL.

NCCL carries tensors on GPUs, the others tensors on CPUs. A backend begins the four collectives on
flat buffers. Each returns an object with a ``wait()``; after it the buffer holds the result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lazygt.runtime.collectives.sockets import Peer

# torch 2.13 renamed them
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """Collective under way."""

    def wait(self) -> object:
        """Wait for the result.

        Raises:
            OSError, RuntimeError: another rank has left, or did not come in time.
        """


class Backend(Protocol):
    """Collectives among the ranks of one axis; each method begins one."""

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        """Reduce the buffers of all ranks, in place."""

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        """Gather the ``sent`` values of all ranks, of equal size, in rank order."""

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        """Reduce all ranks' values for this one; ``sent`` has equal parts for all ranks."""

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        """Send ``out`` elements of ``sent`` to each rank; receive ``into`` from each."""


# -- sockets -----------------------------------------------------------------------------------


class SocketBackend:
    """Direct exchange by sockets: each rank sends to every other, and reduces in rank order.

    So all get the same bits, independent of the other values in a buffer. For CPU tensors.

    Args:
        peers: the ranks of the axis in their order; None for this one.
    """

    def __init__(self, peers: Sequence[Peer | None]) -> None:
        self.peers = tuple(peers)
        self._begun: deque[Incoming] = deque()
        self._failure: OSError | None = None

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        parts = [buffer if peer is None else torch.empty_like(buffer) for peer in self.peers]
        data = _bytes(buffer)
        return self._begin([data] * len(parts), parts, lambda: reduce_in_order(parts, op, buffer))

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        parts = list(buffer.view(len(self.peers), -1).unbind())
        parts[self.peers.index(None)].copy_(sent)
        return self._begin([_bytes(sent)] * len(parts), parts)

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        blocks = list(sent.view(len(self.peers), -1).unbind())
        parts = [
            part if peer is None else torch.empty_like(buffer)
            for part, peer in zip(blocks, self.peers, strict=True)
        ]
        data = [_bytes(part) for part in blocks]
        return self._begin(data, parts, lambda: reduce_in_order(parts, op, buffer))

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        parts, pieces = buffer.split(list(into)), sent.split(list(out))
        me = self.peers.index(None)
        parts[me].copy_(pieces[me])
        return self._begin([_bytes(piece) for piece in pieces], parts)

    def exchange_text(self, text: str) -> TextExchange:
        """Exchange a text with every other rank, in order with the collectives.

        A rank that has left is sent nothing: its own text may have arrived before.
        """
        told = TextExchange(self)
        self._begun.append(told)
        for peer in self.peers:
            if peer is not None:
                with suppress(ConnectionError):
                    peer.send_text(text)
        return told

    def receive(self, incoming: Incoming) -> None:
        """Receive everything begun before ``incoming``, and ``incoming``.

        Raises:
            OSError: another rank has left, or did not come in time; from then on always the same,
                since some ranks' parts have been read by then and others' have not.
        """
        while not incoming.arrived:
            if self._failure is not None:
                raise self._failure
            first = self._begun[0]
            try:
                for peer, part in zip(self.peers, first.parts, strict=True):
                    if peer is not None:
                        first.read(peer, part)
            except OSError as error:
                self._failure = error
                raise
            self._begun.popleft().arrived = True

    def _begin(
        self,
        data: Sequence[memoryview],
        parts: Sequence[torch.Tensor],
        then: Callable[[], object] | None = None,
    ) -> Incoming:
        incoming = Incoming(self, parts, then)
        self._begun.append(incoming)
        for peer, piece in zip(self.peers, data, strict=True):
            if peer is not None:
                peer.send(piece)
        return incoming


class Incoming:
    """Values that other ranks send for one collective.

    Args:
        parts: destination buffers, rank by rank.
        then: computes the result from them.
    """

    def __init__(
        self, line: SocketBackend, parts: Sequence[Any], then: Callable[[], object] | None = None
    ) -> None:
        self.parts, self.arrived = parts, False
        self._line, self._then = line, then

    def wait(self) -> None:
        self._line.receive(self)
        if self._then is not None:
            self._then()

    def read(self, peer: Peer, part: Any) -> None:
        peer.receive(_bytes(part))


class TextExchange(Incoming):
    """Exchange of a text with every other rank.

    Attributes:
        texts: received texts by rank, after the wait.
    """

    def __init__(self, line: SocketBackend) -> None:
        super().__init__(line, line.peers)
        self.texts: dict[int, str] = {}

    def read(self, peer: Peer, part: Any) -> None:
        self.texts[peer.rank] = peer.receive_text()


_REDUCTIONS: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


#: Dtypes that torch does not reduce on a CPU -> the dtype of their reduction.
_WIDER = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def reduce_in_order(parts: Sequence[torch.Tensor], op: str, into: torch.Tensor) -> None:
    """Reduce the parts one after another; ``into`` may be any of them."""
    if into.dtype in _WIDER:
        wide = [part.to(_WIDER[into.dtype]) for part in parts]
        reduce_in_order(wide, op, wide[0])
        into.copy_(wide[0])
        return
    first, *others = parts
    if not others:
        into.copy_(first)
        return
    reduction = _REDUCTIONS[op]
    for part in others[:-1]:
        first = reduction(first, part)
    reduction(first, others[-1], out=into)


def _bytes(flat: torch.Tensor) -> memoryview:
    return as_bytes(flat).numpy().data


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes; a lone element's stride, which torch checks, is reset."""
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


# -- torch.distributed ---------------------------------------------------------------------------

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}
#: Dtypes that NCCL does not reduce -> the dtype of their reduction.
_WIDER_YET = _WIDER | {torch.int16: torch.int32}
#: Reduce op -> its equivalent for booleans as bytes.
_OF_TRUTH = {"sum": "max", "max": "max", "min": "min", "prod": "min"}


class TorchBackend:
    """NCCL, for tensors on a GPU."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        carried, op = _reducible(buffer, op)
        work: Work = dist.all_reduce(carried, _OPS[op], self._group, async_op=True)
        return work if carried.dtype == buffer.dtype else _Then(work, buffer, carried)

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        received, data = as_bytes(buffer), as_bytes(sent)
        work: Work = _gather(received, data, group=self._group, async_op=True)
        return work

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        carried, op = _reducible(sent, op)
        same = carried.dtype == buffer.dtype
        received = buffer if same else carried.new_empty(buffer.shape)
        work: Work = _scatter(received, carried, _OPS[op], group=self._group, async_op=True)
        return work if same else _Then(work, buffer, received)

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        size = buffer.itemsize
        work: Work = dist.all_to_all_single(
            as_bytes(buffer),
            as_bytes(sent),
            [size * count for count in into],
            [size * count for count in out],
            group=self._group,
            async_op=True,
        )
        return work


class _Then:
    """Collective with a result in another dtype, converted in the wait."""

    def __init__(self, work: Work, buffer: torch.Tensor, carried: torch.Tensor) -> None:
        self._work, self._buffer, self._carried = work, buffer, carried

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._carried)


def _reducible(buffer: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return a buffer and an op that NCCL can reduce, equivalent to the given ones."""
    if buffer.dtype == torch.bool:
        return buffer.to(torch.uint8), _OF_TRUTH[op]
    wider = _WIDER_YET.get(buffer.dtype)
    return (buffer if wider is None else buffer.to(wider)), op


#: SocketBackend and shared memory of the host, from and to which tensors on a GPU are copied.
HOST = "host"
#: The same, and for tensors on GPUs torch.distributed.
NCCL = "nccl"


def backend_for(device: str, world_size: int, gpus: int) -> str:
    """Return the backend for ``world_size`` ranks on a machine of ``gpus`` GPUs.

    It is NCCL for CUDA tensors if each rank has a GPU of its own; NCCL refuses a shared one.
    """
    slow = device != "cuda" or why_host(device, world_size, gpus)
    return HOST if slow else NCCL


def why_host(device: str, world_size: int, gpus: int) -> str:
    """Return the reason why ranks on GPUs communicate through the host's memory.

    Empty if they use NCCL, and for ranks on CPUs.
    """
    if device != "cuda" or world_size == 1:
        return ""
    if world_size > gpus:
        return (
            f"{world_size} workers share {gpus} GPU{'s' * (gpus != 1)}, and NCCL takes one rank a "
            f"GPU: collectives go through the host's memory, which is much slower. Use at most "
            f"{gpus} worker{'s' * (gpus != 1)} here"
        )
    if not dist.is_nccl_available():
        return "this torch has no NCCL: collectives go through the host's memory"
    return ""


class PendingSends:
    """Sends in flight, with the memory that they are read from."""

    def __init__(self) -> None:
        self._flying: list[tuple[Any, torch.Tensor]] = []

    def keep(self, work: Any, data: torch.Tensor) -> None:
        """Keep ``data`` for as long as torch's ``work`` reads it."""
        # a wait would block the stream; NCCL reports completed sends
        self._flying = [one for one in self._flying if not one[0].is_completed()]
        self._flying.append((work, data))

    def close(self) -> None:
        """Release all memory: this rank leaves, and sends in flight will not arrive."""
        self._flying.clear()
