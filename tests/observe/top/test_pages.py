"""Status pages: their layout, and that nobody sees half of a message."""

import os
import struct
import sys
import threading
import zlib

import msgspec
import pytest

from lazygt.errors import ProtocolError
from lazygt.net import status_file
from lazygt.net.status_file import (
    CAPACITY,
    MAGIC,
    PAGE,
    ClientPage,
    StatusFile,
    WorkerPage,
    decoded,
    read_pages,
)
from lazygt.runtime.launch.activity import Activity, Reporter, users_function
from lazygt.runtime.messages import Run
from lazygt.runtime.wire import encode
from lazygt.runtime.worker.worker_requests import WorkerInsight

pytestmark = pytest.mark.timeout(60)
CLIENT = ClientPage("lazygt-1", 1, 1, "cpu", "w=1", 0.0, ended=True)


@pytest.fixture
def file():
    fd = StatusFile.create(2)
    pages = StatusFile(fd)
    yield pages, fd
    pages.close()
    os.close(fd)


def test_page_has_documented_layout(file) -> None:
    pages, fd = file
    assert os.fstat(fd).st_size == 3 * PAGE
    assert [os.pread(fd, 8, page * PAGE) for page in range(3)] == [MAGIC] * 3
    pages.write(2, WorkerPage(1, 77, "busy", run=5, waits_for=(0,)))
    written, watched = struct.unpack("<QQ", os.pread(fd, 16, 2 * PAGE + 8))
    assert (written, watched) == (1, 0)
    slot = os.pread(fd, 2016, 2 * PAGE + 64 + 2016)
    when, length, checksum = struct.unpack_from("<QII", slot)
    message = slot[16 : 16 + length]
    assert zlib.crc32(message) == checksum
    assert pages.read(2) == (when, message)
    told = decoded(message, WorkerPage)
    assert (told.rank, told.pid, told.state, told.run, told.waits_for) == (1, 77, "busy", 5, (0,))
    assert pages.read(0) is None
    assert pages.read(1) is None


def test_a_writer_that_was_stopped_halfway_leaves_the_message_before(file) -> None:
    pages, fd = file
    pages.write(1, WorkerPage(0, 1, "idle", run=1))
    pages.write(1, WorkerPage(0, 1, "idle", run=2))
    os.pwrite(fd, b"\xff" * 100, PAGE + 64 + 2016)  # the slot of the next message, not counted yet
    assert decoded(pages.read(1)[1], WorkerPage).run == 2


def test_a_page_that_contradicts_its_checksum_is_refused(file) -> None:
    pages, fd = file
    pages.write(1, WorkerPage(0, 1, "idle"))
    os.pwrite(fd, b"\xff", PAGE + 64 + 2016 + 20)
    with pytest.raises(ProtocolError, match="contradicts its checksum"):
        pages.read(1)
    with pytest.raises(ProtocolError, match="makes no sense"):
        decoded(b"\x90", WorkerPage)
    with pytest.raises(ProtocolError, match="makes no sense"):
        decoded(b"\x93\x00\x01\xa1\xff", WorkerPage)  # a string that is no UTF-8


def nested() -> bytes:
    """More arrays within arrays than a decoder follows."""
    return b"\x91" * (2 * sys.getrecursionlimit()) + b"\xc0"


def test_insight_minds_no_arrays_within_arrays() -> None:
    insight = WorkerInsight(lambda: None, None)
    run = Run(3, b"\x07", 0, None, None)
    header = bytes(encode(run)[0])
    assert insight.run_named(header) == (3, "07")
    later = bytes([header[0] + 1]) + header[1:] + nested()
    assert insight.run_named(later) is None


def test_arrays_within_arrays_are_refused() -> None:
    """In a field that only a later version may have, which a reader skips."""
    page = msgspec.msgpack.encode(CLIENT)
    fields = len(ClientPage.__struct_fields__)
    assert page[:3] == b"\xdc" + fields.to_bytes(2, "big")
    later = b"\xdc" + (fields + 1).to_bytes(2, "big") + page[3:]
    assert decoded(later + b"\x01", ClientPage) == CLIENT
    with pytest.raises(ProtocolError, match="makes no sense: maximum recursion depth"):
        decoded(later + nested(), ClientPage)


