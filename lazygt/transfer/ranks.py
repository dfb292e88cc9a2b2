"""Ranks of a torchrun trainer as the source of a transfer: FSDP2, tensor parallelism.

Every rank calls `transfer_weights` with its part of one model of DTensors; one has the sender.

    all     all-gather the sender's address, and failures so far      (torch.distributed)
    all     connect there, the rank of the sender too: `hello`, with the bounds of their blocks
    sender  `copy` requests, each to the rank that has the block      -> `copied`
    sender  `end`, with the report or the error                       all return, or raise

Each rank copies its own blocks to their places; no rank gathers them. Ranks and receivers are
processes of one user on one host, as they are for the other sources.
"""

from __future__ import annotations

import dataclasses
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lazygt.graph.mesh import Mesh
from lazygt.host.files import bind
from lazygt.runtime.launch.session_directory import SessionDirectory
from lazygt.transfer.control import Connection, Deadline, PeerGone, connect
from lazygt.transfer.copier import Copier
from lazygt.transfer.copy_request import CopyReply, CopyRequest, RemoteModel, TensorLocation
from lazygt.transfer.extractor import HeldElsewhere, ModuleExtractor
from lazygt.transfer.layout import Bounds, check_tiles, whole
from lazygt.transfer.manifest import Manifest
from lazygt.transfer.sender import Sender, ShowProgress
from lazygt.transfer.transaction import TransferReport
from lazygt.transfer.transfer_errors import TransferError

# -- the ranks of a trainer, as seen by the rank with the sender -----------------------------------
# Their meeting place, the blocks of each, and copy requests to them.

#: Seconds beyond a transfer's deadline for the message with its result.
LAST_WORD_SECONDS = 5.0


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
        """Build this rank's part. Other tensors than DTensors are replicated.

        Raises:
            TypeError: a parameter can't be sent.
        """
        specs, tensors, blocks = [], {}, {}
        for number, (name, spec, tensor) in enumerate(extractor.entries()):
            specs.append(spec)
            if spec.alias_of is None:
                tensors[number], blocks[number] = _local(name, tensor)
        return RankPart(Manifest(tuple(specs)), tensors, blocks)


