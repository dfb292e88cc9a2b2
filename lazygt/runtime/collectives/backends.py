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

from lazygt.net.sockets import Peer

# torch 2.13 renamed them
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Work(Protocol):
    """Collective in flight."""

    def wait(self) -> object:
        """Wait for the result.

        Raises:
            OSError, RuntimeError: another rank has left, or did not come in time.
        """


class Backend(Protocol):
    """Collectives among the ranks of one axis; each method launches one."""

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        """Reduce the buffers of all ranks, in place."""

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        """Gather the ``sent`` values of all ranks, of equal size, in rank order."""

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        """Reduce all ranks' values for this rank; ``sent`` has an equal block for each rank."""

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        """Send ``out`` elements of ``sent`` to each rank; receive ``into`` from each."""


# -- sockets -----------------------------------------------------------------------------------


class SocketBackend:
    """Direct exchange by sockets: each rank sends to every other, and reduces in rank order.

    All ranks get the same bits, whatever other values share the buffer. For CPU tensors.

    Args:
        peers: the ranks of the axis in their order; None for this rank.
    """

    def __init__(self, peers: Sequence[Peer | None]) -> None:
        self.peers = tuple(peers)
        self._queue: deque[Incoming] = deque()
        self._failure: OSError | None = None

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        operands = [buffer if peer is None else torch.empty_like(buffer) for peer in self.peers]
        data = memory_of(buffer)
        return self._launch(
            [data] * len(operands), operands, lambda: reduce_in_order(operands, op, buffer)
        )

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        blocks = list(buffer.view(len(self.peers), -1).unbind())
        blocks[self.peers.index(None)].copy_(sent)
        return self._launch([memory_of(sent)] * len(blocks), blocks)

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        blocks = list(sent.view(len(self.peers), -1).unbind())
        operands = [
            block if peer is None else torch.empty_like(buffer)
            for block, peer in zip(blocks, self.peers, strict=True)
        ]
        data = [memory_of(block) for block in blocks]
        return self._launch(data, operands, lambda: reduce_in_order(operands, op, buffer))

    def all_to_all(
        self, buffer: torch.Tensor, sent: torch.Tensor, into: Sequence[int], out: Sequence[int]
    ) -> Work:
        received, blocks = buffer.split(list(into)), sent.split(list(out))
        own_index = self.peers.index(None)
        received[own_index].copy_(blocks[own_index])
        return self._launch([memory_of(block) for block in blocks], received)

    def exchange_text(self, text: str) -> TextExchange:
        """Exchange a text with every other rank, in order with the collectives.

        A rank that has left is sent nothing: its own text may have arrived before.
        """
        exchange = TextExchange(self)
        self._queue.append(exchange)
        for peer in self.peers:
            if peer is not None:
                with suppress(ConnectionError):
                    peer.send_text(text)
        return exchange

    def receive(self, incoming: Incoming) -> None:
        """Receive the data of all exchanges launched before ``incoming``, and of ``incoming``.

        Raises:
            OSError: another rank has left, or did not come in time. The same error is raised from
                then on, since some ranks' data has been read and others' has not.
        """
        while not incoming.arrived:
            if self._failure is not None:
                raise self._failure
            first = self._queue[0]
            try:
                for peer, buffer in zip(self.peers, first.buffers, strict=True):
                    if peer is not None:
                        first.read(peer, buffer)
            except OSError as error:
                self._failure = error
                raise
            self._queue.popleft().arrived = True

    def _launch(
        self,
        data: Sequence[memoryview],
        buffers: Sequence[torch.Tensor],
        finish: Callable[[], object] | None = None,
    ) -> Incoming:
        incoming = Incoming(self, buffers, finish)
        self._queue.append(incoming)
        for peer, block in zip(self.peers, data, strict=True):
            if peer is not None:
                peer.send(block)
        return incoming


class Incoming:
    """Values that other ranks send for one collective.

    Args:
        buffers: destination buffers, rank by rank.
        finish: computes the result from the buffers.
    """

    def __init__(
        self,
        backend: SocketBackend,
        buffers: Sequence[Any],
        finish: Callable[[], object] | None = None,
    ) -> None:
        self.buffers, self.arrived = buffers, False
        self._backend, self._finish = backend, finish

    def wait(self) -> None:
        self._backend.receive(self)
        if self._finish is not None:
            self._finish()

    def read(self, peer: Peer, buffer: Any) -> None:
        peer.receive(memory_of(buffer))


