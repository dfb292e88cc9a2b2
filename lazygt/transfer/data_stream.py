"""The data of one transfer: routes become copy requests, and the copies are announced.

    routes -> requests -> a source copies -> `parts`: blocks and checksums -> `staged`

The processes of a `WeightSource` copy their blocks themselves: the workers of a session, which have
all of them at once, or this process, which has them chunk by chunk.
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
    cut,
    interleave,
    packed,
    route,
)
from lazygt.transfer.peers import PING_SECONDS, ReceiverLink, Receivers
from lazygt.transfer.transaction import Transfer
from lazygt.transfer.transfer_errors import TransferError
from lazygt.transfer.transports.transport import SenderEnd

_AHEAD = 2  # requests that a process has at a time: it need not wait for the next one
_UNREAD = 64  # requests: with more answers than a socket holds, both sides would wait to send
_LOOK_SECONDS = 0.01  # between two looks at the receivers, while nothing is copied
_NUMBERS = itertools.count(1)  # of requests; all senders of this process share them
_SETTLE_SECONDS = 0.1
_NO_NAME = (0, 0, ())

Take = Callable[[Request, CopyReply], None]


class TransferStream:
    """The copy requests of one transfer, and the announcements of the copied blocks.

    Args:
        digests: keep the digests of the blocks, and leave out those that receivers have.

    Attributes:
        has_begun: True if a copy has been requested.
        unanswered: requests without a reply, by rank and number, with the handler of the reply.
        unchanged: blocks that were not sent, because they are in place.
    """

    def __init__(
        self, transfer: Transfer, receivers: Receivers, end: SenderEnd, *, digests: bool
    ) -> None:
        self._transfer, self._receivers, self._end = transfer, receivers, end
        self._digests = digests
        self.has_begun = False
        self.unanswered: dict[tuple[int, int], tuple[Request, Take]] = {}
        self.unchanged: list[Route] = []
        #: for each rank, the queue of its next requests
        self._waiting: list[deque[Request]] = []
        #: bytes of a parameter that have not been sent, by position
        self._missing: Counter[int] = Counter()
        self._keys: dict[int, int] = {}

    def from_chunks(self, extractor: Extractor, source: LocalSource) -> Iterator[None]:
        """Send values of this process, chunk by chunk; yield once a request.

        Raises:
            TransferError: the deadline has passed, or a value could not be copied.
        """
        transfer, end = self._transfer, self._end
        source.value_of = transfer.tensors.__getitem__
        everything = max(manifest.extent for manifest in transfer.layouts.manifests)
        end.expect(min(end.threshold // end.unit * end.unit or everything, everything))
        specs = enumerate(transfer.manifest.params)
        here = {n: TensorLocation(n, (Replicate(),), None) for n, s in specs if not s.alias_of}
        routes = self._plan(source, here)
        batchers = [Batcher(PIECE_BYTES, end.threshold, end.unit) for _ in self._lanes]
        for chunk in extractor.chunks():
            numbers = transfer.take_in(chunk)
            self._keys.update(zip(numbers, numbers, strict=True))
            travelling = yield from self._travelling(source, {n: routes[n] for n in numbers})
            lanes = zip(batchers, self._by_lane(travelling), strict=True)
            self._queue(0, [list(batcher.add(lane)) for batcher, lane in lanes])
            yield from self._work(source, lambda: len(self._waiting[0]) <= _AHEAD)
        self._queue(0, [list(batcher.flush()) for batcher in batchers])
        yield from self._work(source, self._is_done)
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
            located = source.locate(list(remote.tensors.values()))
            at = dict(zip(remote.tensors, located, strict=True))
            self._keys = {number: location.key for number, location in at.items()}
            routes = self._plan(source, at)
            travelling = yield from self._travelling(source, routes)
            for rank in range(source.mesh.world_size):
                lanes = self._by_lane([piece for piece in travelling if piece.rank == rank])
                self._queue(
                    rank, [batched(lane, PIECE_BYTES, end.threshold, end.unit) for lane in lanes]
                )
            sizes = (packed(request)[1] for queue in self._waiting for request in queue)
            end.expect(max(sizes, default=0))
            yield from self._work(source, self._is_done)
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
    def _lanes(self) -> range:
        """One lane of requests for each layout; in shared memory, one for all."""
        return range(1 if self._end.in_place else len(self._transfer.layouts.blocks))

    def _by_lane(self, routes: Sequence[Route]) -> list[list[Route]]:
        lanes: list[list[Route]] = [[] for _ in self._lanes]
        for piece in routes:
            lanes[0 if self._end.in_place else piece.layout].append(piece)
        return lanes

    def _plan(
        self, source: WeightSource, located: Mapping[int, TensorLocation]
    ) -> dict[int, list[Route]]:
        """Return the routes of each parameter."""
        transfer = self._transfer
        self._waiting = [deque() for _ in range(source.mesh.world_size)]
        specs = transfer.manifest.params
        params = tuple(
            ParamLayout(
                number,
                specs[number].shape,
                specs[number].torch_dtype.itemsize,
                location.placements,
                location.blocks,
            )
            for number, location in located.items()
        )
        routes: dict[int, list[Route]] = {number: [] for number in located}
        nbytes = 0
        for planned in route(source.mesh, params, transfer.layouts.blocks):
            routes[planned.param].append(planned)
            nbytes += planned.nbytes
        transfer.total = max(transfer.total, nbytes)
        return routes

    def _travelling(
        self, source: WeightSource, routes: Mapping[int, Sequence[Route]]
    ) -> Generator[None, None, list[Route]]:
        """Return the routes to send, without blocks that are in place already."""
        travelling = [piece for of_param in routes.values() for piece in of_param]
        if self._digests:
            flags = yield from self._compare(source, travelling)
            changed = {piece.param for piece, flag in flags if not flag & SAME_AS_LAST}
            if self._transfer.last:
                self._transfer.unchanged += sum(number not in changed for number in routes)
            there = [piece for piece, flag in flags if flag & IS_THERE]
            self.unchanged += there
            self._transfer.done += sum(piece.nbytes for piece in there)
            travelling = [piece for piece, flag in flags if not flag & IS_THERE]
        for piece in travelling:
            self._missing[piece.param] += piece.nbytes
        for number in routes:
            if not self._missing[number]:
                self._transfer.tensors.pop(number, None)
        return travelling

    def _compare(
        self, source: WeightSource, routes: Sequence[Route]
    ) -> Generator[None, None, list[tuple[Route, int]]]:
        """Return the pieces of the routes, each with its flags of `CopyRequest.compare`."""
        transfer = self._transfer
        answers: list[tuple[Route, int]] = []
        numbers = (transfer.last, self._end.held(transfer.last) if transfer.last else 0)
        ranks: dict[int, list[Route]] = {}
        for piece in (piece for planned in routes for piece in cut(planned, PIECE_BYTES)):
            ranks.setdefault(piece.rank, []).append(piece)
        for rank, pieces in ranks.items():
            request = CopyRequest(
                self._receivers.address,
                self._end.live,
                items=self._items(pieces),
                compare=numbers,
                transfer=transfer.number,
            )
            self._ask(
                source,
                rank,
                next(_NUMBERS),
                tuple(pieces),
                request,
                lambda asked, reply: answers.extend(zip(asked, reply.checks, strict=True)),
            )
        expected = sum(map(len, ranks.values()))
        yield from self._work(source, lambda: len(answers) == expected)
        return answers

    # -- requests --------------------------------------------------------------------------

    def _queue(self, rank: int, lanes: Sequence[Sequence[Request]]) -> None:
        self._waiting[rank].extend(interleave(lanes))

    def _is_done(self) -> bool:
        return not any(self._waiting) and not self.unanswered

    def _work(self, source: WeightSource, done: Callable[[], bool]) -> Iterator[None]:
        """Hand out requests and take replies until ``done``; yield once a reply."""
        self._hand_out(source)
        while True:
            left = min(_LOOK_SECONDS, self._transfer.deadline.remaining)
            patience = 0.0 if done() else left
            for reply in source.replies(patience) if self.unanswered else ():
                if self._take(reply):
                    yield
            # a receiver may have died or refused, or is to make room
            self._receivers.pump(0.0 if self.unanswered else patience)
            self._check_time()
            self._hand_out(source)
            if done():
                return

    def _hand_out(self, source: WeightSource) -> None:
        for rank, queue in enumerate(self._waiting):
            while queue and self._may_have_more(rank):
                number, request = next(_NUMBERS), queue.popleft()
                place = self._end.open(rank, number, request)
                copy = CopyRequest(
                    self._receivers.address,
                    self._end.live,
                    self._end.kind,
                    place,
                    self._transfer.verify,
                    self._items(request),
                )
                self._ask(source, rank, number, request, copy, self._announce)

    def _may_have_more(self, rank: int) -> bool:
        busy = sum(1 for other, _ in self.unanswered if other == rank)
        return busy < _AHEAD and self._end.is_free(rank)

    def _items(self, request: Sequence[Route]) -> tuple[CopyItem, ...]:
        specs = self._transfer.manifest.params
        return tuple(
            CopyItem(
                self._keys[piece.param],
                piece.source,
                offset,
                specs[piece.param].dtype,
                shape,
                target,
                (piece.param, piece.layout, piece.target) if self._digests else _NO_NAME,
            )
            for piece, (offset, shape, target) in zip(
                request, self._end.lay_out(tuple(request)), strict=True
            )
        )

    def _ask(
        self,
        source: WeightSource,
        rank: int,
        number: int,
        request: Request,
        copy: CopyRequest,
        take: Take,
    ) -> None:
        self.has_begun = True
        self.unanswered[rank, number] = request, take
        source.request(rank, number, copy)

    # -- replies ---------------------------------------------------------------------------

    def _take(self, reply: CopyReply) -> bool:
        """Handle a reply; return False if it is for a transfer that has failed."""
        request, take = self.unanswered.pop((reply.rank, reply.number), ((), None))
        if take is None:
            return False
        if reply.error:
            if not self._end.in_place:
                self._receivers.check_liveness(self._transfer.deadline)  # the likely cause
            who = self._named(reply.rank)
            raise TransferError(f"{who} could not write its part: {reply.error}")
        take(request, reply)
        return True

    def _announce(self, request: Request, reply: CopyReply) -> None:
        """Tell the receivers about copied blocks."""
        transfer = self._transfer
        nbytes = sum(piece.nbytes for piece in request)
        transfer.requests += 1
        transfer.done += nbytes
        transfer.written[reply.rank] += nbytes
        for piece in request:
            self._missing[piece.param] -= piece.nbytes
            if not self._missing[piece.param]:
                transfer.tensors.pop(piece.param, None)
        offsets, _ = packed(request)
        triples = list(zip(request, reply.checks, offsets, strict=True))
        for layout in dict.fromkeys(piece.layout for piece in request):
            ours = [triple for triple in triples if triple[0].layout == layout]
            message: dict[str, Any] = {
                "kind": "parts",
                "transfer": transfer.number,
                "parts": [[piece.param, piece.target] for piece, _, _ in ours],
                "checks": [check for _, check, _ in ours],
            }
            if not self._end.in_place:
                message["offsets"] = [offset for _, _, offset in ours]
            for receiver in transfer.layouts.holders(layout, self._receivers.active):
                self._wait_until_read(receiver)
                receiver.sent += 1
                more = self._end.describe(receiver, reply)
                self._receivers.send(receiver, {**message, **more}, transfer.deadline, ())

    def _wait_until_read(self, receiver: ReceiverLink) -> None:
        if receiver.staged < receiver.sent - _UNREAD:
            self._receivers.wait(
                lambda link: link.staged >= link.sent - _UNREAD, self._transfer.deadline
            )

    def _named(self, rank: int) -> str:
        return "this process" if self._transfer.remote is None else f"worker {rank}"

    def _check_time(self) -> None:
        deadline, remote = self._transfer.deadline, self._transfer.remote
        if deadline.remaining < PING_SECONDS:
            self._receivers.ping(deadline)
        if deadline.expired:
            self._receivers.check_liveness(deadline)
            if self.unanswered and remote is not None:
                late = ", ".join(map(self._named, sorted({rank for rank, _ in self.unanswered})))
                raise TransferError(
                    f"{late} did not write its part within {deadline.seconds:g} s; "
                    f"give transfer_weights() a longer timeout if it is only slow"
                )
        self._transfer.check_time()
