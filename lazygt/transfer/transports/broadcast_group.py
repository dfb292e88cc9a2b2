"""Broadcast groups of a source and its receivers: sockets between CPUs, NCCL between GPUs.

Joining and leaving an NCCL group may wait for a frozen rank, so both happen in the background.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from lazygt.host.files import bind
from lazygt.transfer.control import Deadline

# -- host broadcasts: rank 0 has a socket to each other rank ---------------------------------------
# The sockets have names in the transfer sender's directory, which only its user can enter. The
# first of the two ends listens there, so joining waits for no other rank. A pipe would need less
# code but 1.5 times as long, because its writer and its reader wait for each other.

_SEND_BUFFER_BYTES = (
    4 << 20
)  # bytes that a socket buffers without a reader; the host may allow fewer

Transmit = Callable[[socket.socket, memoryview], int]


class HostGroup:
    """One rank's end of a group; rank 0 sends.

    Args:
        path: path prefix of the sockets; the rank of the receiver is appended.

    Raises:
        OSError: a socket could not be created.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        peers = range(1, size) if rank == 0 else [rank]
        transmit = _send if rank == 0 else _receive
        self._ends = [_End(f"{path}-{peer}", transmit) for peer in peers]

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Broadcast:
        """Begin to broadcast bytes from rank 0; ``wake`` is called at the end."""
        data = run.numpy().data
        return Broadcast([end.begin(data, deadline, wake) for end in self._ends])

    def close(self) -> None:
        """Leave the group; running broadcasts fail. Does not wait."""
        for end in self._ends:
            end.close()


class Broadcast:
    """Handle of a running broadcast."""

    def __init__(self, transmissions: Sequence[Future[None]]) -> None:
        self._transmissions = transmissions

    def is_completed(self) -> bool:
        """Return whether the broadcast has ended, in success or failure."""
        return all(transmission.done() for transmission in self._transmissions)

    def wait(self) -> None:
        """Wait for the end of the broadcast.

        Raises:
            RuntimeError: the broadcast failed.
        """
        for transmission in self._transmissions:
            try:
                transmission.result()
            except OSError as error:
                raise RuntimeError(str(error)) from error


