"""The worker process: ``python -m lazygt.runtime.launch.process LIVENESS_FD``.

The process has two threads. The main thread receives, passes messages to the handler, and replies.
The control thread answers pings, which distinguishes a long computation from a stopped process, and
ends the process when the client is gone. It needs the interpreter lock only for an instant, and
torch releases the lock inside its ops, so it also runs during a long kernel of the main thread.

Two events signal the client's end: end of file on the liveness pipe, which only the client has
open, and the client's pidfd, in case a child that the client forked still has the pipe open.
PR_SET_PDEATHSIG is not used: it fires when the *thread* that started the worker ends, and a session
opened in a thread may outlive that thread.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import zmq

from lazygt.errors import ProtocolError
from lazygt.host import processes
from lazygt.net.channel import DATA, PING, PONG, SHUTDOWN, WorkerChannel
from lazygt.net.mailbox import Cores, Frame, Mailboxes
from lazygt.runtime.launch import session_directory
from lazygt.runtime.launch.activity import EVERY, Activity, Reporter
from lazygt.runtime.launch.launcher import Boot, load_named

_LOG_LIMIT = 1 << 20
_LOG_RETAINED = 64 << 10
_TICK_MS = int(1000 * EVERY)


class MessageHandler(Protocol):
    """Message handler of a worker, made by the boot configuration's factory.

    A handler with deferred replies also has an eventfd ``wakes``, which is written when such
    replies are available, and a method ``late``, which returns them.
    """

    def handle(self, frames: list[Frame]) -> Sequence[Sequence[Frame]]:
        """Handle a message and return the replies.

        Raises:
            ProtocolError: the message is malformed; its sender is dropped.
        """


def main() -> None:
    """Run the worker until the client shuts it down or goes away."""
    if os.environ.pop(processes.VARIABLE, ""):
        processes.hide()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    liveness_pipe = int(sys.argv[1])
    boot = read_boot(liveness_pipe)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    token = bytes.fromhex(boot.token)
    activity = Activity()
    reporter = None
    if boot.status is not None:
        reporter = Reporter(boot.status, None if boot.spare else boot.rank, activity)
    mailboxes = cores = None
    if boot.mailboxes is not None:
        mailboxes = Mailboxes(boot.mailboxes, of_worker=True)
        if boot.spins:
            cores = Cores((os.getpid(), boot.client_pid), boot.neighbours + 1)
    server = WorkerChannel(context, boot.data, token, boot.keys, boot.max_message, mailboxes, cores)
    Control(context, boot, token, liveness_pipe, reporter).start()
    if boot.spare is not None:
        boot = wait_for_rank(server, boot, boot.spare)
    handler = build_handler(boot, reporter)
    if mailboxes is not None and boot.loads_torch:
        mailboxes.use_extension()
    gc.freeze()  # torch's modules live as long as the process, so collections skip them
    serve(server, handler, activity)
    leave_group(boot)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the control thread holds a socket, and torch's own threads have nothing to save.
    os._exit(0)


def read_boot(fd: int) -> Boot:
    """Read the boot configuration from the pipe: 4 bytes of length, then the text."""
    length = int.from_bytes(_read_exactly(fd, 4), "little")
    return Boot.from_bytes(_read_exactly(fd, length))


def wait_for_rank(server: WorkerChannel, boot: Boot, memory: tuple[int, ...]) -> Boot:
    """Load the worker's modules, and wait for the rank of this spare process.

    Ends the process if it is shut down instead.

    Args:
        memory: descriptors of the snapshot memory of each worker of this host.

    Returns:
        The boot configuration completed by rank, group number and snapshot memory.
    """
    load_named(boot.factory)
    received = None
    while received is None:
        received = server.receive()
    kind, frames = received
    if kind != DATA:
        os._exit(0)
    assignment = json.loads(bytes(frames[0]))
    os.environ.update(assignment["environment"])
    rank, group_number = assignment["rank"], assignment["group_number"]
    return replace(
        boot, rank=rank, group_number=group_number, snapshots=memory[assignment["index"]]
    )


def serve(server: WorkerChannel, handler: MessageHandler, activity: Activity) -> None:
    """Receive, handle and reply, until the owner sends SHUTDOWN."""
    late: Callable[[], Sequence[Sequence[Frame]]] | None = None
    if (wakes := getattr(handler, "wakes", None)) is not None:
        server.watch(wakes)
        late = handler.late  # type: ignore[attr-defined]
    while True:
        received = server.receive()
        for reply in () if late is None else late():
            server.reply(DATA, reply)
        if received is None:
            continue
        kind, frames = received
        if kind == SHUTDOWN:
            return
        try:
            if kind != DATA:
                raise ProtocolError(f"a message of unknown kind {kind!r}")
            activity.begin(frames)
            replies = handler.handle(list(frames))
        except ProtocolError as error:
            server.drop_owner(str(error))
            continue
        finally:
            activity.end(frames)
        for reply in replies:
            server.reply(DATA, reply)


def build_handler(boot: Boot, reporter: Reporter | None = None) -> MessageHandler:
    """Build the message handler: import torch, begin to join the group, and map the arenas."""
    upload = fetch = None
    if boot.loads_torch:
        # why: torch takes a second to load, and the sockets must be there before that
        import torch

        # why: they import torch
        from lazygt.runtime import arenas
        from lazygt.runtime.collectives import group

        torch.set_num_threads(boot.threads)
        if boot.group is not None and boot.rendezvous is not None:
            listener = boot.rendezvous.fd
            group.join(boot.group, boot.rank, boot.world_size, listener, boot.group_number)
        upload = None if boot.upload is None else arenas.Arena.attach(boot.upload)
        fetch = None if boot.fetch is None else arenas.Arena.own(boot.fetch)
    options: dict[str, object] = {}
    if boot.copier:
        options["copier"] = lambda device: load_named(boot.copier)(device)
    if boot.snapshots is not None and boot.loads_torch:
        options["snapshots"] = arenas.Arena.own(boot.snapshots)
    handler: MessageHandler = load_named(boot.factory)(
        device=boot.device,
        rank=boot.rank,
        world_size=boot.world_size,
        upload=upload,
        fetch=fetch,
        **options,
    )
    if reporter is not None:
        reporter.begin(boot.rank, handler)
    return handler


def leave_group(boot: Boot) -> None:
    """Leave the process group, if the worker has joined one."""
    if boot.group is not None and boot.loads_torch:
        # why: it imports torch, see build_handler
        from lazygt.runtime.collectives import group

        group.leave()


class Control(threading.Thread):
    """Control thread: answers pings, watches the client, reports, keeps the log short."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        boot: Boot,
        token: bytes,
        liveness_pipe: int,
        reporter: Reporter | None = None,
    ) -> None:
        super().__init__(name="lazygt-control", daemon=True)
        self._boot, self._reporter = boot, reporter
        self._liveness_pipe = liveness_pipe
        self._server = WorkerChannel(context, boot.control, token, boot.keys, boot.max_message)

    def run(self) -> None:
        """Answer pings and write the status page; when the client ends, end the process."""
        client = _watch_client(self._boot.client_pid)
        if client is None:
            self._end()
            return
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._liveness_pipe, select.POLLIN)
        poller.register(client, select.POLLIN)
        while True:
            ready = dict(poller.poll(_TICK_MS))
            if self._liveness_pipe in ready or client in ready:
                self._end()
            if self._server.socket in ready:
                self._answer()
            if not ready:
                _shorten_log(2)
            self._report()

    def _report(self) -> None:
        """Write the status page. If that fails, the worker goes on without it."""
        if self._reporter is None:
            return
        try:
            self._reporter.update()
        except Exception:  # noqa: BLE001 - this thread must go on answering pings
            self._reporter = None
            traceback.print_exc()

    def _answer(self) -> None:
        """Answer a ping, and drop an owner that sends anything else."""
        received = self._server.receive()
        if received is None:
            return
        kind, frames = received
        if kind == PING:
            self._server.reply(PONG, frames)
        else:
            self._server.drop_owner(f"the control channel takes pings, not {kind!r}")

    def _end(self) -> None:
        """End the process, since the client has ended; remove the session's directory."""
        # A client that closes removes its directory itself; a killed client cannot.
        session_directory.remove(Path(self._boot.directory))
        os._exit(0)


def _watch_client(pid: int) -> int | None:
    """Return a pidfd of the client, or None if it has gone already."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The pid may be another process's by now: the client is the parent of this process.
    return fd if os.getppid() == pid else None


def _shorten_log(fd: int) -> None:
    """Truncate a long log to its last `_LOG_RETAINED` bytes."""
    size = os.fstat(fd).st_size
    if size > _LOG_LIMIT:
        tail = os.pread(fd, _LOG_RETAINED, size - _LOG_RETAINED)
        os.ftruncate(fd, 0)
        os.write(fd, b"[...]\n" + tail)


def _read_exactly(fd: int, length: int) -> bytes:
    """Read ``length`` bytes from a pipe; ProtocolError if it is closed before."""
    data = b""
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            raise ProtocolError("the client went away before the boot configuration was complete")
        data += chunk
    return data


if __name__ == "__main__":
    main()
