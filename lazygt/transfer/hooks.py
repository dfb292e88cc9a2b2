"""What a strategy may fill in, beside what its sender and its receiver must."""

from __future__ import annotations

from collections.abc import Sequence

from lazygt.transfer.control import Connection, Message
from lazygt.transfer.incoming import Block, Incoming
from lazygt.transfer.outgoing import Outgoing
from lazygt.transfer.peer import Peer


class SenderHooks:
    """Steps of a sender; by default nothing happens."""

    def invitation(self, out: Outgoing, peer: Peer) -> tuple[Message, Sequence[int]]:
        """What ``begin`` says besides, and file descriptors to go with it."""
        return {}, ()

    def finish(self, out: Outgoing) -> None:
        """Announce what is still on its way; there is no more data."""

    def keep(self, out: Outgoing, unchanged: Sequence[int]) -> None:
        """Nothing travels for these parameters."""

    def ended(self, out: Outgoing, *, committed: bool) -> None:
        """A transfer is over."""

    def forget(self) -> None:
        """A receiver that was dropped may be alive: touch no memory that it can see."""

    def release(self) -> None:
        """Give back what the strategy holds; called once, by `close`."""


class ReceiverHooks:
    """Steps of a receiver; by default nothing happens."""

    def invited(self, begin: Message, link: Connection) -> None:
        """Take what came with ``begin``, whatever becomes of the transfer."""

    def coming(self, incoming: Incoming, message: Message, link: Connection) -> None:
        """A request is on its way from its owner; may wait, by `wait_or_abort`."""

    def bring(
        self, incoming: Incoming, message: Message, blocks: Sequence[Block], link: Connection
    ) -> None:
        """Bring blocks that their owner has written to where they belong."""

    def dropped(self) -> None:
        """The transfer on its way in was given up, or the sender has gone."""

    def holds_memory(self) -> bool:
        """Whether tensors of this process may lie in the sender's memory."""
        return False
