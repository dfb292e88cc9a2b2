"""Ranks of a torchrun trainer as the source of a transfer: FSDP2, tensor parallelism.

Every rank calls `transfer_weights` with its shards of one model of DTensors; one has the sender.

    all     all-gather the sender's address, and failures so far      (torch.distributed)
    all     connect there, the rank of the sender too: `hello`, with the bounds of their blocks
    sender  `copy` requests, each to the rank that has the block      -> `copied`
    sender  `end`, with the report or the error                       all return, or raise

Each rank copies its own blocks to their destinations, and no rank gathers them. Ranks and receivers
are processes of one user on one host, as for the other sources.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from lazygt.errors import ProtocolError
from lazygt.graph.mesh import Mesh
from lazygt.transfer.control import (
    ControlConnection,
    ControlListener,
    Deadline,
    PeerGone,
    connect,
    readable,
)
from lazygt.transfer.copier import Copier
from lazygt.transfer.copy_request import CopyReply, CopyRequest, RemoteModel, TensorLocation
from lazygt.transfer.data_stream import HeldElsewhere
from lazygt.transfer.layout import Bounds, elements, full_bounds, intersection
from lazygt.transfer.manifest import Manifest, ModuleExtractor, is_block
from lazygt.transfer.sender import Sender, ShowProgress
from lazygt.transfer.transaction import TransferReport
from lazygt.transfer.transfer_errors import TransferError

# -- trainer ranks as a `WeightSource` of the rank with the sender ---------------------------------

#: Seconds beyond a transfer's deadline for the message with its result.
RESULT_SECONDS = 5.0

#: First message of a rank.
Hello = dict[str, Any]
#: Connection and `hello` of each rank.
Arrived = dict[int, tuple[ControlConnection, Hello]]
_Blocks = tuple[tuple[int, Bounds | None], ...]


class RankPart(NamedTuple):
    """One rank's blocks of a model.

    Attributes:
        tensors: the rank's blocks, by the parameter's position in the manifest.
        blocks: bounds of each in its parameter; None: the rank has none.
    """

    manifest: Manifest
    tensors: Mapping[int, Tensor]
    blocks: Mapping[int, Bounds | None]

    @staticmethod
    def of(extractor: ModuleExtractor) -> RankPart:
        """Build this rank's blocks. Tensors that are no DTensors count as replicated.

        Raises:
            TypeError: a parameter can't be sent.
        """
        specs, tensors, blocks = [], {}, {}
        for position, (name, spec, tensor) in enumerate(extractor.entries()):
            specs.append(spec)
            if spec.alias_of is None:
                tensors[position], blocks[position] = _local_block(name, tensor)
        return RankPart(Manifest(tuple(specs)), tensors, blocks)


def _local_block(name: str, tensor: Any) -> tuple[Tensor, Bounds | None]:
    """Return a rank's block of a parameter, and its bounds; None: the rank has none."""
    if not is_block(tensor):
        return tensor.detach(), full_bounds(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(f"parameter {name!r} is a partial sum; redistribute it first")
    (local,) = tensor.__create_chunk_list__()
    pairs = zip(local.offsets, local.sizes, strict=False)
    bounds = tuple((offset, offset + size) for offset, size in pairs)
    return tensor.detach().to_local(), bounds if len(bounds) == tensor.dim() else None


def meet(listener: ControlListener, deadline: Deadline) -> Arrived:
    """Accept every rank.

    Raises:
        TransferError: a rank did not come in time, has gone, or can't be accepted.
    """
    arrived: Arrived = {}
    connections: list[ControlConnection] = []
    ranks = range(dist.get_world_size())
    with ExitStack() as undo:
        try:
            while len(arrived) < len(ranks):
                if not readable([listener.fd, *_descriptors(connections)], deadline.remaining):
                    raise TimeoutError
                if connection := listener.accept():
                    undo.callback(connection.close)
                    connections.append(connection)
                for connection in connections:
                    for hello in connection.receive():
                        if hello.get("rank") not in ranks:
                            raise ProtocolError("a hello without a rank of this trainer")
                        arrived[hello["rank"]] = connection, hello
        except (TimeoutError, PeerGone):
            raise TransferError(
                f"of the trainer's ranks {sorted(set(ranks) - arrived.keys())} did not come within "
                f"{deadline.seconds:g} s"
            ) from None
        except (OSError, ProtocolError) as error:
            raise TransferError(f"a rank of the trainer can't be accepted: {error}") from error
        undo.pop_all()
    return arrived


def _descriptors(connections: Iterable[ControlConnection]) -> list[int]:
    return [fd for connection in connections for fd in connection.descriptors]


def check_tiles(name: str, shape: Sequence[int], blocks: Sequence[Bounds | None]) -> None:
    """Raise TransferError unless the distinct blocks tile a tensor: each element once.

    Several ranks may own the same block.
    """
    distinct = {b for b in blocks if b is not None and elements(b)}
    covered = sum([elements(b) for b in distinct])
    overlap = any(elements(intersection(a, b)) for a, b in itertools.combinations(distinct, 2))
    if covered != math.prod(shape) or overlap:
        raise TransferError(
            f"parameter {name!r} of shape {list(shape)} is laid out on the trainer's ranks in a "
            f"way that lazygt does not know: each rank is to have one block of it; redistribute it"
        )


class RankSource:
    """`WeightSource` of the trainer's ranks, by sockets.

    Args:
        ranks: connection and `hello` message of each rank.
    """

    def __init__(self, ranks: Arrived, deadline: Deadline) -> None:
        self.mesh = Mesh(("ranks",), (len(ranks),))
        self.turn = threading.Lock()
        self._connections = {rank: ranks[rank][0] for rank in sorted(ranks)}
        self._hellos = [ranks[rank][1] for rank in sorted(ranks)]
        self._deadline = deadline
        #: position of a parameter -> its block on each rank
        self._blocks: dict[int, tuple[Bounds | None, ...]] = {}

    def model(self, shards: RankPart) -> RemoteModel:
        """Return the model that the blocks of all ranks make up.

        Args:
            shards: blocks of this rank.

        Raises:
            TransferError: ranks have other parameters, or their blocks do not tile one.
        """
        for rank, hello in enumerate(self._hellos):
            if hello["digest"] != shards.manifest.digest:
                raise TransferError(
                    f"rank {rank} of the trainer has other parameters than the rank with the "
                    f"sender: every rank has to call transfer_weights() with the same model"
                )
        by_rank = [dict(msgspec.convert(hello["blocks"], _Blocks)) for hello in self._hellos]
        for position in shards.tensors:
            self._blocks[position] = tuple(blocks[position] for blocks in by_rank)
            spec = shards.manifest.params[position]
            check_tiles(spec.name, spec.shape, self._blocks[position])
        return RemoteModel(self, shards.tensors)

    def locate(self, tensors: Sequence[Tensor]) -> list[TensorLocation]:
        """See `RemoteSource`."""
        return [
            TensorLocation(position, (), tensor, blocks)
            for (position, blocks), tensor in zip(self._blocks.items(), tensors, strict=True)
        ]

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        """See `WeightSource`."""
        message = {"kind": "copy", "number": number, "request": request.packed}
        try:
            self._connections[rank].send(message, self._deadline)
        except (PeerGone, TimeoutError):
            raise self._rank_died(rank) from None

    def replies(self, seconds: float) -> list[CopyReply]:
        """See `WeightSource`."""
        replies: list[CopyReply] = []
        readable(_descriptors(self._connections.values()), seconds)
        for rank, connection in self._connections.items():
            try:
                replies += [CopyReply(*answer["reply"]) for answer in connection.receive()]
            except PeerGone:
                raise self._rank_died(rank) from None
        return replies

    def let_go(self, sender: str) -> None:
        """See `WeightSource`; does nothing: the ranks drop everything at the end."""

    def end(self, message: Mapping[str, Any]) -> None:
        """Send all ranks the result, and close the connections."""
        for connection in self._connections.values():
            try:
                connection.send({"kind": "end", **message}, Deadline(RESULT_SECONDS))
            except (PeerGone, TimeoutError):
                continue  # the rank notices the end of the connection
            finally:
                connection.close()
        self._connections = {}

    def _rank_died(self, rank: int) -> TransferError:
        return TransferError(
            f"rank {rank} of the trainer (pid {self._connections[rank].pid}) went away in the "
            f"midst of the transfer; every receiver keeps its version"
        )


# -- transfer from all ranks -----------------------------------------------------------------------

_TEXT_BYTES = 512  # of a rank's all-gathered text: a socket path, or an error
_FAILED = "!"


def transfer_from_ranks(
    extractor: ModuleExtractor,
    sender: Sender | None,
    version: int | None,
    timeout: float,
    progress: ShowProgress,
) -> TransferReport:
    """See `transfer_weights`; called by every rank of torch's default process group.

    The ranks wait for a rank that does not call, until the group's own timeout.

    Raises:
        ValueError: none of the ranks has the sender, or several have.
    """
    deadline = Deadline(timeout)
    meeting: ControlListener | None = None
    try:
        shards = RankPart.of(extractor)
        meeting = None if sender is None else ControlListener()
    except BaseException as error:
        _agree_on_address(f"{_FAILED}{type(error).__name__}: {error}", raises=False)
        raise
    try:
        address = _agree_on_address("" if meeting is None else meeting.address)
        if meeting is None or sender is None:
            return _run_rank(address, shards, deadline)
        return _run_sender(meeting, sender, shards, deadline, version, progress)
    finally:
        if meeting is not None:
            meeting.close()


def _agree_on_address(text: str, raises: bool = True) -> str:
    """All-gather the ranks' texts, and return the address of the rank with the sender.

    Args:
        text: the socket's path, if this rank has the sender; else "", or this rank's error.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    own_bytes = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    all_bytes = [torch.empty_like(own_bytes) for _ in range(dist.get_world_size())]
    dist.all_gather(all_bytes, own_bytes)
    texts = [bytes(data.tolist()).rstrip(b"\0").decode(errors="replace") for data in all_bytes]
    for rank, reported in enumerate(texts if raises else ()):
        if reported.startswith(_FAILED):
            raise TransferError(f"rank {rank} of the trainer can't send its part: {reported[1:]}")
    addresses = [reported for reported in texts if reported]
    if raises and len(addresses) != 1:
        raise ValueError(
            f"transfer_weights() of a model in blocks is called by every rank, and one of them has "
            f"the sender, the others sender=None: here {len(addresses)} of {len(texts)} ranks have "
            f"one"
        )
    return addresses[0]


# -- every rank: execution of copy requests --------------------------------------------------------


def _run_rank(address: str, shards: RankPart, deadline: Deadline) -> TransferReport:
    """Connect to the rank with the sender, and execute its copy requests until the end."""
    sender_died = TransferError("the rank of the trainer that has the sender has gone")
    try:
        connection = connect(address)
        copier = Copier(max(torch.get_num_threads(), 1), _device_of(shards))
        try:
            _send_hello(connection, shards, deadline)
            return _result(_copy_until_end(connection, copier, shards, deadline))
        finally:
            copier.close()
            connection.close()
    except (PeerGone, OSError):
        raise sender_died from None


def _device_of(shards: RankPart) -> torch.device:
    """Return the device of a rank's blocks; the CPU if there are none."""
    return next((tensor.device for tensor in shards.tensors.values()), torch.device("cpu"))


def _send_hello(connection: ControlConnection, shards: RankPart, deadline: Deadline) -> None:
    """Send this rank's manifest digest and the bounds of its blocks."""
    hello = {"kind": "hello", "rank": dist.get_rank(), "digest": shards.manifest.digest}
    connection.send({**hello, "blocks": list(shards.blocks.items())}, deadline)


def _copy_until_end(
    connection: ControlConnection, copier: Copier, shards: RankPart, deadline: Deadline
) -> dict[str, Any]:
    """Execute copy requests; return the message that ends the transfer."""
    while readable(connection.descriptors, deadline.remaining + RESULT_SECONDS):
        for message in connection.receive():
            if message["kind"] == "end":
                return message
            number, request = message["number"], message["request"]
            reply = copier.reply(number, request, shards.tensors.__getitem__, dist.get_rank())
            connection.send({"kind": "copied", "reply": reply}, deadline)
    raise TransferError("the rank of the trainer that has the sender does not answer")


def _result(end: Mapping[str, Any]) -> TransferReport:
    """Unpack the report of the rank with the sender, or raise its error."""
    if end["error"]:
        raise TransferError(f"the transfer failed on the rank with the sender: {end['error']}")
    return msgspec.convert(end["report"], TransferReport)


# -- the rank with the sender ----------------------------------------------------------------------


def _run_sender(
    meeting: ControlListener,
    sender: Sender,
    shards: RankPart,
    deadline: Deadline,
    version: int | None,
    progress: ShowProgress,
) -> TransferReport:
    """Send the model; every rank, this one in a thread, copies its blocks."""
    rank_thread = threading.Thread(
        target=_run_own_rank,
        args=(meeting.address, shards, deadline),
        name="lazygt-rank",
        daemon=True,
    )
    rank_thread.start()
    source = RankSource(meet(meeting, deadline), deadline)
    result: dict[str, Any] = {"error": "it was interrupted"}
    try:
        extractor = HeldElsewhere(shards.manifest, source.model(shards))
        report = sender.send(
            extractor, version=version, timeout=deadline.remaining, progress=progress
        )
        result = {"error": "", "report": report}
        return report
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        source.end(result)
        rank_thread.join()


def _run_own_rank(address: str, shards: RankPart, deadline: Deadline) -> None:
    """Run the rank with the sender as one of the ranks, without raising."""
    try:
        _run_rank(address, shards, deadline)
    except TransferError:
        return  # `_run_sender` raises it
