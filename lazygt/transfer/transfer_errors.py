"""Errors of transfers. After any of these, every reader still has its old version.

TransferError (LazyGTError)
├── ManifestMismatch   a receiver expects other parameters, or has a newer version
├── ReceiverRefused    a receiver failed: a wrong checksum, no memory left
├── ReceiverDied       a receiver's process or connection ended
├── ReceiverFrozen     a receiver did not answer before the deadline
├── VersionHeld        a reader still holds tensors of the version that is to be overwritten
└── SenderGone         (in a receiver) the sender's process or connection ended
"""

from __future__ import annotations

from lazygt.errors import LazyGTError


class TransferError(LazyGTError):
    """A transfer failed; every receiver keeps its old version."""


class ManifestMismatch(TransferError):
    """A receiver can't take these parameters; raised before any data is sent.

    Attributes:
        receiver: the receiver's name.
    """

    def __init__(self, receiver: str, why: str) -> None:
        self.receiver, self.why = receiver, why
        super().__init__(f"receiver {receiver!r} can't take this transfer: {why}")


class ReceiverRefused(TransferError):
    """A receiver aborted: a checksum was wrong, or an error occurred there."""

    def __init__(self, receiver: str, why: str) -> None:
        self.receiver, self.why = receiver, why
        super().__init__(
            f"receiver {receiver!r} gave up: {why}. All receivers keep their old version; "
            f"the next transfer may be tried at once."
        )


class ReceiverDied(TransferError):
    """A receiver's process ended, or it closed its connection.

    Attributes:
        receiver: the receiver's name.
        pid: the receiver's process id.
    """

    def __init__(self, receiver: str, pid: int, during: str) -> None:
        self.receiver, self.pid = receiver, pid
        super().__init__(
            f"receiver {receiver!r} (pid {pid}) went away during {during}. The others keep their "
            f"old version; transfer again to go on without it."
        )


class ReceiverFrozen(TransferError):
    """Receivers did not answer before the deadline; they are dropped.

    Attributes:
        receivers: the receivers' names.
    """

    def __init__(self, receivers: tuple[str, ...], seconds: float, during: str) -> None:
        self.receivers = receivers
        super().__init__(
            f"receivers {', '.join(map(repr, receivers))} did not answer within {seconds:g} s, "
            f"during {during}. They are dropped and the others keep their old version; transfer "
            f"again, with a longer timeout if they are only slow."
        )


class VersionHeld(TransferError):
    """Code in a receiver still holds tensors of an old version in memory that is needed.

    Attributes:
        receivers: the receivers' names.
    """

    def __init__(self, receivers: tuple[str, ...], seconds: float) -> None:
        self.receivers = receivers
        super().__init__(
            f"receivers {', '.join(map(repr, receivers))} have held tensors of an old version for "
            f"{seconds:g} s, and its memory is needed for the new one. End the `with "
            f"receiver.reading()` block, and clone() what must outlive it."
        )


class SenderGone(TransferError):
    """The sender's process or connection ended; the receiver keeps its version."""
