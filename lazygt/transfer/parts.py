"""A model sent part by part: each part is written by who has it, for the receivers that hold it.

A *layout* says which blocks the receivers of a transfer hold; receivers with the same blocks share
their memory. The parts come from an `Origin`, whose processes write them themselves, or from this
process.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from lazygt.graph.label import Replicated
from lazygt.graph.mesh import Mesh, Placement
from lazygt.transfer.batches import PIECE_BYTES
from lazygt.transfer.errors import ManifestMismatch, TransferError
from lazygt.transfer.extractor import Extractor, ModuleExtractor
from lazygt.transfer.holding import held
from lazygt.transfer.origins import BY_DEVICE, Located, Origin, Written, origin_of
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.peers import Peer, Peers
from lazygt.transfer.routes import Bounds, Move, Part, batched, moves
from lazygt.transfer.spec import Manifest, aligned
from lazygt.transfer.writer import Memory, Order, Write, Writer

_AHEAD = 2  # orders that a process has at a time: it need not wait for the next one
_LOOK_SECONDS = 0.01  # between two looks at the receivers, while nothing is answered
_HERE = Mesh(("here",), (1,))
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

    @property
    def plain(self) -> bool:
        """Whether everyone holds all of it."""
        return len(self.manifests) == 1 and all(peer.holding is None for peer in self.of)


class Remote(NamedTuple):
    """A model that others hold: who they are, and its parameters by position."""

    origin: Origin
    tensors: Mapping[int, Tensor]


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
    """Writes the parts of one transfer and announces them.

    Args:
        memory, offset: where the layout's memory begins.
        threshold: bytes of a request.
        live: inodes of all memory of the sender.
    """

    def __init__(
        self,
        out: Outgoing,
        peers: Peers,
        layout: Layout,
        memory: Memory,
        offset: int,
        threshold: int,
        live: Sequence[int],
        verify: str,
    ) -> None:
        self._out, self._peers, self._layout = out, peers, layout
        self._memory, self._offset, self._threshold = memory, offset, threshold
        self._live, self._verify = tuple(live), verify
        #: orders that have not been answered: (rank, number) -> the moves
        self.unanswered: dict[tuple[int, int], tuple[Move, ...]] = {}

    def from_chunks(self, extractor: Extractor, writer: Writer) -> Iterator[None]:
        """This process has the values: write them chunk by chunk, one step a request."""
        for chunk in extractor.chunks():
            numbers = self._out.take_in(chunk, None, digest=False)
            everywhere: dict[int, Placement] = {number: (Replicated(),) for number in numbers}
            for request in self._requests(_HERE, everywhere)[0]:
                order = self._order(request, {number: number for number in numbers})
                self._announce(request, writer.write(order, self._out.tensors.__getitem__))
                yield
            for number in numbers:
                self._out.drop(number)

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
            yield from self._have_written(origin, located)
        finally:
            origin.turn.release()

    def _have_written(self, origin: Origin, located: Mapping[int, Located]) -> Iterator[None]:
        requests = self._requests(
            origin.mesh, {number: each.placement for number, each in located.items()}
        )
        keys = {number: each.key for number, each in located.items()}
        waiting = [deque(each) for each in requests]
        while any(waiting) or self.unanswered:
            busy = Counter(rank for rank, _ in self.unanswered)
            for rank, queue in enumerate(waiting):
                for _ in range(min(_AHEAD - busy[rank], len(queue))):
                    number, request = next(_NUMBERS), queue.popleft()
                    self.unanswered[rank, number] = request
                    origin.order(rank, number, self._order(request, keys))
            for answer in origin.answers(min(_LOOK_SECONDS, self._out.deadline.remaining)):
                if self._take(answer):
                    yield
            self._peers.pump(0.0)  # a receiver may have died or refused
            self._check_time()

    def _requests(
        self, mesh: Mesh, placements: Mapping[int, Placement]
    ) -> list[list[tuple[Move, ...]]]:
        """Each rank's requests."""
        specs = self._out.manifest.params
        parts = tuple(
            Part(number, specs[number].shape, specs[number].torch_dtype.itemsize, placement)
            for number, placement in placements.items()
        )
        found = moves(mesh, parts, self._layout.blocks)
        self._out.total = max(self._out.total, sum(move.nbytes for move in found))
        return [
            list(batched((m for m in found if m.rank == rank), PIECE_BYTES, self._threshold))
            for rank in range(mesh.world_size)
        ]

    def _order(self, request: tuple[Move, ...], keys: Mapping[int, int]) -> Order:
        writes = tuple(self._write(move, keys[move.param]) for move in request)
        sender = self._peers.address
        return Order(sender, self._live, self._memory, self._verify, writes)

    def _write(self, move: Move, key: int) -> Write:
        manifest = self._layout.manifests[move.holding]
        spec = manifest.params[move.param]
        place = self._offset + self._layout.bases[move.holding] + manifest.places[move.param]
        return Write(key, move.source, place, spec.dtype, spec.shape, move.target)

    def _take(self, answer: Written) -> bool:
        """Announce what has been written; False when it was for a transfer that has failed."""
        request = self.unanswered.pop((answer.rank, answer.number), None)
        if request is None:
            return False
        if answer.error:
            raise TransferError(f"worker {answer.rank} could not write its part: {answer.error}")
        self._announce(request, answer.checks)
        self._out.written[answer.rank] += sum(move.nbytes for move in request)
        return True

    def _announce(self, request: tuple[Move, ...], checks: Sequence[int]) -> None:
        out = self._out
        out.requests += 1
        out.done += sum(move.nbytes for move in request)
        for holding in dict.fromkeys(move.holding for move in request):
            mine = [
                (move, check)
                for move, check in zip(request, checks, strict=True)
                if move.holding == holding
            ]
            message = {
                "kind": "parts",
                "transfer": out.number,
                "parts": [[move.param, move.target] for move, _ in mine],
                "checks": [check for _, check in mine],
            }
            for peer in [p for p in self._peers.active if self._layout.of[p] == holding]:
                self._peers.tell(peer, message, out.deadline, ())

    def _check_time(self) -> None:
        if self._out.deadline.expired and self.unanswered:
            late = ", ".join(str(rank) for rank in sorted({rank for rank, _ in self.unanswered}))
            raise TransferError(
                f"worker {late} did not write its part within {self._out.deadline.seconds:g} s; "
                f"give transfer() a longer timeout if it is only slow"
            )
        self._out.check_time()
