"""One receiver, as its sender sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lazygt.transfer.control import Connection
from lazygt.transfer.holding import Holding


@dataclass(eq=False)
class Peer:
    """One receiver.

    Attributes:
        name: as it calls itself; unique among those connected.
        holding: what it holds of each parameter; None: all of it.
        version: what it had when the transfer began.
        transfer: number of the transfer that its answers below belong to.
        said: what it has answered: kind of message -> the message.
        staged: requests that it has taken in.
        told: requests that it has been told of by `Parts`.
        holds: it still holds tensors of the version that is to be overwritten.
        left: it has said that it goes, and holds nothing.
    """

    connection: Connection
    name: str
    holding: Holding | None = None
    version: int = 0
    transfer: int = 0
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    staged: int = 0
    told: int = 0
    holds: bool = False
    left: bool = False

    def expect(self, transfer: int) -> None:
        """Forget what was said in earlier transfers."""
        self.transfer, self.said, self.staged, self.holds = transfer, {}, 0, False
        self.told = 0