class TextExchange(Incoming):
    """Exchange of a text with every other rank.

    Attributes:
        texts: received texts by rank, after the wait.
    """

    def __init__(self, backend: SocketBackend) -> None:
        super().__init__(backend, backend.peers)
        self.texts: dict[int, str] = {}

    def read(self, peer: Peer, buffer: Any) -> None:
        self.texts[peer.rank] = peer.receive_text()


_REDUCTIONS: dict[str, Any] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}


#: Dtype that torch can't reduce on a CPU -> wider dtype to reduce in.
_REDUCTION_DTYPES = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def reduce_in_order(operands: Sequence[torch.Tensor], op: str, result: torch.Tensor) -> None:
    """Reduce the parts one after another; ``result`` may be any of them."""
    if result.dtype in _REDUCTION_DTYPES:
        widened = [operand.to(_REDUCTION_DTYPES[result.dtype]) for operand in operands]
        reduce_in_order(widened, op, widened[0])
        result.copy_(widened[0])
        return
    first, *others = operands
    if not others:
        result.copy_(first)
        return
    reduction = _REDUCTIONS[op]
    for operand in others[:-1]:
        first = reduction(first, operand)
    reduction(first, others[-1], out=result)


def memory_of(flat: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
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
#: Dtype that NCCL can't reduce -> wider dtype to reduce in.
_NCCL_DTYPES = _REDUCTION_DTYPES | {torch.int16: torch.int32}
#: Reduce op -> its equivalent for booleans as bytes.
_BOOL_OPS = {"sum": "max", "max": "max", "min": "min", "prod": "min"}


class TorchBackend:
    """NCCL, for tensors on a GPU."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def all_reduce(self, buffer: torch.Tensor, op: str) -> Work:
        carried, op = _reducible(buffer, op)
        work: Work = dist.all_reduce(carried, _OPS[op], self._group, async_op=True)
        return work if carried.dtype == buffer.dtype else _Converted(work, buffer, carried)

    def all_gather(self, buffer: torch.Tensor, sent: torch.Tensor) -> Work:
        received, data = as_bytes(buffer), as_bytes(sent)
        work: Work = _gather(received, data, group=self._group, async_op=True)
        return work

    def reduce_scatter(self, buffer: torch.Tensor, sent: torch.Tensor, op: str) -> Work:
        carried, op = _reducible(sent, op)
        same = carried.dtype == buffer.dtype
        received = buffer if same else carried.new_empty(buffer.shape)
        work: Work = _scatter(received, carried, _OPS[op], group=self._group, async_op=True)
        return work if same else _Converted(work, buffer, received)

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


class _Converted:
    """Collective with a result in another dtype, converted in the wait."""

    def __init__(self, work: Work, buffer: torch.Tensor, carried: torch.Tensor) -> None:
        self._work, self._buffer, self._carried = work, buffer, carried

    def wait(self) -> None:
        self._work.wait()
        self._buffer.copy_(self._carried)


def _reducible(buffer: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """Return a buffer and an op that NCCL can reduce, equivalent to the given ones."""
    if buffer.dtype == torch.bool:
        return buffer.to(torch.uint8), _BOOL_OPS[op]
    wider = _NCCL_DTYPES.get(buffer.dtype)
    return (buffer if wider is None else buffer.to(wider)), op


#: Backend by sockets and shared memory; GPU tensors are staged through host memory.
HOST = "host"
#: The same for CPU tensors, and NCCL (torch.distributed) for GPU tensors.
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
        self._in_flight: list[tuple[Any, torch.Tensor]] = []

    def keep(self, work: Any, data: torch.Tensor) -> None:
        """Keep ``data`` for as long as torch's ``work`` reads it."""
        # a wait would block the stream; NCCL reports completed sends
        self._in_flight = [one for one in self._in_flight if not one[0].is_completed()]
        self._in_flight.append((work, data))

    def close(self) -> None:
        """Release all memory: this rank leaves, and sends in flight will not arrive."""
        self._in_flight.clear()
