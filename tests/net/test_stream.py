"""The reliable stream alone: what is drawn is loss, repetition, order and new TCP connections."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from lazygt.errors import ProtocolError
from lazygt.net.reliable import Arrival, Stream


@dataclass
class End:
    """A stream, what it was given, what it delivered, and the frames on their way to it."""

    stream: Stream = field(default_factory=Stream)
    given: list[bytes] = field(default_factory=list)
    delivered: list[bytes] = field(default_factory=list)
    wire: list[tuple[int, int, bytes]] = field(default_factory=list)


class Ends(RuleBasedStateMachine):
    """Two ends, and a network that does what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = [End(), End()]

    side = st.integers(0, 1)

    @rule(side=side)
    def give(self, side: int) -> None:
        end = self.ends[side]
        end.given.append(b"%d" % len(end.given))
        end.stream.put(bytearray(end.given[-1]))

    @rule(side=side, count=st.integers(1, 4))
    def send(self, side: int, count: int) -> None:
        here, there = self.ends[side], self.ends[1 - side]
        for _ in range(count):
            if (entry := here.stream.due()) is not None:
                message, number = entry
                there.wire.append((number, here.stream.acknowledge(), bytes(message)))
                here.stream.sent(number)

    @rule(side=side, place=st.integers(0, 9), stays=st.booleans())
    def arrive(self, side: int, place: int, stays: bool) -> None:
        """Any frame that is on its way, not only the first; it may come again later."""
        end = self.ends[side]
        if not end.wire:
            return
        number, acknowledged, message = frame = end.wire.pop(place % len(end.wire))
        end.wire += [frame] * stays
        end.stream.drop_acknowledged(acknowledged)
        if end.stream.arrival(number) is Arrival.NEXT:
            end.stream.take(number, len(message))
            end.delivered.append(message)

    @rule(side=side, count=st.integers(1, 5))
    def lose(self, side: int, count: int) -> None:
        del self.ends[side].wire[-count:]

    @rule()
    def connect_again(self) -> None:
        for here, there in (self.ends, self.ends[::-1]):
            here.stream.drop_acknowledged(there.stream.last_received)
            here.stream.resend_all()

    @invariant()
    def each_message_came_once_and_in_order(self) -> None:
        for here, there in (self.ends, self.ends[::-1]):
            assert here.delivered == there.given[: len(here.delivered)]

    @invariant()
    def what_may_be_needed_is_kept(self) -> None:
        for here, there in (self.ends, self.ends[::-1]):
            missing = there.given[len(here.delivered) :]
            assert there.stream.pending >= sum(map(len, missing))

    def teardown(self) -> None:
        for end in self.ends:
            end.wire.clear()
        self.connect_again()
        for side, (here, there) in enumerate((self.ends, self.ends[::-1])):
            self.send(side, len(here.given) + 1)
            while there.wire:
                self.arrive(1 - side, 0, stays=False)
        self.each_message_came_once_and_in_order()
        for here, there in (self.ends, self.ends[::-1]):
            assert here.delivered == there.given
            there.stream.drop_acknowledged(here.stream.last_received)
            assert there.stream.pending == 0


TestEnds = Ends.TestCase
TestEnds.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


def test_acknowledgement_of_unsent_message_is_refused() -> None:
    stream = Stream()
    stream.put(bytearray(b"a"))
    with pytest.raises(ProtocolError, match="message 1 is acknowledged, and 0 was the last"):
        stream.drop_acknowledged(1)
    assert stream.pending == 1


def test_a_peer_is_told_at_once_of_much_or_of_many() -> None:
    stream = Stream()
    for number in range(1, 32):
        stream.take(number, 100)
        assert stream.owes_acknowledgement
        assert not stream.must_acknowledge
    stream.take(32, 100)
    assert stream.must_acknowledge
    assert stream.acknowledge() == 32
    assert not stream.owes_acknowledgement
    stream.take(33, 1 << 20)
    assert stream.must_acknowledge
