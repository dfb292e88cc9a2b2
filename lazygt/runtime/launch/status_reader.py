"""Reads a session's status pages from another process of the same user."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from lazygt.errors import NoSession
from lazygt.runtime.launch import procfs
from lazygt.runtime.launch.status_file import (
    FILE_NAME,
    ClientPage,
    StatusFile,
    WorkerPage,
    decoded,
)

_LINK = f"/memfd:{FILE_NAME} (deleted)"


class Page(msgspec.Struct, frozen=True):
    """One page, as it was read.

    Attributes:
        when: it was written, in nanoseconds of its host's monotonic clock; age: seconds since.
        process: the letter that proc(5) has for what its process does; empty: it has gone.
        message: as it lies in the file.
    """

    when: int
    age: float
    process: str
    message: bytes


class Pages(msgspec.Struct, frozen=True):
    """The pages of one host, which may be sent to another.

    Attributes:
        client: None: the client is on another host.
        ranks: of the workers on this host, in their order; None: not written yet.
    """

    client: Page | None
    ranks: tuple[Page | None, ...]


def read_pages(file: StatusFile) -> Pages:
    """All that a file says now, with what becomes of its processes.

    Raises:
        ProtocolError: a page makes no sense.
    """
    client = _page(file, 0, ClientPage)
    return Pages(client, tuple(_page(file, page, WorkerPage) for page in range(1, file.pages)))


def _page(file: StatusFile, page: int, kind: type[WorkerPage] | type[ClientPage]) -> Page | None:
    told = file.read(page)
    if told is None:
        return None
    when, message = told
    pid = decoded(message, kind).pid  # type: ignore[type-var]
    return Page(when, (time.monotonic_ns() - when) / 1e9, procfs.state(pid), message)


def open_files(pid: int) -> dict[str, StatusFile]:
    """The status files of a process's sessions, by the sessions' names.

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
    files = dict(_opened(pid))
    if not files:
        raise NoSession(
            f"process {pid} has no lazygt session with workers; `lazygt top` without a number "
            f"lists the sessions that there are"
        )
    return files


def _opened(pid: int) -> Iterator[tuple[str, StatusFile]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    except PermissionError as error:
        raise NoSession(f"the files of process {pid} can't be looked at: {error}") from None
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError, PermissionError):  # closed meanwhile, or not to be seen
            if os.readlink(path) != _LINK:
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                file = StatusFile(fd)
            finally:
                os.close(fd)
            told = file.read(0)
            if told is not None:
                yield decoded(told[1], ClientPage).name, file
