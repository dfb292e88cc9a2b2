"""Reading of a session's status pages from another process of the same user."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

import msgspec

from lazygt.errors import NoSession, ProtocolError
from lazygt.host import processes
from lazygt.runtime.launch.status_file import (
    FILE_NAME,
    ClientPage,
    StatusFile,
    WorkerPage,
    decoded,
)

_LINK = f"/memfd:{FILE_NAME} (deleted)"


class Page(msgspec.Struct, frozen=True):
    """Status page as read, with its age."""

    when: int  # time of writing, in nanoseconds of its host's monotonic clock
    age: float  # seconds since
    process: str  # the state of its process, a letter of proc(5); empty: it has gone
    message: bytes  # the encoded message, as in the file
    unheard: bool = False  # True if its host does not answer


class Pages(msgspec.Struct, frozen=True):
    """Pages of one host, which may be sent to another."""

    client: Page | None  # the client's page; None: the client is on another host
    #: pages of the workers on this host, in their order; None: not written yet
    ranks: tuple[Page | None, ...]


def read_client(file: StatusFile) -> Page | None:
    """Return the client's page; None if it has not been written.

    Raises:
        ProtocolError: the page is invalid.
    """
    return _page(file, 0, ClientPage)


def read_pages(file: StatusFile) -> Pages:
    """Return all pages of a file, with the states of their processes.

    Raises:
        ProtocolError: a page is invalid.
    """
    client = read_client(file)
    return Pages(client, tuple(_page(file, page, WorkerPage) for page in range(1, file.pages)))


def _page(file: StatusFile, page: int, kind: type[WorkerPage] | type[ClientPage]) -> Page | None:
    told = file.read(page)
    if told is None:
        return None
    when, message = told
    writer: WorkerPage | ClientPage = decoded(message, kind)
    there = writer.elsewhere if isinstance(writer, WorkerPage) else None
    process = processes.state(writer.pid) if there is None else there.process
    unheard = there is not None and there.unheard
    return Page(when, (time.monotonic_ns() - when) / 1e9, process, message, bool(unheard))


def read_ranks(file: StatusFile, pids: Mapping[int, int]) -> tuple[Page | None, ...]:
    """Return some workers' pages, undecoded; None for one not written or broken.

    Args:
        pids: rank -> its process id, on this host.
    """
    return tuple(_read_rank(file, rank, pid) for rank, pid in pids.items())


def _read_rank(file: StatusFile, rank: int, pid: int) -> Page | None:
    try:
        told = file.read(1 + rank)
    except ProtocolError:  # code of a user's runs in its writer
        return None
    if told is None:
        return None
    when, message = told
    return Page(when, (time.monotonic_ns() - when) / 1e9, processes.state(pid), message)


def sessions() -> list[tuple[str, int]]:
    """Return (name, process id) of all sessions with workers of this user's processes."""
    there = []
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
        # gone meanwhile, not to be seen, or of another version of lazygt
        with suppress(FileNotFoundError, ProcessLookupError, NoSession, ProtocolError):
            if os.stat(f"/proc/{pid}").st_uid != os.geteuid():
                continue
            for page, file in _opened(pid):
                file.close()
                if page.pid == pid:  # and not a child that has its descriptors
                    there.append((page.name, pid))
    return there


def open_files(pid: int) -> dict[str, StatusFile]:
    """Return the status files of a process's sessions, by the sessions' names.

    Raises:
        NoSession: there is no such process, it is another user's, or it has no session with
            workers.
    """
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except (FileNotFoundError, ProcessLookupError):
        raise NoSession(f"there is no process {pid}") from None
    if owner != os.geteuid():
        raise NoSession(f"process {pid} belongs to user {owner}; only they can watch its sessions")
    files = {page.name: file for page, file in _opened(pid)}
    if not files:
        raise NoSession(
            f"process {pid} has no lazygt session with workers; `lazygt top` without a number "
            f"lists the sessions that there are"
        )
    return files


def _opened(pid: int) -> Iterator[tuple[ClientPage, StatusFile]]:
    """Yield the status files with a client's page that a process has open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    except PermissionError as error:
        raise NoSession(f"the files of process {pid} can't be looked at: {error}") from None
    known = set()
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError, PermissionError):  # closed meanwhile, or not to be seen
            if os.readlink(path) != _LINK or (file_number := os.stat(path).st_ino) in known:
                continue  # another file, or the same again: a mapping has a descriptor of its own
            known.add(file_number)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                file = StatusFile(fd)
            finally:
                os.close(fd)
            told = file.read(0)
            if told is not None:
                yield decoded(told[1], ClientPage), file
