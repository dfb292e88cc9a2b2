"""Exchange of values: uploads into a worker's store, and fetches out of it to the client."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from lazygt.errors import ProtocolError, kind_of
from lazygt.graph.meta import TensorMeta
from lazygt.runtime import wire
from lazygt.runtime.messages import Done, Failure, Fetched, Put
from lazygt.runtime.store import Failed, Store, Value
from lazygt.runtime.wire import Buffer

if TYPE_CHECKING:
    from lazygt.runtime.arenas import Arena
    from lazygt.runtime.host_copies import HostCopies


#: Largest size of an answer without its values: metas and other fields.
_OVERHEAD_BYTES = 64 << 10


class Exchange:
    """Receiver of uploads and sender of fetches: small ones in buffers, large ones in arenas.

    Args:
        copies: copies to and from the GPU; None: values stay in host memory.
        upload, fetch, shm_threshold: see ``Worker``.
        max_message: bytes of the longest answer; a larger value needs shared memory.
    """

    def __init__(
        self,
        store: Store,
        copies: HostCopies | None,
        upload: Arena | None,
        fetch: Arena | None,
        shm_threshold: int,
        max_message: int = sys.maxsize,
    ) -> None:
        self._store, self._copies = store, copies
        self._max_inline_bytes = max_message - _OVERHEAD_BYTES
        self._upload, self._fetch, self._shm_threshold = upload, fetch, shm_threshold

    def receive(self, put: Put, buffers: Iterator[Buffer], done: Done) -> None:
        """Store an uploaded value.

        Raises:
            ProtocolError: the meta is no dense tensor's, or its bytes are missing.
        """
        meta = put.meta
        borrowed = put.offset
        if meta.offset or meta.extent != meta.numel:
            raise ProtocolError(f"the memory of a tensor that is sent has gaps: {meta}")
        nbytes = meta.nbytes
        if put.offset is not None:
            if self._upload is None:
                raise ProtocolError("a tensor in shared memory, but there is none")
            flat = self._upload.view(put.offset, nbytes)
        else:
            data = next(buffers, None)
            if data is None or len(data) != nbytes:
                raise ProtocolError(f"a tensor of {nbytes} bytes came without its bytes")
            flat = wire.received(data)
        try:
            value = _with_meta(flat, meta)
        except RuntimeError as error:
            raise ProtocolError(f"there is no such tensor as {meta}: {error}") from error
        if self._copies is not None:
            value = self._copies.to_device(value)
            if put.offset is not None:  # copied, so its slot is free again
                done.releases.append(put.offset)
                borrowed = None
        self._store.put(put.id, value, borrowed)

    def fetched(self, fetches: Sequence[int], done: Done) -> list[Buffer]:
        """Note fetched values, or their failures, in ``done``; return their buffers."""
        replies: list[Buffer] = []
        for key in fetches:
            try:
                done.fetched.append(self.send(self._store.get(key), replies))
            except Exception as error:  # noqa: BLE001 - reported to the client
                done.fetched.append(Failure(-1, kind_of(error), str(error), done.seq))
        return replies

    def free(self, offset: int) -> None:
        """Free the arena slot of a fetched value that the client has read."""
        try:
            if self._fetch is not None:
                self._fetch.free(offset)
        except ValueError as error:
            raise ProtocolError(f"what was not fetched can't be released: {error}") from error

    def send(self, value: Value, buffers: list[Buffer]) -> Fetched | Failure:
        """Return a value's description; add its bytes to ``buffers``, or put them in the arena."""
        if isinstance(value, Failed):
            return value.failure
        meta = TensorMeta.of(value)
        if meta.numel == 1 and meta.plain and meta.dtype in wire.NUMBERS:
            buffers.append(wire.NUMBERS[meta.dtype].pack(value.item()))
            return Fetched(meta)
        if value._is_zerotensor():
            value = torch.zeros_like(value)
        plain = value.detach().resolve_conj().resolve_neg()
        meta = TensorMeta.of(plain)
        if meta.offset or meta.extent != meta.numel:
            plain = plain.clone(memory_format=torch.contiguous_format)
            meta = TensorMeta.of(plain)
        data = _bytes_of(plain, meta)
        if self._fetch is not None and data.numel() >= self._shm_threshold:
            slot = self._fetch.put(data)
            return Fetched(meta, slot.offset)
        if sum(map(len, buffers)) + data.numel() > self._max_inline_bytes:
            raise ValueError(
                f"a value of {data.numel():,} bytes does not fit into an answer from another host, "
                f"which has {max(self._max_inline_bytes, 0):,} bytes at most: fetch parts of it, "
                f"or raise lazygt.session(max_message_bytes=...)"
            )
        buffers.append(data.cpu().numpy().data)
        return Fetched(meta)


def _bytes_of(plain: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order, as bytes; nothing is copied."""
    if meta.numel == 0:
        return torch.empty(0, dtype=torch.uint8)
    return plain.as_strided((meta.numel,), (1,)).view(torch.uint8)


def _with_meta(flat: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the tensor of this meta over flat bytes."""
    if meta.numel == 0:
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
    return flat.view(meta.dtype).as_strided(meta.shape, meta.stride)
