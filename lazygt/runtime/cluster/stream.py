"""Reliable message stream: numbers, acknowledgements, and unacknowledged messages.

Messages have the numbers 1, 2, 3, ... in each direction. Their carrier keeps the order and loses
messages only when it breaks: then all unacknowledged ones are sent again from the first on
(go-back-N), and the receiver takes each number once. This is a pure state machine, without clock or
socket.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from itertools import count

from lazygt.errors import ProtocolError

_TELL_MESSAGES = 32
_TELL_BYTES = 1 << 20


class Arrival(Enum):
    """Classification of a message by its receiver."""

    NEXT = auto()  #: the next one
    REPLAYED = auto()  #: it was here before
    AHEAD = auto()  #: others before it were lost; it will come again with them


class Stream:
    """One end of a stream: sent messages, and the position of received ones.

    Attributes:
        taken: the number of the last message received in order.
        told: the last acknowledged number of these.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[bytearray, int]] = deque()
        self._numbers = count(1)
        self._next = 1
        self._highest = 0
        self.taken = 0
        self.told = 0
        self._untold_bytes = 0

    # -- sending -------------------------------------------------------------------------------

    def put(self, message: bytearray) -> None:
        """Append a message to send, and number it atomically.

        There is no place in between where a finalizer that sends, or a KeyboardInterrupt, could
        fall.
        """
        self._kept.extend(zip((message,), self._numbers, strict=False))

    def due(self) -> tuple[bytearray, int] | None:
        """Return the next message to send and its number; `sent` confirms it."""
        if not self._kept:
            return None
        index = max(0, self._next - self._kept[0][1])
        return self._kept[index] if index < len(self._kept) else None

    def is_first_time(self, number: int) -> bool:
        return number > self._highest

    def sent(self, number: int) -> None:
        self._highest = max(self._highest, number)
        self._next = number + 1

    def again(self) -> None:
        """Schedule all kept messages again, after their carrier broke."""
        self._next = 0

    def acknowledged(self, number: int) -> None:
        """Drop the messages up to ``number``, which the peer has received.

        Raises:
            ProtocolError: there is no such message yet.
        """
        if number > self._highest:
            raise ProtocolError(
                f"message {number} is acknowledged, and {self._highest} was the last one sent"
            )
        while self._kept and self._kept[0][1] <= number:
            self._kept.popleft()

    @property
    def pending(self) -> int:
        """Bytes of the messages that are kept."""
        return sum(len(message) for message, _ in self._kept)

    # -- receiving -----------------------------------------------------------------------------

    def arrival(self, number: int) -> Arrival:
        if number <= self.taken:
            return Arrival.REPLAYED
        return Arrival.NEXT if number == self.taken + 1 else Arrival.AHEAD

    def take(self, number: int, size: int) -> None:
        """Note the arrival of message ``number``, the next one; ``size`` in bytes."""
        self.taken = number
        self._untold_bytes += size

    @property
    def untold(self) -> bool:
        """True if some received messages are not acknowledged."""
        return self.told < self.taken

    @property
    def must_tell(self) -> bool:
        """True if so many are unacknowledged that the acknowledgement goes out at once."""
        return self.taken - self.told >= _TELL_MESSAGES or self._untold_bytes >= _TELL_BYTES

    def tell(self) -> int:
        """Return the number to acknowledge."""
        self.told, self._untold_bytes = self.taken, 0
        return self.taken