class _End:
    """One end of one socket, with a thread that moves bytes through it in FIFO order.

    Args:
        path: path at which the two ends meet.
        transmit: function that sends or receives some bytes, and returns their number.
    """

    def __init__(self, path: str, transmit: Transmit) -> None:
        self._path, self._transmit = path, transmit
        self._socket, self._listens = _connect_or_listen(path)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._failure: OSError | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="lazygt-socket", daemon=True).start()

    def begin(
        self, data: memoryview, deadline: Deadline, wake: Callable[[], object]
    ) -> Future[None]:
        """Queue bytes to move, after those that were queued before."""
        future: Future[None] = Future()
        future.add_done_callback(lambda _: wake())

        def run() -> None:
            try:
                self._transmit_all(data, deadline)
            except OSError as error:
                self._failure = error  # the other end may have some of the bytes
                future.set_exception(error)
            else:
                future.set_result(None)

        self._jobs.put(run)
        return future

    def close(self) -> None:
        """End the thread; running transmissions fail. Called once."""
        self._closing = True
        os.eventfd_write(self._stop, 1)
        self._jobs.put(None)  # ends the thread, which closes the descriptors

    def _run(self) -> None:
        """Body of the thread: run the queued jobs, then close the descriptors."""
        while (run := self._jobs.get()) is not None:
            run()
            del run
        self._socket.close()
        os.close(self._stop)
        if self._listens:
            self._unlink()

    def _unlink(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _transmit_all(self, data: memoryview, deadline: Deadline) -> None:
        """Send or receive all of ``data``; accept the other end first if necessary."""
        if self._failure is not None:
            raise self._failure
        if data and self._listens:
            self._wait(select.POLLIN, deadline)
            self._accept()
        events = select.POLLOUT if self._transmit is _send else select.POLLIN
        while data:
            try:
                count = self._transmit(self._socket, data)
            except BlockingIOError:
                self._wait(events, deadline)
                continue
            if not count:
                raise ConnectionError("the sender of the group has left it")
            data = data[count:]
            if self._closing:
                raise ConnectionError("this process has left the group")

    def _wait(self, events: int, deadline: Deadline) -> None:
        """Wait until the socket is ready; raise when the group is closed or late."""
        poller = select.poll()
        poller.register(self._socket, events)
        poller.register(self._stop, select.POLLIN)
        ready = poller.poll(deadline.remaining * 1e3)
        if self._closing:
            raise ConnectionError("this process has left the group")
        if not ready:
            raise TimeoutError(f"the others were not there within {deadline.seconds:g} s")

    def _accept(self) -> None:
        """Accept the other end, and drop the listening socket and its name."""
        listener, self._listens = self._socket, False
        with listener:
            self._socket, _ = listener.accept()
        self._unlink()
        _configure(self._socket)


def _connect_or_listen(path: str) -> tuple[socket.socket, bool]:
    """Connect to the socket at a path, or else listen there; return (socket, listens)."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    temporary = f"{path}-{os.getpid()}-{sock.fileno()}"
    try:
        bind(sock, temporary)
        sock.listen(1)
        try:
            os.link(
                temporary, path
            )  # atomic: the name appears only once the socket listens, and only one end wins
        except FileExistsError:
            sock.close()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(path)
            _configure(sock)
            return sock, False
        finally:
            os.unlink(temporary)
    except OSError:
        sock.close()
        raise
    return sock, True


def _configure(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)


def _send(sock: socket.socket, data: memoryview) -> int:
    return sock.send(data)


def _receive(sock: socket.socket, buffer: memoryview) -> int:
    return sock.recv_into(buffer)


# -- groups: sockets between CPUs, NCCL between GPUs -----------------------------------------------

#: Backends of a group: sockets of the host, or NCCL.
HOST, NCCL = "host", "nccl"
T = TypeVar("T")
_GRACE_SECONDS = 1.0  # torch's timeout expires after the transfer's, whose error names the ranks


class BroadcastGroup(Protocol):
    """One rank's end of a group; rank 0 sends."""

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Any:
        """Begin to broadcast a tensor from rank 0; ``wake`` is called when it may be done."""

    def close(self) -> None:
        """Leave the group; may wait for collectives that a frozen rank holds up."""


def join(
    device: torch.device, directory: str, name: str, rank: int, size: int, seconds: float
) -> BroadcastGroup:
    """Join a group.

    Args:
        directory: the sender's directory; the ranks meet there.
        name: name of the group, unique for the sender.
        seconds: timeout for the other ranks.
    """
    path = os.path.join(directory, f"group-{name}")
    if backend_for(device) == NCCL:
        return _Nccl(device, path, rank, size, seconds)
    return HostGroup(path, rank, size)


class _Nccl:
    """An NCCL process group of torch.distributed, separate from torch's default group."""

    def __init__(
        self, device: torch.device, path: str, rank: int, size: int, seconds: float
    ) -> None:
        # one file for each group: torch removes the file when the first rank leaves the group
        store = FileStore(path, -1)
        store.set_timeout(timedelta(seconds=seconds))
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds + _GRACE_SECONDS)
        self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        # connects now, in the background, instead of within the first collective
        self._group.eager_connect_single_device(device)

    def broadcast(self, run: Tensor, deadline: Deadline, wake: Callable[[], object]) -> Any:
        """See `BroadcastGroup`."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=deadline.remaining + _GRACE_SECONDS)
        work = self._group.broadcast([run], options)
        work.get_future().add_done_callback(lambda _: wake())
        return work

    def close(self) -> None:
        self._group = None  # destroys the group even if this object is still referenced


def finished(works: Sequence[Any]) -> bool:
    """Return whether all broadcasts have ended, in success or failure."""
    return all(work.is_completed() for work in works)


def conclude(works: Sequence[Any], device: torch.device) -> None:
    """Make the results of finished broadcasts usable.

    Raises:
        RuntimeError: a broadcast failed.
    """
    for work in works:
        work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def in_background(make: Callable[[], T], done: Callable[[], object]) -> Future[T]:
    """Run ``make``, which may block for long, in a thread; then call ``done``."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        done()

    _start_thread(run)
    return future


def _start_thread(run: Callable[[], object]) -> None:
    """Run a function in a thread of its own, to its end."""
    # No daemon: torch aborts a process that exits while a group is being destroyed. Each thread
    # ends at its transfer's timeout at the latest.
    threading.Thread(target=run, name="lazygt-group", daemon=False).start()


def let_go(group: Future[BroadcastGroup] | None) -> None:
    """Drop a group, if there is one, without waiting for its threads."""
    if group is None:
        return

    def drop() -> None:
        if group.exception() is None:  # waits for a group that is still joining
            group.result().close()

    _start_thread(drop)


def backend_for(device: torch.device) -> str:
    """Return `NCCL` for GPUs, else `HOST`."""
    return NCCL if device.type == "cuda" else HOST
