"""A model sent part by part: each part is written by who has it, for the receivers that hold it.

A *layout* says which blocks the receivers of a transfer hold; receivers with the same blocks share
their memory. The parts come from an `Origin`, whose processes write them themselves, or from this
process.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lazygt.graph.mesh import Mesh, Placements
from lazygt.graph.placement import Replicate
from lazygt.transfer.batches import PIECE_BYTES
from lazygt.transfer.errors import ManifestMismatch, TransferError
from lazygt.transfer.extractor import Extractor, ModuleExtractor
from lazygt.transfer.here import Here
from lazygt.transfer.holding import held
from lazygt.transfer.orders import Order, Write
from lazygt.transfer.origins import (
    BY_DEVICE,
    Holders,
    Located,
    Origin,
    Remote,
    Written,
    origin_of,
)
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.peer import Peer
from lazygt.transfer.peers import Peers
from lazygt.transfer.routes import (
    Bounds,
    Move,
    Moves,
    Part,
    batched,
    in_turns,
    moves,
    packed,
    shape_of,
    whole,
)
from lazygt.transfer.spec import ALIGNMENT, Manifest, aligned
from lazygt.transfer.ways import Way

_AHEAD = 2  # orders that a process has at a time: it need not wait for the next one
_LOOK_SECONDS = 0.01  # between two looks at the receivers, while nothing is answered
_NUMBERS = itertools.count(1)  # of orders; all senders of this process share them


class Layout(NamedTuple):
    """What the receivers of a transfer hold, and where that lies in the memory they share.

    Attributes:
        blocks: for each different holding the block of each parameter.
        manifests: the parameters of each holding, with its own shapes.
        bases: where the memory of each holding begins, in bytes.
        extent: bytes of all of it.
        of: receiver -> its holding.
    """

    blocks: tuple[tuple[Bounds, ...], ...]
    manifests: tuple[Manifest, ...]
    bases: tuple[int, ...]
    extent: int
    of: Mapping[Peer, int]

    def holders(self, holding: int, peers: Sequence[Peer]) -> list[Peer]:
        """Those of the receivers that have this holding."""
        return [peer for peer in peers if self.of[peer] == holding]

    @property
    def plain(self) -> bool:
        """Whether everyone holds all of it."""
        return len(self.manifests) == 1 and all(peer.holding is None for peer in self.of)


def remote(extractor: Extractor) -> Remote | None:
    """Who can write a model's parameters themselves; None: this process has to."""
    if not isinstance(extractor, ModuleExtractor) or not extractor.is_elsewhere(BY_DEVICE):
        return None
    own = {n: t for n, (_, spec, t) in enumerate(extractor.entries()) if not spec.alias_of}
    origin = origin_of(list(own.values()))
    return None if origin is None else Remote(origin, own)


def layout_of(manifest: Manifest, peers: Sequence[Peer]) -> Layout:
    """The layout for these receivers.

    Raises:
        ManifestMismatch: one has placements that the model can't have.
    """
    everything = manifest.wholes
    found: dict[tuple[Bounds, ...], Manifest] = {}
    of: dict[Peer, tuple[Bounds, ...]] = {}
    for peer in peers:
        try:
            of[peer] = peer.holding.blocks(manifest) if peer.holding else everything
        except ValueError as error:
            raise ManifestMismatch(peer.name, str(error)) from error
        if of[peer] not in found:
            found[of[peer]] = manifest if of[peer] == everything else held(manifest, of[peer])
    manifests, numbers = tuple(found.values()), {blocks: n for n, blocks in enumerate(found)}
    ends = list(itertools.accumulate((aligned(one.extent) for one in manifests), initial=0))
    holdings = {peer: numbers[blocks] for peer, blocks in of.items()}
    return Layout(tuple(found), manifests, tuple(ends[:-1]), ends[-1], holdings)


