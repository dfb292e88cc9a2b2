"""Interfaces of launchers and processes, and the boot configuration of a worker.

The boot configuration holds the session's secrets, so it travels through an inherited pipe and
never through the command line or the environment, which other users can read. The same pipe is
the worker's liveness pipe: end of file means that the client has ended.
"""

from __future__ import annotations

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lazygt.errors import ProtocolError
from lazygt.host.processes import Usage
from lazygt.net.channel import Address, Keys
from lazygt.net.mailbox import MailboxFiles
from lazygt.net.sockets import GroupSpec

WORKER_FACTORY = "lazygt.runtime.worker.worker:Worker"


@dataclass(frozen=True, slots=True)
class Boot:
    """Boot configuration of a worker process."""

    #: ``module:attribute`` of a callable that takes device, rank, world_size, upload and fetch, and
    #: returns a `MessageHandler`
    factory: str
    device: str  # ``cpu`` or ``cuda:0``, in the worker's own numbering
    rank: int
    world_size: int
    threads: int  # torch threads of this worker
    neighbours: int  # number of workers on this host, this one included
    client_pid: int  # the client's process; the worker ends with it
    token: str  # the session's secret, as hex
    data: Address
    control: Address
    keys: Keys | None  # CURVE keys of this worker, or None for a local channel
    max_message: int
    upload: int | None  # upload, fetch: descriptors of the arenas' memfds, or None
    fetch: int | None
    mailboxes: MailboxFiles | None  # descriptors of the mailboxes for small messages, or None
    directory: str  # the session's directory, removed by the worker if the client was killed
    group: GroupSpec | None  # how to join the group of workers, or None; group_number: its number
    rendezvous: Address | None  # address at which other ranks reach this one, or None
    loads_torch: bool  # False for handlers that need no torch (tests), which start much faster
    copier: str = ""  # ``module:attribute`` of a factory of `weight_copies.Copier`, or ""
    #: True to spin briefly for the next message before sleeping, if cores are free
    spins: bool = True
    #: descriptor of the memory for copies of its values that outlive it, or None
    snapshots: int | None = None
    group_number: int = 0
    #: descriptors of every rank's snapshot memory, for a spare process, which gets its rank when a
    #: worker has died; else None
    spare: tuple[int, ...] | None = None
    status: int | None = None  # descriptor of the session's status pages, or None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Boot:
        """Read the output of `to_bytes`.

        Raises:
            ProtocolError: the text was cut short or made by another version.
        """
        try:
            fields = json.loads(text)
            fields["data"], fields["control"] = (
                Address(**fields["data"]),
                Address(**fields["control"]),
            )
            fields["keys"] = Keys(**fields["keys"]) if fields["keys"] else None
            mailboxes = fields["mailboxes"]
            fields["mailboxes"] = MailboxFiles(**mailboxes) if mailboxes else None
            fields["group"] = GroupSpec(**fields["group"]) if fields["group"] else None
            fields["rendezvous"] = Address(**fields["rendezvous"]) if fields["rendezvous"] else None
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"the boot configuration cannot be read: {error}") from error

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that the process must inherit."""
        rendezvous = None if self.rendezvous is None else self.rendezvous.fd
        memory = self.upload, self.fetch, self.snapshots, self.status
        others = tuple(fd for fd in (*memory, rendezvous) if fd is not None)
        mailboxes = () if self.mailboxes is None else self.mailboxes.all
        return (self.data.fd, self.control.fd, *others, *mailboxes, *(self.spare or ()))


def load_named(name: str) -> Any:
    """Import and return the object named ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


class Process(ABC):
    """Started worker process, seen from the client."""

    pid: int
    pidfd: int
    """Readable when the process has ended."""

    @abstractmethod
    def status(self) -> str | None:
        """Return the exit status (``signal SIGKILL``, ``exit code 1``); None while it runs."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return its processor usage so far; a constant if it cannot be measured."""

    @abstractmethod
    def stderr_tail(self) -> str:
        """Return the last few KiB of its standard output and error."""

    @abstractmethod
    def close_pipe(self) -> None:
        """Close the liveness pipe: the worker exits at once if its interpreter still runs."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM."""

    @abstractmethod
    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""

    @abstractmethod
    def wait(self, seconds: float) -> bool:
        """Wait for the process to end for at most ``seconds``; True if it has ended."""

    @abstractmethod
    def close(self) -> None:
        """Close the descriptors. Idempotent; the process must have ended."""


class Launcher(ABC):
    """Starter of worker processes. `start` does not wait for them to be ready."""

    @abstractmethod
    def start(self, boot: Boot, environment: Mapping[str, str]) -> Process:
        """Start one worker with these variables added to the environment.

        Raises:
            OSError: the process could not be started.
        """
