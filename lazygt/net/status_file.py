"""Status pages of a session's processes, in shared memory that ``lazygt top`` reads.

A session has one file (a memfd, which has no name in a file system): page 0 is the client's, page 1
+ r rank r's. A viewer renews a lease in page 0, "watched until", so the lease of a killed viewer
expires soon. Layout of a page::

    | magic: 8 bytes | written: 8 | watched until: 8 | zeros to 64 | slot 0: 2016 | slot 1: 2016 |

A slot: ``| when: 8 | length: 4 | crc32: 4 | message |``; times are nanoseconds of the host's
monotonic clock, numbers little-endian. This is a seqlock with two slots: slot ``written % 2`` is
the newest, and its writer fills the other one and then increments ``written``. A reader's copy of a
message is complete if ``written`` is the same before and after the copy and the checksum fits, also
for a process that was stopped or killed during a write. A message is one of the classes below in
msgpack, without names, in the order of its fields.

Ranks on other hosts write into a file of their own host. While a viewer watches the client's file,
the client asks for these pages and writes them into its own file, with times on its own clock.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec

from lazygt.errors import NoSession, ProtocolError
from lazygt.host import processes
from lazygt.host.files import create_file

#: The file's name in ``/proc/PID/fd``.
FILE_NAME = "lazygt-status"
PAGE = 4096
#: Changes with the layout or the classes below.
MAGIC = b"lgtstat\x02"
_WRITTEN, _WATCHED = 1, 2  # as 64-bit words
_WORDS = 8
_FIRST_SLOT = 8 * _WORDS
_SLOT = (PAGE - _FIRST_SLOT) // 2
_HEAD = struct.Struct("<QII")
#: Bytes of the longest message.
CAPACITY = _SLOT - _HEAD.size
#: Most ranks in a page's ``waits_for``.
MOST_RANKS = 128
_ATTEMPTS = 100  # a writer writes a few times a second


class Elsewhere(msgspec.Struct, array_like=True, frozen=True):
    """Client's additions to the page of a worker on another host."""

    host: str  # the host's name
    process: str  # the worker's process state there, a letter of proc(5); empty: it has gone
    #: time of the host's last report of it, in nanoseconds of the client's monotonic clock
    received: int
    unheard: int = 0  # time of the first unanswered request to the host; 0: it answers


class WorkerPage(msgspec.Struct, array_like=True, frozen=True):
    """Status of a worker."""

    rank: int
    pid: int
    state: str  # ``starting``, ``idle`` or ``busy`` (with a message of the client's)
    run: int = 0  # number of the run under way, or of the last one; 0: there was none
    plan: str = ""  # name of its plan, in hex; empty: it has none
    step: int = -1  # the current node of the plan, in a timed run; -1: it is not known
    doing: str = ""  # the user's function that is running, and its line; empty: none
    #: arrival of the message under way, in nanoseconds of the monotonic clock; 0: none
    begun: int = 0
    #: ranks that have not joined the collective in which this one waits
    waits_for: tuple[int, ...] = ()
    done: int = 0  # number of messages handled
    living: int = 0  # living, allocated, peak, resident: bytes, as ``RankMemory`` has them
    allocated: int = 0
    peak: int = 0
    resident: int = 0
    measured_at: int = 0  # time of these measurements; 0: never, since there was no viewer yet
    #: data of a worker on another host than this page; None: it is on the same
    elsewhere: Elsewhere | None = None


class ClientPage(msgspec.Struct, array_like=True, frozen=True):
    """Status of a session's client."""

    name: str  # name of the session's directory
    pid: int
    workers: int
    device: str
    mesh: str
    opened: float  # time of the opening, in seconds since the epoch
    line: str = ""  # the user's line of the last flush
    reason: str = ""  # the cause of that flush
    runs: int = 0  # number of runs sent
    queue: int = 0  # number of those not answered by all ranks
    waits_for: tuple[int, ...] = ()  # ranks that have not answered the oldest of these
    steps: int = 0  # number of optimizer steps
    runs_a_second: float = 0.0  # over the last few seconds
    steps_a_second: float = 0.0
    hits: int = 0  # flushes with a known plan
    misses: int = 0  # new plans
    resized: int = 0  # new plans of known programs in other sizes
    miss: str = ""  # the last miss's reason
    miss_line: str = ""  # the user's line of the first new op
    compiling: int = 0  # compiling, compiled, failed_compiles: groups with compiled code requested
    compiled: int = 0
    failed_compiles: int = 0
    snapshots: int = 0
    recoveries: int = 0
    recovery: str = ""  # the last one, in words
    #: bytes on one rank by kind, as the client knows them; ``other`` is not among them
    kinds: tuple[tuple[str, int], ...] = ()
    ended: bool = False  # True if the session has been closed


