"""Receiver of transfers: staging beside the current version, verification, and atomic flip."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypedDict

from torch import Tensor, nn

from lazygt.errors import ProtocolError
from lazygt.transfer.control import (
    PROTOCOL,
    ControlMessage,
    Deadline,
    PeerGone,
    connect,
    readable,
)
from lazygt.transfer.copier import CopyPool
from lazygt.transfer.layout import ReceiverLayout, UserMesh, UserPlacements
from lazygt.transfer.manifest import Manifest, check_complete, difference
from lazygt.transfer.transfer_errors import SenderGone, TransferError
from lazygt.transfer.transports import ReceiverEnd
from lazygt.transfer.version import Aborted, Block, Mismatch, StagedVersion, Version, Wake

# -- readers' view of the weights, one complete version at a time ----------------------------------


class Readings:
    """The current version of the weights, for reader threads of this process.

    Attributes:
        name: name of the receiver in errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._current: Version | None = None
        self._changed = threading.Condition()
        self._end_reason: str | None = None

    @property
    def version(self) -> int:
        """Number of the current version; 0: none yet."""
        current = self._current
        return 0 if current is None else current.number

    @contextmanager
    def reading(self) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """The current version and its parameters, fixed until the end of the ``with`` block.

        Tied names share a tensor. Do not write to the tensors, and clone those that must outlive
        the block: its end empties the mapping, and a tensor that survives blocks memory that the
        next but one transfer needs.

        Raises:
            TransferError: there is no version yet.
        """
        current = self._current
        if current is None:
            raise TransferError(
                f"receiver {self.name!r} has no weights yet; call wait_for_version(1) first"
            )
        params = dict(current.params)
        number = current.number
        del current
        try:
            yield number, params
        finally:
            params.clear()

    def load_into(self, module: nn.Module) -> int:
        """Copy the current version into a module's parameters and buffers; return its number.

        Raises:
            RuntimeError: names or shapes differ from the module's.
            TransferError: there is no version yet.
        """
        with self.reading() as (number, params):
            module.load_state_dict(dict(params))
        return number

    def load_weights(
        self, load: Callable[[Iterator[tuple[str, Tensor]]], object], *, ties: bool = False
    ) -> int:
        """Give the current version to an engine as (name, tensor) pairs; return its number.

        Args:
            load: function that copies an iterator of (name, tensor) pairs, for example
                ``model.load_weights`` of vLLM and SGLang.
            ties: include names that are tied to an earlier one; checkpoints leave them out.

        Raises:
            TransferError: there is no version yet.
        """
        with self.reading() as (number, params):
            load(_pairs(params, ties))
        return number

    def wait_for_version(self, number: int = 1, timeout: float = 60.0) -> int:
        """Wait for version ``number`` or a newer one; return its number.

        Raises:
            SenderGone: the sender has gone, or has refused this receiver.
            TransferError: no version as new came within ``timeout`` seconds.
        """
        deadline = Deadline(timeout)
        with self._changed:
            while self.version < number:
                if self._end_reason is not None:
                    raise SenderGone(f"receiver {self.name!r}: {self._end_reason}")
                if deadline.expired:
                    raise TransferError(
                        f"receiver {self.name!r} waited {timeout:g} s for version {number}; it "
                        f"has version {self.version}"
                    )
                self._changed.wait(deadline.remaining)
        return self.version

    def _flip(self, version: Version) -> None:
        """Make a version the current one, atomically for readers."""
        with self._changed:
            self._current = version
            self._changed.notify_all()

    def _end(self, reason: str) -> None:
        """End the waits for a newer version, because there will be none."""
        with self._changed:
            self._end_reason = reason
            self._changed.notify_all()


