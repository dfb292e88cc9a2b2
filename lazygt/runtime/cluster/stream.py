"""What makes a stream of messages reliable: numbers, acknowledgements, and what is kept until then.

Messages have the numbers 1, 2, 3, ... in each direction. What carries them keeps their order and
loses some only when it breaks: then whatever was not acknowledged is sent again from the first on
(go-back-N), and whoever receives takes each number once. Events in, decisions out: there is no
clock here and no socket.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from itertools import count

from lazygt.errors import ProtocolError

_TELL_MESSAGES = 32
_TELL_BYTES = 1 << 20


class Arrival(Enum):
    """What a message is to the one who receives it."""

    NEXT = auto()  #: the next one
    REPLAYED = auto()  #: it was here before
    AHEAD = auto()  #: others before it were lost; it will come again with them


class Stream:
    """One end of it: what it sends, and what it has received.

    Attributes:
        taken: the number of the last message received in order.
        told: the number up to which the peer was told so.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[bytearray, int]] = deque()
        self._numbers = count(1)
        self._next = 1
        self._highest = 0
        self.taken = 0
        self.told = 0
        self._untold_bytes = 0

    # -- what is sent --------------------------------------------------------------------------

    def put(self, message: bytearray) -> None:
        """Keep a message that is to be sent. It gets its number in the same instant: there is no
        place in between where a finalizer that sends, or a KeyboardInterrupt, could fall.
        """
        self._kept.extend(zip((message,), self._numbers, strict=False))

    def due(self) -> tuple[bytearray, int] | None:
        """The message that is to be sent now, and its number; `sent` says that it was."""
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
        """What carries the messages broke: all that is kept is to be sent again."""
        self._next = 0

    def acknowledged(self, number: int) -> None:
        """The peer has received up to ``number``; these are kept no longer.

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

    # -- what is received ----------------------------------------------------------------------

    def arrival(self, number: int) -> Arrival:
        if number <= self.taken:
            return Arrival.REPLAYED
        return Arrival.NEXT if number == self.taken + 1 else Arrival.AHEAD

    def take(self, number: int, size: int) -> None:
        """The message of that number, which is the next one, is here; ``size`` in bytes."""
        self.taken = number
        self._untold_bytes += size

    @property
    def untold(self) -> bool:
        """Whether the peer keeps what it need not keep."""
        return self.told < self.taken

    @property
    def must_tell(self) -> bool:
        """Whether it keeps so much that it is told at once."""
        return self.taken - self.told >= _TELL_MESSAGES or self._untold_bytes >= _TELL_BYTES

    def tell(self) -> int:
        """The number to acknowledge."""
        self.told, self._untold_bytes = self.taken, 0
        return self.taken