def test_a_message_has_a_bound(file) -> None:
    pages, _ = file
    with pytest.raises(ValueError, match=f"{CAPACITY} are the most"):
        pages.write(1, WorkerPage(0, 1, "x" * CAPACITY))
    most = WorkerPage(
        2**20, 2**22, "starting", 2**62, "f" * 32, 2**30, "d" * 800, 2**62,
        tuple(range(2**20, 2**20 + status_file.MOST_RANKS)), *[2**60] * 6,
    )  # fmt: skip
    pages.write(1, most)
    assert decoded(pages.read(1)[1], WorkerPage) == most


def test_no_reader_sees_half_a_message(file) -> None:
    """A writer on another thread changes all fields together."""
    pages, fd = file
    other = StatusFile(os.dup(fd))
    ended = threading.Event()

    def write() -> None:
        for number in range(1, 20_001):
            other.write(1, WorkerPage(0, number, "s" * (number % 300), number, done=number))
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not ended.is_set():
        told = pages.read(1)
        if told is not None:
            page = decoded(told[1], WorkerPage)
            assert page.pid == page.run == page.done
            assert len(page.state) == page.run % 300
            seen.add(page.run)
    thread.join()
    assert decoded(pages.read(1)[1], WorkerPage).run == 20_000
    assert seen
    other.close()


def test_other_files_are_refused() -> None:
    fd = os.memfd_create("other")
    with pytest.raises(ProtocolError, match="another version"):
        StatusFile(fd)
    os.ftruncate(fd, PAGE)
    with pytest.raises(ProtocolError, match="another version"):
        StatusFile(fd)
    os.close(fd)


def test_watch_expires(file) -> None:
    pages, _ = file
    assert not pages.watched
    pages.watch(60)
    assert pages.watched
    pages.watch(-1)
    assert not pages.watched


def test_pages_of_a_host_can_be_sent(file) -> None:
    pages, _ = file
    pages.write(0, ClientPage("lazygt-x", os.getpid(), 2, "cpu", "data=2", 0.0))
    pages.write(2, WorkerPage(1, 2**22 + 5, "busy"))
    told = read_pages(pages)
    assert told.client is not None
    assert told.client.process in "RSD"
    assert told.ranks[0] is None
    assert told.ranks[1] is not None
    assert told.ranks[1].process == ""
    # why: it is asserted that it can
    import msgspec

    again = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=type(told))
    assert again == told


class FakeInsight:
    """Counts how often it is asked for memory."""

    def __init__(self) -> None:
        self.weighed = 0

    def run_named(self, header):
        return (int(header), "ab") if header else None

    def waits_for(self):
        return (3, 4)

    def step(self, run):
        return 7

    def memory(self):
        self.weighed += 1
        return 10, 20, 30, 40


def test_a_reporter_tells_of_the_main_thread(file, monkeypatch) -> None:
    pages, fd = file
    activity, insight = Activity(), FakeInsight()
    reporter = Reporter(os.dup(fd), None, activity)
    reporter.update()
    assert pages.read(1) is None  # it has no rank yet
    reporter.rank = 0

    def now() -> WorkerPage:
        reporter._next = reporter._measure_at = 0.0
        reporter.update()
        return decoded(pages.read(1)[1], WorkerPage)

    assert now().state == "starting"
    reporter.begin(0, type("Handler", (), {"insight": lambda self: insight})())
    assert now() == WorkerPage(0, os.getpid(), "idle")
    activity.begin([b"12"])
    busy = now()
    assert (busy.state, busy.run, busy.plan, busy.step) == ("busy", 12, "ab", 7)
    assert (busy.waits_for, busy.begun, busy.done) == ((3, 4), activity.begun, 0)
    assert insight.weighed == 0  # nobody watches
    pages.watch(60)
    activity.end([b"12"])
    idle = now()
    assert (idle.state, idle.run, idle.done, idle.waits_for) == ("idle", 12, 1, ())
    assert (idle.living, idle.allocated, idle.peak, idle.resident) == (10, 20, 30, 40)
    assert insight.weighed == 1
    reporter.update()  # a moment ago
    assert insight.weighed == 1


def test_innermost_user_function_is_shown() -> None:
    # why: a frame is looked at
    import sys

    text = users_function(sys._getframe())
    assert text.startswith("test_innermost_user_function_is_shown ")
    assert f"{os.path.basename(__file__)}:" in text