T = TypeVar("T")


class StatusFile:
    """Status pages of a session.

    Args:
        fd: descriptor of the file; the caller may close it afterwards.

    Raises:
        ProtocolError: the file is no status file of this version of lazygt.
    """

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < PAGE or size % PAGE or os.pread(fd, len(MAGIC), 0) != MAGIC:
            raise ProtocolError("this is no status file, or one of another version of lazygt")
        self.pages = size // PAGE
        self._memory = mmap.mmap(fd, size)
        self._words = memoryview(self._memory).cast("Q")

    @staticmethod
    def create(world_size: int) -> int:
        """Create a file for a client and its workers; return its descriptor."""
        fd = create_file(FILE_NAME, (1 + world_size) * PAGE)
        for page in range(1 + world_size):
            os.pwrite(fd, MAGIC, page * PAGE)
        return fd

    def watch(self, seconds: float) -> None:
        """Request more details from the processes, for ``seconds``."""
        self._words[_WATCHED] = time.monotonic_ns() + int(seconds * 1e9)

    @property
    def watched(self) -> bool:
        """True if a viewer is watching."""
        return time.monotonic_ns() < self._words[_WATCHED]

    def write(self, page: int, message: WorkerPage | ClientPage, when: int = 0) -> None:
        """Write a page. Each page has one writer at a time.

        Args:
            when: time of the status, in nanoseconds of the monotonic clock; 0: now.

        Raises:
            ValueError: the message is longer than ``CAPACITY``.
        """
        data = msgspec.msgpack.encode(message)
        if len(data) > CAPACITY:
            raise ValueError(f"a status message of {len(data)} bytes; {CAPACITY} are the most")
        word = page * PAGE // 8 + _WRITTEN
        written = self._words[word] + 1
        slot = _slot(page, written)
        head = _HEAD.pack(when or time.monotonic_ns(), len(data), zlib.crc32(data))
        self._memory[slot : slot + len(head) + len(data)] = head + data
        self._words[word] = written

    def read(self, page: int) -> tuple[int, bytes] | None:
        """Return a page's time and message; None if it was never written.

        Raises:
            ProtocolError: the page stays invalid, however often it is read.
        """
        word = page * PAGE // 8 + _WRITTEN
        for _ in range(_ATTEMPTS):
            written = self._words[word]
            if not written:
                return None
            slot = _slot(page, written)
            copy = self._memory[slot : slot + _SLOT]
            when, length, checksum = _HEAD.unpack_from(copy)
            data = copy[_HEAD.size : _HEAD.size + length]
            if self._words[word] == written and zlib.crc32(data) == checksum:
                return when, data
        raise ProtocolError(f"page {page} of the status file contradicts its checksum")

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._words.release()
        self._memory.close()


def _slot(page: int, written: int) -> int:
    """Return the offset of the slot of a page's message number ``written``."""
    return page * PAGE + _FIRST_SLOT + written % 2 * _SLOT


def decoded(data: bytes | memoryview, kind: type[T]) -> T:
    """Decode msgpack data as ``kind``: a page's message, or a tuple of a remote host's pages.

    Raises:
        ProtocolError: the data is no such object.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a status page makes no sense: {error}") from error


# -- reading of a session's status pages from another process of the same user ---------------------

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
    entry = file.read(page)
    if entry is None:
        return None
    when, message = entry
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
        entry = file.read(1 + rank)
    except ProtocolError:  # code of a user's runs in its writer
        return None
    if entry is None:
        return None
    when, message = entry
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
            entry = file.read(0)
            if entry is not None:
                yield decoded(entry[1], ClientPage), file
