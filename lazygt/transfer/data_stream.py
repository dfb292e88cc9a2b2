"""Data phase of one transfer: copy requests for the routes, and announcements of the copies.

    routes -> requests -> a source copies -> `parts`: blocks and checksums -> `staged`

The processes of a `WeightSource` copy their own blocks: the workers of a session, all blocks at
once, or this process, chunk by chunk.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from lazygt.graph.placement import Replicate
from lazygt.transfer.copier import LocalSource
from lazygt.transfer.copy_request import (
    IS_THERE,
    SAME_AS_LAST,
    CopyItem,
    CopyReply,
    CopyRequest,
    RemoteModel,
    TensorLocation,
    WeightSource,
)
from lazygt.transfer.extractor import Extractor
from lazygt.transfer.layout import (
    PIECE_BYTES,
    Batcher,
    ParamLayout,
    Request,
    Route,
    batched,
    interleave,
    packed,
    route,
    split_route,
)
from lazygt.transfer.peers import PING_SECONDS, ReceiverLink, Receivers
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transfer_errors import TransferError
from lazygt.transfer.transports.transport import SenderEnd

_MAX_IN_FLIGHT = 2  # requests of one process: the next one is queued before a copy ends
_MAX_UNREAD = 64  # announced requests: more answers than a socket buffers would deadlock both sides
_POLL_SECONDS = 0.01  # interval of polling the receivers while nothing is copied
_request_numbers = itertools.count(1)  # unique over all senders of this process
_SETTLE_SECONDS = 0.1
_UNNAMED = (0, 0, ())

ReplyHandler = Callable[[Request, CopyReply], None]


class TransferStream:
    """The copy requests of one transfer, and the announcements of the copied blocks.

    Args:
        digests: cache digests of the blocks, and skip blocks that the receivers have already.

    Attributes:
        has_begun: True if a copy request has been sent.
        unanswered: requests without a reply, by rank and number, with the handler of the reply.
        unchanged: blocks that were skipped, because the receivers have them.
    """

    def __init__(
        self, transfer: Transfer, receivers: Receivers, end: SenderEnd, *, digests: bool
    ) -> None:
        self._transfer, self._receivers, self._end = transfer, receivers, end
        self._digests = digests
        self.has_begun = False
        self.unanswered: dict[tuple[int, int], tuple[Request, ReplyHandler]] = {}
        self.unchanged: list[Route] = []
        #: for each rank, the queue of its next requests
        self._queues: list[deque[Request]] = []
        #: bytes of a parameter that have not been sent, by position
        self._unsent_bytes: Counter[int] = Counter()
        self._keys: dict[int, int] = {}

    def from_chunks(self, extractor: Extractor, source: LocalSource) -> Iterator[None]:
        """Send values of this process, chunk by chunk; yield once a request.

        Raises:
            TransferError: the deadline has passed, or a value could not be copied.
        """
        transfer, end = self._transfer, self._end
        source.value_of = transfer.tensors.__getitem__
        full_extent = max(manifest.extent for manifest in transfer.layouts.manifests)
        end.expect(min(end.threshold // end.unit * end.unit or full_extent, full_extent))
        specs = enumerate(transfer.manifest.params)
        locations = {n: TensorLocation(n, (Replicate(),), None) for n, s in specs if not s.alias_of}
        routes = self._plan(source, locations)
        batchers = [Batcher(PIECE_BYTES, end.threshold, end.unit) for _ in range(self._queue_count)]
        for chunk in extractor.chunks():
            positions = transfer.add_chunk(chunk)
            self._keys.update(zip(positions, positions, strict=True))
            changed = yield from self._changed_routes(source, {n: routes[n] for n in positions})
            routes_by_queue = zip(batchers, self._routes_by_queue(changed), strict=True)
            self._enqueue(
                0, [list(batcher.add(queue_routes)) for batcher, queue_routes in routes_by_queue]
            )
            yield from self._run_until(source, lambda: len(self._queues[0]) <= _MAX_IN_FLIGHT)
        self._enqueue(0, [list(batcher.flush()) for batcher in batchers])
        yield from self._run_until(source, self._is_finished)
        transfer.written.clear()  # only this process has written

    def from_remote(self, remote: RemoteModel) -> Iterator[None]:
        """Send values of the source's processes; yield once a request.

        Raises:
            TransferError: a process failed, or was too late.
            WorkerDied, WorkerFrozen: a process is gone, or does not answer.
        """
        source, end = remote.source, self._end
        if not source.turn.acquire(timeout=self._transfer.deadline.remaining):
            raise TransferError("another transfer from this session took all of the time")
        try:
            locations = source.locate(list(remote.tensors.values()))
            by_param = dict(zip(remote.tensors, locations, strict=True))
            self._keys = {number: location.key for number, location in by_param.items()}
            routes = self._plan(source, by_param)
            changed = yield from self._changed_routes(source, routes)
            for rank in range(source.mesh.world_size):
                queues = self._routes_by_queue([piece for piece in changed if piece.rank == rank])
                self._enqueue(
                    rank,
                    [
                        batched(queue_routes, PIECE_BYTES, end.threshold, end.unit)
                        for queue_routes in queues
                    ],
                )
            sizes = (packed(request)[1] for queue in self._queues for request in queue)
            end.expect(max(sizes, default=0))
            yield from self._run_until(source, self._is_finished)
        finally:
            source.turn.release()

    @property
    def is_local(self) -> bool:
        """True if this process has the values."""
        return self._transfer.remote is None

    def settle(self, source: LocalSource) -> None:
        """Wait for this process's unanswered requests, after a failed transfer."""
        while self.unanswered:
            for reply in source.replies(_SETTLE_SECONDS):
                self.unanswered.pop((reply.rank, reply.number), None)

    def close(self) -> None:
        """Drop all references to tensors."""
        self._transfer.tensors.clear()
        self._transfer.remote = None

    # -- routes to send --------------------------------------------------------------------

    @property
    def _queue_count(self) -> int:
        """Number of separate request queues: one for each layout; in shared memory, one for all."""
        return 1 if self._end.in_place else len(self._transfer.layouts.blocks)

    def _routes_by_queue(self, routes: Sequence[Route]) -> list[list[Route]]:
        """Distribute routes over the request queues, by layout."""
        queues: list[list[Route]] = [[] for _ in range(self._queue_count)]
        for piece in routes:
            queues[0 if self._end.in_place else piece.layout].append(piece)
        return queues

    def _plan(
        self, source: WeightSource, locations: Mapping[int, TensorLocation]
    ) -> dict[int, list[Route]]:
        """Route all blocks to the receivers' layouts, and return the routes by parameter."""
        transfer = self._transfer
        self._queues = [deque() for _ in range(source.mesh.world_size)]
        specs = transfer.manifest.params
        params = tuple(
            ParamLayout(
                number,
                specs[number].shape,
                specs[number].torch_dtype.itemsize,
                location.placements,
                location.blocks,
            )
            for number, location in locations.items()
        )
        routes: dict[int, list[Route]] = {number: [] for number in locations}
        nbytes = 0
        for planned in route(source.mesh, params, transfer.layouts.blocks):
            routes[planned.param].append(planned)
            nbytes += planned.nbytes
        transfer.total = max(transfer.total, nbytes)
        return routes

    def _changed_routes(
        self, source: WeightSource, routes: Mapping[int, Sequence[Route]]
    ) -> Generator[None, None, list[Route]]:
        """Return the routes to send, without blocks that are in place already."""
        pending = [piece for param_routes in routes.values() for piece in param_routes]
        if self._digests:
            flags = yield from self._compare(source, pending)
            changed = {piece.param for piece, flag in flags if not flag & SAME_AS_LAST}
            if self._transfer.last:
                self._transfer.unchanged += sum(number not in changed for number in routes)
            in_place = [piece for piece, flag in flags if flag & IS_THERE]
            self.unchanged += in_place
            self._transfer.done += sum(piece.nbytes for piece in in_place)
            pending = [piece for piece, flag in flags if not flag & IS_THERE]
        for piece in pending:
            self._unsent_bytes[piece.param] += piece.nbytes
        for number in routes:
            if not self._unsent_bytes[number]:
                self._transfer.tensors.pop(number, None)
        return pending

    def _compare(
        self, source: WeightSource, routes: Sequence[Route]
    ) -> Generator[None, None, list[tuple[Route, int]]]:
        """Make the ranks compare blocks by digest.

        Returns:
            The pieces of the routes, each with its flags; see `CopyRequest.compare`.
        """
        transfer = self._transfer
        flags: list[tuple[Route, int]] = []
        known_transfers = (transfer.last, self._end.held(transfer.last) if transfer.last else 0)
        pieces_by_rank: dict[int, list[Route]] = {}
        for piece in (piece for planned in routes for piece in split_route(planned, PIECE_BYTES)):
            pieces_by_rank.setdefault(piece.rank, []).append(piece)
        for rank, pieces in pieces_by_rank.items():
            request = CopyRequest(
                self._receivers.address,
                self._end.live,
                items=self._items(pieces),
                compare=known_transfers,
                transfer=transfer.number,
            )
            self._send(
                source,
                rank,
                next(_request_numbers),
                tuple(pieces),
                request,
                lambda sent, reply: flags.extend(zip(sent, reply.checks, strict=True)),
            )
        expected = sum(map(len, pieces_by_rank.values()))
        yield from self._run_until(source, lambda: len(flags) == expected)
        return flags

    # -- requests --------------------------------------------------------------------------

    def _enqueue(self, rank: int, queues: Sequence[Sequence[Request]]) -> None:
        """Append requests to a rank's queue, round-robin over the layouts."""
        self._queues[rank].extend(interleave(queues))

    def _is_finished(self) -> bool:
        return not any(self._queues) and not self.unanswered

    def _run_until(self, source: WeightSource, done: Callable[[], bool]) -> Iterator[None]:
        """Send requests and handle replies until ``done``; yield once a reply."""
        self._send_requests(source)
        while True:
            poll_seconds = min(_POLL_SECONDS, self._transfer.deadline.remaining)
            timeout = 0.0 if done() else poll_seconds
            for reply in source.replies(timeout) if self.unanswered else ():
                if self._handle(reply):
                    yield
            # a receiver may have died or refused, or staged a request, which frees its buffer
            self._receivers.pump(0.0 if self.unanswered else timeout)
            self._check_time()
            self._send_requests(source)
            if done():
                return

    def _send_requests(self, source: WeightSource) -> None:
        """Send queued requests to the ranks with free capacity."""
        for rank, queue in enumerate(self._queues):
            while queue and self._has_capacity(rank):
                number, request = next(_request_numbers), queue.popleft()
                place = self._end.open(rank, number, request)
                copy = CopyRequest(
                    self._receivers.address,
                    self._end.live,
                    self._end.kind,
                    place,
                    self._transfer.verify,
                    self._items(request),
                )
                self._send(source, rank, number, request, copy, self._announce)

    def _has_capacity(self, rank: int) -> bool:
        in_flight = sum(1 for busy_rank, _ in self.unanswered if busy_rank == rank)
        return in_flight < _MAX_IN_FLIGHT and self._end.is_free(rank)

    def _items(self, request: Sequence[Route]) -> tuple[CopyItem, ...]:
        """Return the copy of each route, at its offset in the transport's memory."""
        specs = self._transfer.manifest.params
        return tuple(
            CopyItem(
                self._keys[piece.param],
                piece.source,
                offset,
                specs[piece.param].dtype,
                shape,
                target,
                (piece.param, piece.layout, piece.target) if self._digests else _UNNAMED,
            )
            for piece, (offset, shape, target) in zip(
                request, self._end.lay_out(tuple(request)), strict=True
            )
        )

    def _send(
        self,
        source: WeightSource,
        rank: int,
        number: int,
        request: Request,
        copy: CopyRequest,
        handler: ReplyHandler,
    ) -> None:
        """Send a copy request, and remember the handler of its reply."""
        self.has_begun = True
        self.unanswered[rank, number] = request, handler
        source.request(rank, number, copy)

    # -- replies ---------------------------------------------------------------------------

    def _handle(self, reply: CopyReply) -> bool:
        """Handle a reply; return False if it is for a transfer that has failed."""
        request, handler = self.unanswered.pop((reply.rank, reply.number), ((), None))
        if handler is None:
            return False
        if reply.error:
            if not self._end.in_place:
                self._receivers.check_liveness(self._transfer.deadline)  # the likely cause
            process = self._process_name(reply.rank)
            raise TransferError(f"{process} could not write its part: {reply.error}")
        handler(request, reply)
        return True

    def _announce(self, request: Request, reply: CopyReply) -> None:
        """Announce copied blocks to the receivers of their layouts, and count their bytes."""
        transfer = self._transfer
        nbytes = sum(piece.nbytes for piece in request)
        transfer.requests += 1
        transfer.done += nbytes
        transfer.written[reply.rank] += nbytes
        for piece in request:
            self._unsent_bytes[piece.param] -= piece.nbytes
            if not self._unsent_bytes[piece.param]:
                transfer.tensors.pop(piece.param, None)
        offsets, _ = packed(request)
        copied = list(zip(request, reply.checks, offsets, strict=True))
        for layout in dict.fromkeys(piece.layout for piece in request):
            of_layout = [block for block in copied if block[0].layout == layout]
            message: dict[str, Any] = {
                "kind": "parts",
                "transfer": transfer.number,
                "parts": [[piece.param, piece.target] for piece, _, _ in of_layout],
                "checks": [check for _, check, _ in of_layout],
            }
            if not self._end.in_place:
                message["offsets"] = [offset for _, _, offset in of_layout]
            for receiver in transfer.layouts.holders(layout, self._receivers.active):
                self._wait_until_read(receiver)
                receiver.sent += 1
                transport_data = self._end.describe(receiver, reply)
                self._receivers.send(receiver, {**message, **transport_data}, transfer.deadline, ())

    def _wait_until_read(self, receiver: ReceiverLink) -> None:
        """Wait until the receiver has staged enough requests to take another one."""
        if receiver.staged < receiver.sent - _MAX_UNREAD:
            self._receivers.wait(
                lambda link: link.staged >= link.sent - _MAX_UNREAD, self._transfer.deadline
            )

    def _process_name(self, rank: int) -> str:
        return "this process" if self._transfer.remote is None else f"worker {rank}"

    def _check_time(self) -> None:
        """Raise TransferError after the deadline, naming the late processes if there are any."""
        deadline, remote = self._transfer.deadline, self._transfer.remote
        if deadline.remaining < PING_SECONDS:
            self._receivers.ping(deadline)
        if deadline.expired:
            self._receivers.check_liveness(deadline)
            if self.unanswered and remote is not None:
                late = ", ".join(
                    map(self._process_name, sorted({rank for rank, _ in self.unanswered}))
                )
                raise TransferError(
                    f"{late} did not write its part within {deadline.seconds:g} s; "
                    f"give transfer_weights() a longer timeout if it is only slow"
                )
        self._transfer.check_time()