class Parts:
    """Has the parts of one transfer written, and announces them.

    Args:
        threshold: bytes of a request.
    """

    def __init__(
        self, out: Outgoing, peers: Peers, layout: Layout, way: Way, threshold: int
    ) -> None:
        self._out, self._peers, self._layout, self._way = out, peers, layout, way
        self._threshold = threshold
        #: orders that have not been answered: (rank, number) -> the moves
        self.unanswered: dict[tuple[int, int], Moves] = {}

    def from_chunks(self, extractor: Extractor, here: Here) -> Iterator[None]:
        """This process has the values: write them chunk by chunk, one step a request."""
        here.value_of = self._out.tensors.__getitem__
        everything = max(manifest.extent for manifest in self._layout.manifests)
        self._way.expect(min(self._threshold or everything, everything))
        for chunk in extractor.chunks():
            numbers = self._out.take_in(chunk, None, digest=False)
            located = {number: Located(number, (Replicate(),), None) for number in numbers}
            planned = self._requests(here.mesh, dict.fromkeys(numbers, (Replicate(),)))
            yield from self._have_written(here, located, planned)
            for number in numbers:
                self._out.drop(number)
        self._out.written.clear()  # nobody but this process

    def from_origin(self, origin: Origin, tensors: Mapping[int, Tensor]) -> Iterator[None]:
        """The origin's processes have the values: order them to write, one step an answer.

        Args:
            tensors: what is to be sent, by position in the manifest.

        Raises:
            TransferError: a process failed, or was too late.
            WorkerDied, WorkerFrozen: it is gone, or does not answer.
        """
        if not origin.turn.acquire(timeout=self._out.deadline.remaining):
            raise TransferError("another transfer from this session took all of the time")
        try:
            located = dict(zip(tensors, origin.locate(list(tensors.values())), strict=True))
            placements = {number: each.placement for number, each in located.items()}
            planned = self._requests(origin.mesh, placements)
            sizes = (packed(request)[1] for requests in planned for request in requests)
            self._way.expect(max(sizes, default=0))
            yield from self._have_written(origin, located, planned)
        finally:
            origin.turn.release()

    def _have_written(
        self, holders: Holders, located: Mapping[int, Located], planned: Sequence[Sequence[Moves]]
    ) -> Iterator[None]:
        waiting = [deque(each) for each in planned]
        keys = {number: each.key for number, each in located.items()}
        while any(waiting) or self.unanswered:
            for rank, queue in enumerate(waiting):
                while queue and self._may_have_more(rank):
                    number, request = next(_NUMBERS), queue.popleft()
                    order = self._order(rank, number, request, keys)
                    self.unanswered[rank, number] = request
                    holders.order(rank, number, order)
            patience = min(_LOOK_SECONDS, self._out.deadline.remaining)
            for answer in holders.answers(patience) if self.unanswered else ():
                if self._take(answer):
                    yield
            # a receiver may have died or refused, or is to make room
            self._peers.pump(0.0 if self.unanswered else patience)
            self._check_time()

    def _may_have_more(self, rank: int) -> bool:
        busy = sum(1 for each, _ in self.unanswered if each == rank)
        return busy < _AHEAD and self._way.is_free(rank)

    def _requests(self, mesh: Mesh, placements: Mapping[int, Placements]) -> list[list[Moves]]:
        """Each rank's requests; packed ones are for one holding each, in turns."""
        specs = self._out.manifest.params
        parts = tuple(
            Part(number, specs[number].shape, specs[number].torch_dtype.itemsize, placement)
            for number, placement in placements.items()
        )
        found = moves(mesh, parts, self._layout.blocks)
        self._out.total = max(self._out.total, sum(move.nbytes for move in found))
        shared = self._way.offset is not None
        batches: dict[tuple[int, int], list[Move]] = {}
        for move in found:
            batches.setdefault((move.rank, 0 if shared else move.holding), []).append(move)
        of_rank: list[list[list[Moves]]] = [[] for _ in range(mesh.world_size)]
        for (rank, _), mine in batches.items():
            unit = 1 if shared else ALIGNMENT
            of_rank[rank].append(list(batched(mine, PIECE_BYTES, self._threshold, unit)))
        return [in_turns(lists) for lists in of_rank]

    def _order(self, rank: int, number: int, request: Moves, keys: Mapping[int, int]) -> Order:
        way = self._way
        offsets, extent = packed(request)
        place = way.open(rank, number, request[0].holding, extent)
        if way.offset is not None:
            writes = [self._in_place(move, keys[move.param], way.offset) for move in request]
        else:
            pairs = zip(request, offsets, strict=True)
            writes = [self._packed(move, keys[move.param], offset) for move, offset in pairs]
        return Order(self._peers.address, way.live, place, self._out.verify, tuple(writes))

    def _in_place(self, move: Move, key: int, base: int) -> Write:
        manifest = self._layout.manifests[move.holding]
        spec = manifest.params[move.param]
        place = base + self._layout.bases[move.holding] + manifest.places[move.param]
        return Write(key, move.source, place, spec.dtype, spec.shape, move.target)

    def _packed(self, move: Move, key: int, offset: int) -> Write:
        dtype, shape = self._out.manifest.params[move.param].dtype, shape_of(move.target)
        return Write(key, move.source, offset, dtype, shape, whole(shape))

    def _take(self, answer: Written) -> bool:
        """Announce what has been written; False when it was for a transfer that has failed."""
        request = self.unanswered.pop((answer.rank, answer.number), None)
        if request is None:
            return False
        if answer.error:
            if self._way.offset is None:
                self._peers.accuse_silent(self._out.deadline)  # the likely cause
            who = self._named(answer.rank)
            raise TransferError(f"{who} could not write its part: {answer.error}")
        self._announce(request, answer)
        self._out.written[answer.rank] += sum(move.nbytes for move in request)
        return True

    def _announce(self, request: Moves, answer: Written) -> None:
        out = self._out
        out.requests += 1
        out.done += sum(move.nbytes for move in request)
        offsets, _ = packed(request)
        triples = list(zip(request, answer.checks, offsets, strict=True))
        for holding in dict.fromkeys(move.holding for move in request):
            mine = [each for each in triples if each[0].holding == holding]
            message = {
                "kind": "parts",
                "transfer": out.number,
                "parts": [[move.param, move.target] for move, _, _ in mine],
                "checks": [check for _, check, _ in mine],
            }
            if self._way.offset is None:
                message["offsets"] = [offset for _, _, offset in mine]
            for peer in self._layout.holders(holding, self._peers.active):
                peer.told += 1
                more = self._way.told(peer, answer)
                self._peers.tell(peer, {**message, **more}, out.deadline, ())

    def _named(self, rank: int) -> str:
        return "this process" if self._out.remote is None else f"worker {rank}"

    def _check_time(self) -> None:
        if self._out.deadline.expired:
            self._peers.accuse_silent(self._out.deadline)
        if self._out.deadline.expired and self.unanswered:
            late = ", ".join(map(self._named, sorted({rank for rank, _ in self.unanswered})))
            raise TransferError(
                f"{late} did not write its part within {self._out.deadline.seconds:g} s; "
                f"give transfer_weights() a longer timeout if it is only slow"
            )
        self._out.check_time()