def _local(name: str, tensor: Any) -> tuple[Tensor, Bounds | None]:
    """Return a rank's block of a parameter, and its bounds; None: the rank has none."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach(), whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(f"parameter {name!r} is a partial sum; redistribute it first")
    (chunk,) = tensor.__create_chunk_list__()
    pairs = zip(chunk.offsets, chunk.sizes, strict=False)
    bounds = tuple((offset, offset + size) for offset, size in pairs)
    return tensor.detach().to_local(), bounds if len(bounds) == tensor.dim() else None


class MeetingPlace:
    """Listening socket for the ranks, in a directory that only this user can enter.

    Attributes:
        address: path of the socket.
    """

    def __init__(self) -> None:
        self._directory = SessionDirectory()
        self.address = str(self._directory.path / "transfer")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bind(self._listener, self.address)
        self._listener.listen(dist.get_world_size())

    def meet(self, deadline: Deadline) -> dict[int, tuple[Connection, dict[str, Any]]]:
        """Accept every rank, and return its connection and greeting.

        Raises:
            TransferError: a rank did not come in time, or has gone.
        """
        here: dict[int, tuple[Connection, dict[str, Any]]] = {}
        try:
            for _ in range(dist.get_world_size()):
                self._listener.settimeout(max(deadline.remaining, 1e-3))
                connection = Connection(self._listener.accept()[0])
                hello = _next(connection, deadline)
                here[hello["rank"]] = connection, hello
        except (TimeoutError, PeerGone, OSError):
            for connection, _ in here.values():
                connection.close()
            missing = sorted(set(range(dist.get_world_size())) - here.keys())
            raise TransferError(
                f"of the trainer's ranks {missing} did not come within {deadline.seconds:g} s"
            ) from None
        return here

    def close(self) -> None:
        """Close and remove the socket."""
        self._listener.close()
        self._directory.close()


def _next(connection: Connection, deadline: Deadline) -> dict[str, Any]:
    """Return the first message of a connection."""
    while wait_for([connection], deadline.remaining):
        for message in connection.receive():
            return message
    raise TimeoutError


def wait_for(connections: Sequence[Connection], seconds: float) -> bool:
    """Return whether a message or a departure comes within ``seconds``."""
    poller = select.poll()
    for connection in connections:
        for descriptor in connection.descriptors:
            poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(seconds * 1e3))


class RankSource:
    """The ranks as the source of a model's blocks.

    Args:
        ranks: connection and greeting of each rank.
    """

    def __init__(
        self, ranks: Mapping[int, tuple[Connection, dict[str, Any]]], deadline: Deadline
    ) -> None:
        self.mesh = Mesh(("ranks",), (len(ranks),))
        self.turn = threading.Lock()
        self._connections = {rank: ranks[rank][0] for rank in sorted(ranks)}
        self._digests = [ranks[rank][1]["digest"] for rank in sorted(ranks)]
        self._of_ranks = [dict(ranks[rank][1]["blocks"]) for rank in sorted(ranks)]
        self._deadline = deadline
        self._numbers: list[int] = []

    def placed(self, part: RankPart) -> Mapping[int, Tensor]:
        """Check that the parts of all ranks make up the model; return this rank's blocks.

        Raises:
            TransferError: ranks have other parameters, or their blocks do not tile one.
        """
        for rank, digest in enumerate(self._digests):
            if digest != part.manifest.digest:
                raise TransferError(
                    f"rank {rank} of the trainer has other parameters than the rank with the "
                    f"sender: every rank has to call transfer_weights() with the same model"
                )
        self._numbers = list(part.tensors)
        for number in self._numbers:
            spec = part.manifest.params[number]
            check_tiles(spec.name, spec.shape, self._blocks(number))
        return part.tensors

    def locate(self, tensors: Sequence[Tensor]) -> list[TensorLocation]:
        """See `RemoteSource`."""
        return [
            TensorLocation(number, (), tensor, self._blocks(number))
            for number, tensor in zip(self._numbers, tensors, strict=True)
        ]

    def request(self, rank: int, number: int, request: CopyRequest) -> None:
        """See `WeightSource`."""
        message = {"kind": "copy", "number": number, "request": request.packed}
        try:
            self._connections[rank].send(message, self._deadline)
        except (PeerGone, TimeoutError):
            raise self._gone(rank) from None

    def replies(self, seconds: float) -> list[CopyReply]:
        """See `WeightSource`."""
        replies: list[CopyReply] = []
        wait_for(list(self._connections.values()), seconds)
        for rank, connection in self._connections.items():
            try:
                replies += [
                    CopyReply(rank, told["number"], told["checks"], told["error"], told["handles"])
                    for told in connection.receive()
                ]
            except PeerGone:
                raise self._gone(rank) from None
        return replies

    def let_go(self, sender: str) -> None:
        """See `WeightSource`; the ranks drop everything at the end of the transfer anyway."""

    def end(self, message: Mapping[str, Any]) -> None:
        """Send all ranks the result, and close the connections."""
        for connection in self._connections.values():
            try:
                connection.send({"kind": "end", **message}, Deadline(LAST_WORD_SECONDS))
            except (PeerGone, TimeoutError):
                continue  # the rank notices the end of the connection
            finally:
                connection.close()
        self._connections = {}

    def _blocks(self, number: int) -> tuple[Bounds | None, ...]:
        """Return each rank's block of a parameter."""
        return tuple(
            None if (bounds := blocks[number]) is None else tuple(map(tuple, bounds))
            for blocks in self._of_ranks
        )

    def _gone(self, rank: int) -> TransferError:
        return TransferError(
            f"rank {rank} of the trainer (pid {self._connections[rank].pid}) went away in the "
            f"midst of the transfer; every receiver keeps its version"
        )


# -- ranks of a torchrun trainer as the source of a transfer: FSDP2, tensor parallelism ------------

_WORD_BYTES = 512  # of a rank's word before it connects: a path, or an error
_FAILED = "!"


def transfer_from_ranks(
    extractor: ModuleExtractor,
    sender: Sender | None,
    version: int | None,
    timeout: float,
    progress: ShowProgress,
) -> TransferReport:
    """See `transfer_weights`; called by every rank of torch's default process group.

    The others wait for a rank that does not call, until the group's own timeout.

    Raises:
        ValueError: none of the ranks has the sender, or several have.
    """
    deadline = Deadline(timeout)
    place: MeetingPlace | None = None
    try:
        part = RankPart.of(extractor)
        place = None if sender is None else MeetingPlace()
    except BaseException as error:
        _agree_on_address(f"{_FAILED}{type(error).__name__}: {error}", raises=False)
        raise
    try:
        address = _agree_on_address("" if place is None else place.address)
        if place is None or sender is None:
            return _take_part(address, part, deadline)
        return _lead(place, sender, part, deadline, version, progress)
    finally:
        if place is not None:
            place.close()


