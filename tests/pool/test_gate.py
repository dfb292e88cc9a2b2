"""A session's gate: which messages go on, and what is counted."""

from __future__ import annotations

import pytest

from lazygt.errors import ProtocolError
from lazygt.pool import hosted
from lazygt.pool.hosted import Gate, parse_run, sequence_number
from lazygt.runtime.cluster.protocol import Died, Mirror, Opened, Said, Tell
from lazygt.runtime.messages import Done, Run, Snap
from lazygt.runtime.wire import encode


class Connection:
    """What a gate is before."""

    fd, closed = -1, None

    def __init__(self):
        self.sent = []

    def send(self, frames):
        self.sent.append(frames)


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(hosted, "time", clock)
    return clock


class Ways:
    """A gate, with whether runs may go on."""

    def __init__(self):
        self.open, self.changes = True, 0
        self.gate = Gate(Connection(), lambda running: self.open and not running, self.change)

    def change(self):
        self.changes += 1

    def put(self, *messages):
        for frames in messages:
            self.gate.put([memoryview(bytes(frame)) for frame in frames])

    def taken(self):
        count = 0
        while self.gate.take() is not None:
            count += 1
        return count


@pytest.fixture
def ways(clock):
    return Ways()


def run(number, *workers):
    return encode(Tell(0, workers or (0,)), encode(Run(number)))


def done(number, worker=0):
    return encode(Said(0, worker), encode(Done(number)))


def test_run_and_sequence_numbers_of_messages():
    assert parse_run(run(300, 0, 1)) == (300, (0, 1))
    assert parse_run(encode(Tell(0, (0,)), encode(Snap(3)))) is None
    assert parse_run(encode(Mirror(0, 0), [b"1234"])) is None
    assert sequence_number(encode(Done(70_000))[0]) == 70_000
    for wrong in (b"", b"\x91\x02", b"\x92\x02\xa1a", b"\x92\x02\xff"):
        with pytest.raises(ProtocolError, match=r"^a run without a number: expected \[tag, seq, "):
            sequence_number(wrong)


def test_waiting_run_holds_back_later_messages(ways):
    ways.open = False
    snap = encode(Tell(0, (0,)), encode(Snap(1)))
    ways.put(snap, run(1), snap, run(2))
    assert ways.taken() == 1
    assert ways.gate.load()[1:] == (0, 2)
    ways.open = True
    assert ways.taken() == 2
    ways.gate.send(done(1))
    assert ways.taken() == 1


def test_an_answer_goes_on_before_it_is_counted(ways):
    """The client need not wait for what the gateway makes of it."""
    sent = ways.gate._connection.sent
    ways.gate._changed = lambda: sent.append("counted")
    ways.put(run(1))
    ways.taken()
    ways.gate.send(done(1))
    assert sent == [done(1), "counted"]


def test_started_run_continues_while_gate_is_closed(ways):
    ways.put(run(1, 0), run(1, 1), run(2, 0))
    assert ways.gate.take() is not None
    ways.open = False
    assert ways.taken() == 1
    ways.gate.send(done(1, 0))
    ways.open = True
    assert ways.taken() == 0
    ways.gate.send(done(1, 1))
    assert ways.taken() == 1
    assert ways.changes == 2


def test_nobody_gets_past_its_turn_with_a_number_that_has_gone_on(ways):
    """Runs are numbered by the client: one that counts as it likes waits all the same."""
    ways.put(run(5, 0))
    assert ways.taken() == 1
    ways.open = False
    for number, workers in ((5, (0,)), (4, (0,)), (1, (0, 1)), (5, (0, 1))):
        ways.put(run(number, *workers))
    assert ways.taken() == 0
    assert ways.gate.load()[1:] == (0, 4)
    ways.gate.send(done(5))
    ways.open = True
    assert ways.taken() == 1


def test_a_run_that_is_none_is_refused_before_it_waits(ways):
    """Behind one that is held back, it was looked at where nobody minded that it makes no sense."""
    ways.open = False
    ways.put(run(1))
    wrong = encode(Tell(0, (0,)), [b"\x92\x02\xa1a"])
    assert Run.begins(wrong[1])
    with pytest.raises(ProtocolError):
        ways.put(wrong)
    assert ways.gate.load()[1:] == (0, 1)


def test_run_seconds_exclude_idle_time(ways, clock):
    ways.put(run(1))
    ways.taken()
    clock.now += 5.0  # the worker starts
    assert ways.gate.load() == (0.0, 0, 0)
    ways.gate.send(done(1))
    clock.now += 1.0  # the client thinks
    ways.put(run(2))
    ways.taken()
    clock.now += 2.0
    assert ways.gate.load() == (2.0, 1, 0)
    clock.now += 0.5
    ways.gate.send(done(2))
    clock.now += 1.0
    assert ways.gate.load() == (0.5, 0, 0)


def test_long_start_counts_as_run_time(ways, clock):
    ways.put(run(1))
    ways.taken()
    clock.now += 65.0
    assert ways.gate.load() == (5.0, 1, 0)


def test_dead_worker_has_no_pending_runs(ways):
    ways.put(run(1))
    ways.taken()
    ways.gate.send(encode(Opened(0, (11, 12))))
    ways.gate.send(encode(Died(0, 0, 11, "signal SIGKILL", "")))
    assert ways.gate.load()[1:] == (0, 0)
    assert ways.gate.pids == {0: (11, 12)}
    ways.put(run(1), run(2))
    assert ways.taken() == 1
