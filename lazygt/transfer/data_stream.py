"""Data phase of one transfer: copy requests for the routes, and announcements of the copies.

    routes -> requests -> a source copies -> `parts`: blocks and checksums -> `staged`

The processes of a `WeightSource` copy their own blocks: the workers of a session, all blocks at
once, or this process, chunk by chunk.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, cast

from lazygt.graph.placement import Replicate
from lazygt.transfer.copier import LocalSource
from lazygt.transfer.copy_request import (
    BY_DEVICE,
    IS_THERE,
    SAME_AS_LAST,
    CopyItem,
    CopyReply,
    CopyRequest,
    RemoteModel,
    TensorLocation,
    WeightSource,
    source_of,
)
from lazygt.transfer.layout import (
    PIECE_BYTES,
    Batcher,
    ParamLayout,
    Request,
    Route,
    interleave,
    packed,
    padded,
    route,
)
from lazygt.transfer.manifest import Chunk, Extractor, Manifest, ModuleExtractor
from lazygt.transfer.peers import PING_SECONDS, ReceiverLink, Receivers
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transfer_errors import TransferError
from lazygt.transfer.transports import SenderEnd

_MAX_IN_FLIGHT = 2  # requests of one process: the next one is queued before a copy ends
_MAX_UNREAD = 64  # announced requests: more answers than a socket buffers would deadlock both sides
_POLL_SECONDS = 0.01  # interval of polling the receivers while nothing is copied
_request_numbers = itertools.count(1)  # unique over all senders of this process
_SETTLE_SECONDS = 0.1
_UNNAMED = (0, 0, ())

ReplyHandler = Callable[[Request, CopyReply], None]
#: Parameters with values at the same time, in groups that share requests.
Batch = Sequence[Sequence[int]]


class HeldElsewhere:
    """Extractor of a model with its values in other processes.

    Attributes:
        remote: the model, with the source that sends its values.
    """

    def __init__(self, manifest: Manifest, remote: RemoteModel) -> None:
        self.remote, self._manifest = remote, manifest

    def manifest(self) -> Manifest:
        """See `Extractor`."""
        return self._manifest

    def chunks(self) -> Iterator[Chunk]:
        """Return an empty iterator: this process sends nothing itself."""
        return iter(())


def remote_model(extractor: Extractor) -> RemoteModel | None:
    """Return a model in processes that send it themselves; None: this process sends it."""
    if isinstance(extractor, HeldElsewhere):
        return extractor.remote
    if not isinstance(extractor, ModuleExtractor) or not extractor.is_elsewhere(BY_DEVICE):
        return None
    entries = enumerate(extractor.entries())
    tensors = {number: tensor for number, (_, spec, tensor) in entries if not spec.alias_of}
    source = source_of(list(tensors.values()))
    return None if source is None else RemoteModel(source, tensors)


class TransferStream:
    """The copy requests of one transfer, and the announcements of the copied blocks.

    Args:
        source: processes that copy the blocks.
        remote: the model, if other processes have its values.
        digests: cache digests of the blocks, and skip blocks that the receivers have already.

    Attributes:
        unanswered: requests without a reply, by rank and number, with the handler of the reply.
        unchanged: blocks that were skipped, because the receivers have them.
    """

    def __init__(
        self,
        transfer: Transfer,
        receivers: Receivers,
        end: SenderEnd,
        source: WeightSource,
        remote: RemoteModel | None,
        *,
        digests: bool,
    ) -> None:
        self._transfer, self._receivers, self._end = transfer, receivers, end
        self._source, self._remote, self._digests = source, remote, digests
        self.unanswered: dict[tuple[int, int], tuple[Request, ReplyHandler]] = {}
        self.unchanged: list[Route] = []
        #: for each rank, the queue of its next requests
        self._queues: list[deque[Request]] = [deque() for _ in range(transfer.ranks)]
        #: batcher of each rank and layout; in shared memory, one for all layouts
        self._batchers: dict[tuple[int, int], Batcher] = {}
        #: bytes of a parameter that have not been sent, by position
        self._unsent_bytes: Counter[int] = Counter()
        self._locations: dict[int, TensorLocation] = {}

    def run(self, extractor: Extractor) -> Generator[None, None, None]:
        """Send the values; yield once a request.

        Raises:
            TransferError: a process failed, or was too late.
            WorkerDied, WorkerFrozen: a process is gone, or does not answer.
        """
        if not self._source.turn.acquire(timeout=self._transfer.deadline.remaining):
            raise TransferError("another transfer from this session took all of the time")
        try:
            self._locations = self._locate()
            routes = self._plan()
            for batch in self._batches(extractor):
                yield from self._run_until(self._is_queue_short)
                changed = yield from self._changed_routes(
                    {number: routes[number] for group in batch for number in group}
                )
                self._enqueue(self._add_to_batchers(batch, changed))
                self._send_requests()  # copied while the next batch is gathered
            self._enqueue({key: list(batcher.flush()) for key, batcher in self._batchers.items()})
            yield from self._run_until(self._is_finished)
        finally:
            self._source.turn.release()

    def end(self) -> None:
        """Release the transfer's resources.

        Copies of this process into memory of readers are waited for.
        """
        while self.unanswered and self._remote is None and self._end.in_place:
            for reply in self._source.replies(_SETTLE_SECONDS):
                self.unanswered.pop((reply.rank, reply.number), None)
        self._end.end(self._transfer, idle=not self.unanswered)
        self._transfer.tensors.clear()

    # -- routes to send --------------------------------------------------------------------

    def _locate(self) -> dict[int, TensorLocation]:
        """Return the location of each parameter that is no alias."""
        if self._remote is not None:
            positions, tensors = self._remote.tensors.keys(), self._remote.tensors.values()
            located = self._remote.source.locate(list(tensors))
            return dict(zip(positions, located, strict=True))
        specs = enumerate(self._transfer.manifest.params)
        replicated = (Replicate(),)
        return {n: TensorLocation(n, replicated, None) for n, spec in specs if not spec.alias_of}

    def _batches(self, extractor: Extractor) -> Iterator[Batch]:
        """Yield the parameters as their values are there, in groups that share requests.

        Values of other processes are there at once, each parameter a group; those of this process
        come chunk by chunk.
        """
        if self._remote is not None:
            yield [[number] for number in self._locations]
            return
        value_of = self._transfer.tensors.__getitem__
        cast(LocalSource, self._source).value_of = value_of
        for chunk in extractor.chunks():
            yield [self._transfer.add_chunk(chunk)]

    def _plan(self) -> dict[int, list[Route]]:
        """Route all blocks to the receivers' layouts, and return the routes by parameter."""
        transfer, end = self._transfer, self._end
        specs = transfer.manifest.params
        params = tuple(
            ParamLayout(
                number,
                specs[number].shape,
                specs[number].torch_dtype.itemsize,
                location.placements,
                location.blocks,
            )
            for number, location in self._locations.items()
        )
        most = end.threshold // end.unit * end.unit
        limit = min(most or PIECE_BYTES, PIECE_BYTES)
        pieces = route(self._source.mesh, params, transfer.layouts.blocks, limit)
        end.expect(self._largest_request(pieces, most))
        transfer.total = max(transfer.total, sum(piece.nbytes for piece in pieces))
        routes: dict[int, list[Route]] = {number: [] for number in self._locations}
        for piece in pieces:
            routes[piece.param].append(piece)
        return routes

    def _largest_request(self, pieces: Sequence[Route], most: int) -> int:
        """Return a bound of the bytes of a request, which are at most ``most`` unless that is 0."""
        is_alone = self._remote is not None and not most  # each parameter has its own requests
        sizes: Counter[tuple[int, ...]] = Counter()
        for piece in pieces:
            key = (*self._queue_of(piece), piece.param if is_alone else 0)
            sizes[key] += padded(piece.nbytes, self._end.unit)
        largest = max(sizes.values(), default=0)
        return min(most or largest, largest)

    def _changed_routes(
        self, routes: Mapping[int, Sequence[Route]]
    ) -> Generator[None, None, dict[int, list[Route]]]:
        """Return the routes to send by parameter, without blocks that are in place already."""
        transfer = self._transfer
        pending = [piece for param_routes in routes.values() for piece in param_routes]
        if self._digests:
            flags = yield from self._compare(pending)
            changed = {piece.param for piece, flag in flags if not flag & SAME_AS_LAST}
            if transfer.last:
                transfer.unchanged += sum(number not in changed for number in routes)
            in_place = [piece for piece, flag in flags if flag & IS_THERE]
            self.unchanged += in_place
            transfer.done += sum(piece.nbytes for piece in in_place)
            pending = [piece for piece, flag in flags if not flag & IS_THERE]
        by_param: dict[int, list[Route]] = {number: [] for number in routes}
        for piece in pending:
            by_param[piece.param].append(piece)
            self._unsent_bytes[piece.param] += piece.nbytes
        for number, pieces in by_param.items():
            if not pieces:
                transfer.tensors.pop(number, None)
        return by_param

    def _compare(self, pieces: Sequence[Route]) -> Generator[None, None, list[tuple[Route, int]]]:
        """Make the ranks compare blocks by digest.

        Returns:
            The pieces, each with its flags; see `CopyRequest.compare`.
        """
        transfer = self._transfer
        flags: list[tuple[Route, int]] = []
        known_transfers = (transfer.last, self._end.held(transfer.last) if transfer.last else 0)
        pieces_by_rank: dict[int, list[Route]] = {}
        for piece in pieces:
            pieces_by_rank.setdefault(piece.rank, []).append(piece)
        for rank, of_rank in pieces_by_rank.items():
            request = CopyRequest(
                self._receivers.address,
                self._end.live,
                items=self._items(of_rank),
                compare=known_transfers,
                transfer=transfer.number,
            )
            self._send(
                rank,
                next(_request_numbers),
                tuple(of_rank),
                request,
                lambda sent, reply: flags.extend(zip(sent, reply.checks, strict=True)),
            )
        yield from self._run_until(lambda: len(flags) == len(pieces))
        return flags

    def _queue_of(self, piece: Route) -> tuple[int, int]:
        """Return rank and layout of a piece's requests."""
        return piece.rank, 0 if self._end.in_place else piece.layout

    def _add_to_batchers(
        self, batch: Batch, changed: Mapping[int, Sequence[Route]]
    ) -> dict[tuple[int, int], list[Request]]:
        """Add a batch to the batchers; return the requests that are full now, by rank and layout.

        The batchers retain the rest for later batches, and for a flush at the end.

        Args:
            changed: the routes to send, by parameter.
        """
        full: dict[tuple[int, int], list[Request]] = {}
        for group in batch:  # parameters that share requests
            routes_by_queue: dict[tuple[int, int], list[Route]] = {}
            for part in itertools.chain.from_iterable(changed[number] for number in group):
                routes_by_queue.setdefault(self._queue_of(part), []).append(part)
            for key, routes in routes_by_queue.items():
                if key not in self._batchers:
                    self._batchers[key] = Batcher(self._end.threshold, self._end.unit)
                full.setdefault(key, []).extend(self._batchers[key].add(routes))
        return full

    def _enqueue(self, requests: Mapping[tuple[int, int], Sequence[Request]]) -> None:
        """Append requests to the ranks' queues, round-robin over the layouts."""
        for rank, queue in enumerate(self._queues):
            queue.extend(interleave(requests[key] for key in sorted(requests) if key[0] == rank))

    # -- requests --------------------------------------------------------------------------

    def _is_queue_short(self) -> bool:
        return all(len(queue) <= _MAX_IN_FLIGHT for queue in self._queues)

    def _is_finished(self) -> bool:
        return not any(self._queues) and not self.unanswered

    def _run_until(self, done: Callable[[], bool]) -> Iterator[None]:
        """Send requests and handle replies until ``done``; yield once a reply."""
        self._send_requests()
        while True:
            poll_seconds = min(_POLL_SECONDS, self._transfer.deadline.remaining)
            timeout = 0.0 if done() else poll_seconds
            for reply in self._source.replies(timeout) if self.unanswered else ():
                if self._handle(reply):
                    yield
            # a receiver may have died or refused, or staged a request, which frees its buffer
            self._receivers.pump(0.0 if self.unanswered else timeout)
            self._check_time()
            self._send_requests()
            if done():
                return

    def _send_requests(self) -> None:
        """Send queued requests to the ranks with free capacity."""
        for rank, queue in enumerate(self._queues):
            while queue and self._has_capacity(rank):
                number, request = next(_request_numbers), queue.popleft()
                place = self._end.open(self._transfer, rank, number, request)
                copy = CopyRequest(
                    self._receivers.address,
                    self._end.live,
                    self._end.kind,
                    place,
                    self._transfer.verify,
                    self._items(request),
                )
                self._send(rank, number, request, copy, self._announce)

    def _has_capacity(self, rank: int) -> bool:
        in_flight = sum(1 for busy_rank, _ in self.unanswered if busy_rank == rank)
        return in_flight < _MAX_IN_FLIGHT and self._end.is_free(rank)

    def _items(self, request: Sequence[Route]) -> tuple[CopyItem, ...]:
        """Return the copy of each route, at its offset in the transport's memory."""
        specs = self._transfer.manifest.params
        return tuple(
            CopyItem(
                self._locations[piece.param].key,
                piece.source,
                offset,
                specs[piece.param].dtype,
                shape,
                target,
                (piece.param, piece.layout, piece.target) if self._digests else _UNNAMED,
            )
            for piece, (offset, shape, target) in zip(
                request, self._end.lay_out(self._transfer, request), strict=True
            )
        )

    def _send(
        self,
        rank: int,
        number: int,
        request: Request,
        copy: CopyRequest,
        handler: ReplyHandler,
    ) -> None:
        """Send a copy request, and remember the handler of its reply."""
        self.unanswered[rank, number] = request, handler
        self._source.request(rank, number, copy)

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
        if self._remote is not None:
            transfer.written[reply.rank] += nbytes
        for piece in request:
            self._unsent_bytes[piece.param] -= piece.nbytes
            if not self._unsent_bytes[piece.param]:
                transfer.tensors.pop(piece.param, None)
        offsets, _ = packed(request)
        copied = list(zip(request, reply.checks, offsets, strict=True))
        for layout in dict.fromkeys(piece.layout for piece in request):
            of_layout = [block for block in copied if block[0].layout == layout]
            fields: dict[str, Any] = {
                "parts": [[piece.param, piece.target] for piece, _, _ in of_layout],
                "checks": [check for _, check, _ in of_layout],
            }
            if not self._end.in_place:
                fields["offsets"] = [offset for _, _, offset in of_layout]
            for receiver in transfer.holders(layout):
                self._wait_until_read(receiver)
                receiver.sent += 1
                transfer.send(receiver, "parts", {**fields, **self._end.describe(receiver, reply)})

    def _wait_until_read(self, receiver: ReceiverLink) -> None:
        """Wait until the receiver has staged enough requests to take another one."""
        if receiver.staged < receiver.sent - _MAX_UNREAD:
            self._receivers.wait(
                lambda link: link.staged >= link.sent - _MAX_UNREAD, self._transfer.deadline
            )

    def _process_name(self, rank: int) -> str:
        return "this process" if self._remote is None else f"worker {rank}"

    def _check_time(self) -> None:
        """Raise TransferError after the deadline, naming the late processes if there are any."""
        deadline = self._transfer.deadline
        if deadline.remaining < PING_SECONDS:
            self._receivers.ping(deadline)
        if deadline.expired:
            self._receivers.check_liveness(deadline)
            if self.unanswered and self._remote is not None:
                late = ", ".join(
                    map(self._process_name, sorted({rank for rank, _ in self.unanswered}))
                )
                raise TransferError(
                    f"{late} did not write its part within {deadline.seconds:g} s; "
                    f"give transfer_weights() a longer timeout if it is only slow"
                )
        self._transfer.check_time()
