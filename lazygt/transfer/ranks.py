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
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lazygt.transfer.connection import Connection, Deadline, PeerGone, connect
from lazygt.transfer.copier import Copier
from lazygt.transfer.copy_request import RemoteModel
from lazygt.transfer.errors import TransferError
from lazygt.transfer.extractor import HeldElsewhere, ModuleExtractor
from lazygt.transfer.rank_source import (
    LAST_WORD_SECONDS,
    MeetingPlace,
    RankPart,
    RankSource,
    wait_for,
)
from lazygt.transfer.report import TransferReport
from lazygt.transfer.sender import Sender, ShowProgress

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