def _pairs(params: Mapping[str, Tensor], ties: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors, in the order of the manifest."""
    seen: set[int] = set()
    for name, tensor in params.items():
        if ties or id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


# -- receiver thread: staging, verification, and atomic flip ---------------------------------------

_SEND_SECONDS = 10.0  # for a short answer to a sender that is waiting for it


class ReceiverOptions(TypedDict, total=False):
    """Options of every receiver; see `Receiver`."""

    name: str | None
    expect: Manifest | None
    mesh: UserMesh | None
    rank: int
    placements: UserPlacements | None


class Receiver(Readings):
    """Receiver of a model's versions in a thread of its own, for readers of this process.

    Args:
        address: the sender's address.
        transport: receiver's end of a transport: see `lazygt.transfer.transports`.
            `SharedMemoryTransferReceiver` and the others make a receiver with theirs.
        name: name of this receiver in errors; unique among a sender's receivers.
        expect: the only manifest to accept; by default that of the first transfer.
        mesh: grid of receivers, such as ``{"model": 2}``, if this one gets blocks of parameters.
        rank: the receiver's rank there.
        placements: name pattern -> ``torch.distributed.tensor`` placements, one an axis: a list in
            the mesh's order or a dict by axis. The first pattern that matches counts; a parameter
            without a match is not sharded.

    Attributes:
        name: see above.
        layout: its layout; None: full parameters.

    Raises:
        ValueError: mesh, rank and placements contradict each other.
    """

    def __init__(
        self,
        address: str,
        transport: ReceiverEnd,
        *,
        name: str | None = None,
        expect: Manifest | None = None,
        mesh: UserMesh | None = None,
        rank: int = 0,
        placements: UserPlacements | None = None,
    ) -> None:
        super().__init__(name or f"pid {os.getpid()}")
        self.layout = ReceiverLayout.from_arguments(mesh, rank, placements)
        self._address, self._expect = os.fspath(address), expect
        self._transport = transport
        self._staging: StagedVersion | None = None
        self._inbox: deque[dict[str, Any]] = deque()
        self._wake = Wake()
        self._closing = self._closed = False
        self._admitted = False
        self._steps = {
            "begin": self._on_begin,
            "coming": self._on_coming,
            "parts": self._on_parts,
            "prepare": self._on_prepare,
            "commit": self._on_commit,
        }
        self._pool = CopyPool()
        transport.attach(self._address, self._wake)
        self._thread = threading.Thread(target=self._run, name="lazygt-receiver", daemon=True)
        self._thread.start()

    @property
    def strategy(self) -> str:
        """Name of the transport, the same as the sender's."""
        return self._transport.strategy

    @property
    def connected(self) -> bool:
        """True if the sender has admitted this receiver and has not gone."""
        return self._admitted and self._end_reason is None

    def close(self) -> None:
        """Disconnect from the sender and drop the weights. Idempotent."""
        self._closing = True
        self._wake()
        self._thread.join()
        if not self._closed:
            self._closed = True
            self._pool.close()
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        """Body of the thread: serve senders, then end all waits with the reason."""
        try:
            reason = self._serve_senders()
        except (SenderGone, ProtocolError, TimeoutError) as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - waiting readers raise it
            reason = f"it failed with {type(error).__name__}: {error}"
        if self._closing:
            self._current = None
        self._end(reason)

    def _serve_senders(self) -> str:
        """Serve the sender, reconnecting after a drop; return the reason for the end."""
        while not self._closing:
            try:
                self._link = connect(self._address)
            except (OSError, PeerGone):
                no_sender = f"the sender at {self._address} has gone"
                return no_sender if self._admitted else f"there is no sender at {self._address}"
            try:
                self._serve()
            except PeerGone:
                continue  # reconnect: the sender dropped a process that was stopped too long
            finally:
                self._drop_staged()
                self._link.close()
                self._inbox.clear()
        return "it is closed"

    def _serve(self) -> None:
        """Send `hello`, and handle messages until the receiver is closed."""
        hello = {"protocol": PROTOCOL, "strategy": self.strategy, "name": self.name}
        blocks = {} if self.layout is None else {"layout": self.layout.packed}
        self._send("hello", **hello, **blocks)
        while not self._closing:
            self._poll(None if self._staging is None else self._staging.deadline.remaining)
            while self._inbox and not self._closing:
                self._handle(self._inbox.popleft())
            self._check_sender()
        self._drop_staged()
        self._current = None
        if not self._transport.holds_memory():
            self._send("leave")

    def _handle(self, message: dict[str, Any]) -> None:
        """Run the protocol step of a message; an error is sent, and ends the transfer.

        Messages of other transfers are ignored.
        """
        kind, staged = message["kind"], self._staging
        if kind == "welcome":
            self._admitted = True
            return
        if kind == "begin":
            self._drop_staged()
        elif staged is None or message.get("transfer") != staged.transfer:
            return
        try:
            self._steps.get(kind, _abort)(message)
        except (PeerGone, TimeoutError):
            raise
        except Aborted:
            self._drop_staged()
        except Exception as error:  # noqa: BLE001 - sent to the sender, which raises it
            self._drop_staged()
            why, mismatch = str(error) or type(error).__name__, isinstance(error, Mismatch)
            self._answer(message, "refuse", why=why, mismatch=mismatch)

    def _on_begin(self, message: ControlMessage) -> None:
        """Allocate a staging buffer; answer `held`, and wait, while readers hold its memory."""
        staged = StagedVersion(message, self._current, self.layout)
        self._check_manifest(staged)
        self._staging = staged
        flat = self._transport.stage(message, staged.manifest.extent)
        if flat is None:
            self._answer(message, "held")
        while flat is None:
            self._wait_or_abort(staged.deadline.remaining)
            flat = self._transport.stage(message, staged.manifest.extent)
        self._answer(message, "ready", version=self.version)
        staged.allocate(flat)  # overlaps with the sender, which gathers the first request

    def _check_manifest(self, staged: StagedVersion) -> None:
        """Raise Mismatch for an old version, or other parameters than expected."""
        if staged.version <= self.version:
            raise Mismatch(f"it has version {self.version}, not older than {staged.version}")
        expected = self._expect
        if expected is None and self._current is not None:
            expected = self._current.full_manifest
        mismatch = None if expected is None else difference(expected, staged.full_manifest)
        if mismatch is not None:
            raise Mismatch(mismatch)

    def _on_coming(self, message: ControlMessage) -> None:
        """Prepare the transport for an announced request."""
        self._transport.coming(self._staged, message, self._wait_or_abort)

    def _on_parts(self, message: ControlMessage) -> None:
        """Fetch and verify blocks that have been copied."""
        staged = self._staged
        blocks = [Block(*block) for block in message["parts"]]
        self._transport.fetch(staged, message, blocks, self._wait_or_abort)
        staged.verify_blocks(self._pool, blocks, message["checks"])
        self._answer(message, "staged")

    def _on_prepare(self, message: ControlMessage) -> None:
        """Add the unchanged blocks, and vote for the commit if all bytes are there."""
        staged = self._staged
        unchanged = [Block(*block) for block in message["unchanged"]]
        staged.add_unchanged(self._current, unchanged, are_there=self._transport.has_unchanged)
        problem = check_complete(staged.manifest, staged.arrived)
        if problem is not None:
            raise TransferError(problem)
        staged.complete = True
        self._answer(message, "prepared")

    def _on_commit(self, message: ControlMessage) -> None:
        """Flip readers to the staged version, and answer with the seconds of the flip."""
        staged = self._staged
        if staged.new is None or not staged.complete:
            raise ProtocolError("a commit without a prepare")
        begin = time.perf_counter()
        self._flip(staged.new)
        pause = time.perf_counter() - begin
        self._staging = None
        self._answer(message, "committed", pause=pause)

    @property
    def _staged(self) -> StagedVersion:
        """The version that a step is about."""
        assert self._staging is not None
        return self._staging

    def _drop_staged(self) -> None:
        """Drop the staged version, if there is one."""
        was_staging = self._staging is not None
        self._staging = None
        if was_staging:
            self._transport.dropped()

    # -- messages, also in the middle of a long step --------------------------------------------

    def _poll(self, seconds: float | None) -> None:
        """Wait for messages, a disconnect or a `Wake`; answer pings, queue the other messages."""
        if self._wake.fd in readable([*self._link.descriptors, self._wake.fd], seconds):
            os.eventfd_read(self._wake.fd)
        for message in self._link.receive():
            if message["kind"] == "ping":
                self._answer(message, "pong")
            elif message["kind"] == "refuse":  # at once: the sender hangs up after it
                raise SenderGone(f"the sender turned it away: {message.get('why')}")
            else:
                self._inbox.append(message)

    def _wait_or_abort(self, seconds: float) -> None:
        """Wait at most ``seconds`` for a message in the middle of a step.

        Raises:
            Aborted: the sender has aborted the transfer, or this receiver is closed.
            PeerGone: the sender has gone, or is frozen.
        """
        self._poll(seconds)
        self._check_sender()
        about = {"kind": "abort", "transfer": self._staged.transfer}
        if self._closing or about in self._inbox:
            raise Aborted

    def _check_sender(self) -> None:
        """Leave a frozen sender, by raising PeerGone; it notices when it resumes."""
        if self._staging is not None and self._staging.deadline.expired:
            raise PeerGone

    def _answer(self, message: ControlMessage, kind: str, **fields: Any) -> None:
        self._send(kind, transfer=message["transfer"], **fields)

    def _send(self, kind: str, **fields: Any) -> None:
        self._link.send({"kind": kind, **fields}, Deadline(_SEND_SECONDS))


def _abort(message: ControlMessage) -> None:
    """End the transfer: the sender has aborted it, or sent an unknown message about it."""
    raise Aborted