def _agree_on_address(word: str, raises: bool = True) -> str:
    """All-gather the ranks' words, and return the address of the rank with the sender.

    Args:
        word: the address, if this rank has the sender; else "", or this rank's error.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    data = word.encode()[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")
    ours = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    words = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
    dist.all_gather(words, ours)
    said = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in words]
    for rank, text in enumerate(said if raises else ()):
        if text.startswith(_FAILED):
            raise TransferError(f"rank {rank} of the trainer can't send its part: {text[1:]}")
    addresses = [text for text in said if text]
    if raises and len(addresses) != 1:
        raise ValueError(
            f"transfer_weights() of a model in blocks is called by every rank, and one of them has "
            f"the sender, the others sender=None: here {len(addresses)} of {len(said)} ranks have "
            f"one"
        )
    return addresses[0]


# -- a rank that has blocks ------------------------------------------------------------------------


def _take_part(address: str, part: RankPart, deadline: Deadline) -> TransferReport:
    """Connect to the rank with the sender, and act on its requests until the end."""
    gone = TransferError("the rank of the trainer that has the sender has gone")
    try:
        connection = connect(address)
        copier = Copier(max(torch.get_num_threads(), 1), _device_of(part))
        try:
            _greet(connection, part, deadline)
            return _report(_copy_until_end(connection, copier, part, deadline))
        finally:
            copier.close()
            connection.close()
    except (PeerGone, OSError):
        raise gone from None


def _device_of(part: RankPart) -> torch.device:
    return next((tensor.device for tensor in part.tensors.values()), torch.device("cpu"))


def _greet(connection: Connection, part: RankPart, deadline: Deadline) -> None:
    hello = {"kind": "hello", "rank": dist.get_rank(), "digest": part.manifest.digest}
    connection.send({**hello, "blocks": list(part.blocks.items())}, deadline)


def _copy_until_end(
    connection: Connection, copier: Copier, part: RankPart, deadline: Deadline
) -> dict[str, Any]:
    """Act on copy requests, and return the message that ends the transfer."""
    while wait_for([connection], deadline.remaining + LAST_WORD_SECONDS):
        for message in connection.receive():
            if message["kind"] == "end":
                return message
            connection.send(_copied(copier, part, message), deadline)
    raise TransferError("the rank of the trainer that has the sender does not answer")


def _copied(copier: Copier, part: RankPart, message: Mapping[str, Any]) -> dict[str, Any]:
    """Act on a request, and return the reply."""
    answer = {"kind": "copied", "number": message["number"], "checks": (), "handles": ()}
    try:
        checks, handles = copier.copy_packed(message["request"], part.tensors.__getitem__)
    except Exception as error:  # noqa: BLE001 - it is the answer
        return {**answer, "error": f"{type(error).__name__}: {error}"}
    return {**answer, "checks": checks, "handles": handles, "error": ""}


def _report(end: Mapping[str, Any]) -> TransferReport:
    """Return the report of the rank with the sender, or raise its error."""
    if end["error"]:
        raise TransferError(f"the transfer failed on the rank with the sender: {end['error']}")
    fields = dict(end["report"])
    return TransferReport(
        **{**fields, "lost": tuple(fields["lost"]), "written": dict(fields["written"])}
    )


# -- the rank that has the sender ------------------------------------------------------------------


def _lead(
    place: MeetingPlace,
    sender: Sender,
    part: RankPart,
    deadline: Deadline,
    version: int | None,
    progress: ShowProgress,
) -> TransferReport:
    """Send the model; every rank, this one too, copies its blocks."""
    own = threading.Thread(
        target=_own_part, args=(place.address, part, deadline), name="lazygt-rank", daemon=True
    )
    own.start()
    source = RankSource(place.meet(deadline), deadline)
    end: dict[str, Any] = {"error": "it was interrupted"}
    try:
        model = RemoteModel(source, source.placed(part))
        extractor = HeldElsewhere(part.manifest, model)
        report = sender.send(
            extractor, version=version, timeout=deadline.remaining, progress=progress
        )
        fields = dataclasses.asdict(report)
        written = list(report.written.items())
        end = {"error": "", "report": {**fields, "written": written}}
        return report
    except Exception as error:
        end = {"error": f"{type(error).__name__}: {error}"}
        raise
    finally:
        source.end(end)
        own.join()


def _own_part(address: str, part: RankPart, deadline: Deadline) -> None:
    try:
        _take_part(address, part, deadline)
    except TransferError:
        return  # `_lead` raises it
