"""The worker process: ``python -m lazygt.runtime.launch.process LIVENESS_FD``.

Two threads. The main thread receives, passes messages to the handler, and replies. The control
thread answers pings, so that a long computation is told apart from a stopped process, and ends the
process when the client is gone. It needs the interpreter only for an instant, and torch gives that
free inside its ops, so it works while the main thread is in a long kernel.

Two signals tell of the client's end: the end of the liveness pipe, which only the client holds, and
the client's pidfd, in case a child that the client forked still holds the pipe. PR_SET_PDEATHSIG is
not used: it fires when the *thread* that started the worker ends, and a session opened in a thread
may outlive that thread.
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
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol
from unittest import mock

import zmq

from lazygt.errors import ProtocolError
from lazygt.host import processes
from lazygt.runtime.collectives import group
from lazygt.runtime.launch import session_directory
from lazygt.runtime.launch.activity import EVERY, Activity, Reporter
from lazygt.runtime.launch.channel import DATA, PING, PONG, SHUTDOWN, Server
from lazygt.runtime.launch.launcher import Boot, load_named
from lazygt.runtime.launch.mailbox import Cores, Frame, Mailboxes

# -- faults for tests: a worker that kills itself at a given message -------------------------------
# ``LAZYGT_FAULT=RANK:MESSAGE:WHEN``, with MESSAGE counted from 1 and WHEN one of ``before`` (it
# was received), ``inside`` (the first collective of it, or of the next run, begins, or its
# results are about to be kept) and ``after`` (it was done, and not answered).
# ``RANK:MESSAGE:WHEN:GROUP`` is for a process that was started for the session's process group of
# this number, so after so many recoveries; without it, for the first ones. Several are separated
# by commas.

VARIABLE = "LAZYGT_FAULT"
_PHASES = ("before", "inside", "after")


def faults_of(rank: int, group_number: int) -> dict[int, str]:
    """Return the points at which a worker is to kill itself, by message.

    Raises:
        ValueError: the variable's value is malformed.
    """
    faults: dict[int, str] = {}
    for text in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            fault_rank, message, phase, fault_group = f"{text}:0".split(":")[:4]
            if phase not in _PHASES:
                raise ValueError(f"expected one of {', '.join(_PHASES)}")
            if (int(fault_rank), int(fault_group)) == (rank, group_number):
                faults[int(message)] = phase
        except ValueError as error:
            raise ValueError(f"{VARIABLE}={text!r}: expected RANK:MESSAGE:WHEN: {error}") from None
    return faults


class Faulty:
    """Wrapper of a worker that kills its process at some messages."""

    def __init__(self, worker: Any, faults: dict[int, str]) -> None:
        self._worker, self._faults, self._messages = worker, faults, 0

    @property
    def wakes(self) -> int | None:
        """See ``Worker.wakes``."""
        return self._worker.wakes  # type: ignore[no-any-return]

    def late(self) -> Sequence[Sequence[Any]]:
        """See ``Worker.late``."""
        return self._worker.late()  # type: ignore[no-any-return]

    def handle(self, frames: list[Any]) -> Sequence[Sequence[Any]]:
        """See ``Worker.handle``."""
        self._messages += 1
        phase = self._faults.get(self._messages)
        if phase == "before":
            die()
        with ExitStack() as patches:
            if phase == "inside":
                # the extension would run it without asking anybody
                patches.enter_context(mock.patch.object(self._worker, "known_runs", None))
                patches.enter_context(mock.patch.object(self._worker.store, "put_from", die))
                patches.enter_context(mock.patch.object(group, "line", die))
            replies: Sequence[Sequence[Any]] = self._worker.handle(frames)
        if phase == "after":
            die()
        if phase == "inside":  # that was no run
            self._faults.setdefault(self._messages + 1, phase)
        return replies


def die(*_: object) -> NoReturn:
    """Kill this process, as the kernel does when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


# -- the worker process: ``python -m lazygt.runtime.launch.process LIVENESS_FD`` -------------------

_LOG_LIMIT = 1 << 20
_LOG_RETAINED = 64 << 10
_TICK_MS = int(1000 * EVERY)


class MessageHandler(Protocol):
    """Message handler of a worker, made by the boot configuration's factory.

    A handler that answers some messages later has an eventfd ``wakes``, or None, and a method
    ``late`` that returns the replies available by then.
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
    server = Server(context, boot.data, token, boot.keys, boot.max_message, mailboxes, cores)
    Control(context, boot, token, liveness_pipe, reporter).start()
    if boot.spare is not None:
        boot = wait_for_rank(server, boot, boot.spare)
    handler = build_handler(boot, reporter)
    if mailboxes is not None and boot.loads_torch:
        mailboxes.use_extension()
    gc.freeze()  # torch's modules live as long as the process: no collection need walk them
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


def wait_for_rank(server: Server, boot: Boot, memory: tuple[int, ...]) -> Boot:
    """Load the worker's modules, and wait until this process is told its rank."""
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


def serve(server: Server, handler: MessageHandler, activity: Activity) -> None:
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
    """Import torch, begin to join the group, map the arenas, and call the factory."""
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
    if os.environ.get("LAZYGT_FAULT"):
        # why: it is for tests

        return Faulty(handler, faults_of(boot.rank, boot.group_number))
    return handler


def leave_group(boot: Boot) -> None:
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
        self._server = Server(context, boot.control, token, boot.keys, boot.max_message)

    def run(self) -> None:
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
            self._reporter.look()
        except Exception:  # noqa: BLE001 - this thread says that the worker is alive
            self._reporter = None
            traceback.print_exc()

    def _answer(self) -> None:
        received = self._server.receive()
        if received is None:
            return
        kind, frames = received
        if kind == PING:
            self._server.reply(PONG, frames)
        else:
            self._server.drop_owner(f"the control channel takes pings, not {kind!r}")

    def _end(self) -> None:
        # A client that closes removes its directory itself; one that was killed cannot.
        session_directory.remove(Path(self._boot.directory))
        os._exit(0)


def _watch_client(pid: int) -> int | None:
    """Return a pidfd of the client, or None if it has gone already."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    # The number may have been given to another process since; a child knows its parent.
    return fd if os.getppid() == pid else None


def _shorten_log(fd: int) -> None:
    """Cut a log that has become long to its last part."""
    size = os.fstat(fd).st_size
    if size > _LOG_LIMIT:
        tail = os.pread(fd, _LOG_RETAINED, size - _LOG_RETAINED)
        os.ftruncate(fd, 0)
        os.write(fd, b"[...]\n" + tail)


def _read_exactly(fd: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        chunk = os.read(fd, length - len(data))
        if not chunk:
            raise ProtocolError("the client went away before the boot configuration was complete")
        data += chunk
    return data


if __name__ == "__main__":
    main()
